"""Triton kernels that have no folder of their own, and where all are used; a mixer's are in its folder's gpu.py.

Triton comes with CUDA builds of torch, and nothing that needs it is imported where a model is on the CPU. Tests run the
kernels in Triton's interpreter. Tile shapes are fixed, and one program works through one sequence in order, so a
sequence's bits depend neither on its company nor on where slices are cut.
"""

from __future__ import annotations

import torch

DEVICES = ("cuda",)  # types of those that kernels run on


def has_kernels(device: torch.device | str) -> bool:
    """Whether layers on that device are computed by these kernels."""
    return torch.device(device).type in DEVICES
