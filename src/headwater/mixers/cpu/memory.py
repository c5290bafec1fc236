"""A recurrent layer's weights and state memory as arrays for kernels.

R rows of the state memory, C channels, W taps of the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwater.kernels.arrays import flat
from headwater.kernels.vectors import LANES
from headwater.mixers.convolution import ShortConvolution
from headwater.mixers.recurrent import LayerState

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Memory:
    """All rows of one layer's state memory, flat, and the elements from a row to the next."""

    states: Array
    state_row: int
    stored: Array  # inputs of the convolution; empty if there is none
    stored_row: int

    @classmethod
    def of(cls, state: LayerState) -> Memory:
        conv = torch.empty(0, 0) if state.conv is None else state.conv
        return cls(flat(state.recurrent), state.recurrent.stride(0), flat(conv), conv.stride(0))


def padded(vector: Tensor) -> Array:
    """Copy a vector, float32, followed by zeros: whole vectors of a kernel can be read from any of its elements."""
    array: Array = torch.cat((vector.float().flatten(), vector.new_zeros(LANES, dtype=torch.float32))).numpy()
    return array


def taps_of(convolution: ShortConvolution) -> Array:
    """Return the taps of all channels, the oldest input's first, then the biases: rows padded by a vector of zeros."""
    rows_WC = [*convolution.weight_WC]
    bias_C = torch.zeros_like(rows_WC[0]) if convolution.bias_C is None else convolution.bias_C
    return np.concatenate([padded(row_C) for row_C in (*rows_WC, bias_C)])
