"""Rows padded with zeros to whole vectors of float32: copies of them, and norms of one head's channels."""

from __future__ import annotations

import numpy as np

from headwater.kernels.compiling import part
from headwater.kernels.vectors import LANES, fill, fma, load, load_some, square_root, store, sum_lanes

L2_EPS = 1e-6  # of the norm of queries and keys


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


@part
def dot(a, b, n):
    """Return Σ a b over the first `n` elements of padded vectors, in each lane."""
    total = fill(np.float32(0))
    for c in range(0, n, LANES):
        total = fma(load(a, c), load(b, c), total)
    return fill(sum_lanes(total))


@part
def unit_into(x, n, eps, scale):
    """Divide x by √(Σx² + eps) and multiply it by `scale`, in place."""
    factor = fill(np.float32(scale)) / square_root(dot(x, x, n) + fill(np.float32(eps)))
    for c in range(0, n, LANES):
        store(x, c, load(x, c) * factor)


@part
def inverse_rms(x, at, n, eps):
    """Return 1 / √(mean(x²) + eps) of `n` elements from `at` on, in each lane."""
    total = fill(np.float32(0))
    for c in range(at, at + n, LANES):
        some = load_some(x, c, min(LANES, at + n - c))
        total = fma(some, some, total)
    mean = fill(sum_lanes(total)) / fill(np.float32(n))
    return fill(np.float32(1)) / square_root(mean + fill(np.float32(eps)))
