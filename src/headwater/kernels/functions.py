"""Functions of vectors: e^x, sigmoid, silu and softplus, as sums of products whose order the source fixes."""

from __future__ import annotations

import math

import numpy as np

from headwater.kernels.compiling import part
from headwater.kernels.vectors import fill, fma, maximum, nearest, power_of_two

LOG2_E = math.log2(math.e)
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # ln 2 in two parts; n · high is exact for |n| < 2^9
EXP_RANGE = 87.3  # e^±87.3 are normal numbers
# e^r = 1 + r + r² (…) for |r| ≤ ln(2) / 2: the Taylor series, its last coefficients adjusted for the interval
EXP_SERIES = tuple(np.float32(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2,
                                            1.6666665459e-1, 5.0000001201e-1))  # fmt: skip
ATANH_SERIES = tuple(np.float32(1 / n) for n in (15, 13, 11, 9, 7, 5, 3, 1))


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
