"""Triton kernels of all mixers, and the classes that compute layers with them. They were tested on an H100.

Triton comes with CUDA builds of torch; only this package imports it, and only models on a GPU import this package's
modules (`models/build.py` chooses them once). Tests run the kernels in Triton's interpreter. Tile shapes are fixed, and
one program processes one sequence in order, so a sequence's bits depend neither on the other sequences of a step nor on
where slices are cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNED = 16  # bytes

DEVICES = ("cuda",)  # types of devices that the kernels run on


def has_kernels(device: torch.device | str) -> bool:
    """Return whether layers on that device are computed by these kernels."""
    return torch.device(device).type in DEVICES


def dense(x: Tensor) -> Tensor:
    """Return x contiguous, at an address that is a multiple of 16 bytes; itself, if it is.

    Triton compiles a kernel again for arguments at other addresses, and its sums may then have another order. One
    row of a wider tensor is contiguous wherever it stands.
    """
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNED == 0 else x.clone()
