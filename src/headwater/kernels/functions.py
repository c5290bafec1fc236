"""Functions of vectors, as sums of products whose order the source fixes: e^x, sigmoid, silu, softplus.

Rows of one head are padded with zeros to whole vectors of float32; their copies and norms are here, too.
"""

from __future__ import annotations

import math

import numpy as np

from headwater.kernels.compiling import part
from headwater.kernels.vectors import (
    LANES,
    fill,
    fma,
    load,
    load_some,
    maximum,
    nearest,
    power_of_two,
    square_root,
    store,
    sum_lanes,
)

LOG2_E = math.log2(math.e)
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # ln 2 in two parts; n · high is exact for |n| < 2^9
EXP_RANGE = 87.3  # e^±87.3 are normal numbers
# e^r = 1 + r + r² (…) for |r| ≤ ln(2) / 2: the Taylor series, its last coefficients adjusted for the interval
EXP_SERIES = tuple(np.float32(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2,
                                            1.6666665459e-1, 5.0000001201e-1))  # fmt: skip
ATANH_SERIES = tuple(np.float32(1 / n) for n in (15, 13, 11, 9, 7, 5, 3, 1))
L2_EPS = 1e-6  # of the norm of queries and keys


@part
def _polynomial(x, coefficients):
    """Return the polynomial of x with these coefficients, that of the highest power first."""
    total = fill(coefficients[0])
    for i in range(1, len(coefficients)):
        total = fma(total, x, fill(coefficients[i]))
    return total


@part
def exp(x):
    """Return e^x, x within ±87.3 (beyond, the value at that end): e^x = 2^n e^r, with |r| ≤ ln(2) / 2."""
    x = maximum(fill(np.float32(-EXP_RANGE)), x)
    x = fill(np.float32(0)) - maximum(fill(np.float32(-EXP_RANGE)), fill(np.float32(0)) - x)
    n = nearest(x * fill(np.float32(LOG2_E)))
    r = fma(n, fill(np.float32(-LN2_HIGH)), x)
    r = fma(n, fill(np.float32(-LN2_LOW)), r)
    return fma(_polynomial(r, EXP_SERIES), r * r, r + fill(np.float32(1))) * power_of_two(n)


@part
def sigmoid(x):
    """Return 1 / (1 + e^-x)."""
    one = fill(np.float32(1))
    return one / (one + exp(fill(np.float32(0)) - x))


@part
def silu(x):
    """Return x · sigmoid(x)."""
    return x / (fill(np.float32(1)) + exp(fill(np.float32(0)) - x))


@part
def softplus(x):
    """Return log(1 + e^x) = max(x, 0) + log1p(e^-|x|), where log1p(u) = 2 atanh(u / (2 + u))."""
    zero = fill(np.float32(0))
    u = exp(zero - maximum(x, zero - x))
    s = u / (fill(np.float32(2)) + u)
    return maximum(x, zero) + (s + s) * _polynomial(s * s, ATANH_SERIES)


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
