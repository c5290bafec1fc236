"""Tensors as arrays for kernels: one dimension, from a tensor's first element on, without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def flat(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return the memory from a tensor's first element to its last one, at any strides: float32, or int16 for bfloat16.

    The element at indices (i, j, …) is at the sum of index times stride. The array is valid as long as the tensor.
    """
    extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    line = tensor.detach().as_strided((extent if tensor.numel() else 0,), (1,))
    line = line.view(torch.int16) if line.dtype == torch.bfloat16 else line
    array: np.ndarray[Any, Any] = line.numpy()
    return array
