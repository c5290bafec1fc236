"""Layers computed with kernels that numba compiles: decoding rows of all, and prompts in Gated DeltaNet.

Only models on a CPU import this package's modules, and only if numba is installed: `models/build.py` chooses them once.
"""
