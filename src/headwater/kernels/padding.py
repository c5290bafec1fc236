"""Rows whose width is no multiple of a vector's, padded with zeros."""

from __future__ import annotations

import numpy as np

from headwater.kernels.compiling import part
from headwater.kernels.vectors import LANES, fill, load_some, store


@part
def padded(n):
    """Return the elements of whole vectors that hold `n`."""
    return -(-n // LANES) * LANES


@part
def fill_into(array, vector):
    """Write a vector to all places of a padded array."""
    for c in range(0, len(array), LANES):
        store(array, c, vector)


@part
def copy_into(out, array, at, n, scale):
    """Write `n` elements of an array from `at` on, times `scale`, to a padded float32 one: zeros stand beyond them."""
    for c in range(0, n, LANES):
        store(out, c, load_some(array, at + c, min(LANES, n - c)) * fill(np.float32(scale)))


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
