"""Triton kernels of what recurrent layers share, and the table of those that a mixer has of its own.

Triton comes with CUDA builds of torch; nothing here is imported where the model is on the CPU. Tests run the kernels in
Triton's interpreter. Tile shapes are fixed, and one program works through one sequence in order, so a sequence's bits
depend neither on its company nor on where slices are cut.
"""
