"""Layers computed with kernels that numba compiles: decoding rows by kernels, prefill by torch.

Only models on a CPU import this package's modules, and only if numba is installed: `models/build.py` chooses them once.
"""
