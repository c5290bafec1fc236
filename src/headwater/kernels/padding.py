"""Rows whose width is no multiple of a vector's, padded with zeros."""

from __future__ import annotations

import numpy as np

from headwater.kernels.compiling import part
from headwater.kernels.vectors import LANES


@part
def padded(n):
    """Return the elements of whole vectors that hold `n`."""
    return -(-n // LANES) * LANES


@part
def padded_rows(array, at, rows, width):
    """Copy adjacent rows, `array` from `at` on, with each padded to whole vectors."""
    row = padded(width)
    out = np.zeros(rows * row, array.dtype)
    for i in range(rows):
        for c in range(width):
            out[i * row + c] = array[at + i * width + c]
    return out


@part
def unpadded_into(array, at, lines, rows, width):
    """Copy padded rows back to where they came from."""
    row = padded(width)
    for i in range(rows):
        for c in range(width):
            array[at + i * width + c] = lines[i * row + c]
