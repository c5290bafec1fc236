"""Random integers that are the same on every machine and in every version of Python: SplitMix64, and fixed point."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from math import isqrt
from typing import TypeVar

T = TypeVar("T")
BITS = 64
MASK = (1 << BITS) - 1
GOLDEN = 0x9E3779B97F4A7C15
FRACTION = 16  # bits after the point of a logarithm
ONE = 1 << FRACTION
LN2 = 45_426  # ln 2 in units of 1/ONE
ROOT_BITS = 62


def _roots() -> list[int]:
    """Return 2^(1/2), 2^(1/4), ... as fixed-point numbers of ROOT_BITS bits."""
    roots = [isqrt(2 << 2 * ROOT_BITS)]
    while len(roots) < FRACTION:
        roots.append(isqrt(roots[-1] << ROOT_BITS))
    return roots


ROOTS = _roots()


def log2(number: int) -> int:
    """Return the binary logarithm of an integer of at least 1, in units of 1/ONE, rounded down."""
    whole = number.bit_length() - 1
    mantissa, logarithm = (number << 63) >> whole, whole
    for _ in range(FRACTION):
        mantissa = mantissa * mantissa >> 63
        bit = mantissa >> BITS
        logarithm, mantissa = 2 * logarithm + bit, mantissa >> bit
    return logarithm


def exp2(logarithm: int) -> int:
    """Return 2 to the power of a logarithm of at least 0 in units of 1/ONE, rounded down."""
    product = 1 << ROOT_BITS
    for place, root in enumerate(ROOTS, 1):
        if logarithm >> (FRACTION - place) & 1:
            product = product * root >> ROOT_BITS
    return (product << (logarithm >> FRACTION)) >> ROOT_BITS


def mixed(number: int) -> int:
    """Return the 64 bits that SplitMix64 makes of its counter."""
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & MASK
    return number ^ number >> 31


class Dice:
    """Random draws of SplitMix64 (Steele, Lea and Flood 2014, figure 15), in integers only.

    Python promises equal sequences in later versions only for `random.random()`, and `math.log` differs between
    platforms. Equal keys give equal draws, whatever was drawn with other keys.
    """

    def __init__(self, *key: int) -> None:
        self._state = 0
        for number in key:
            self._state = mixed((self._state ^ number & MASK) + GOLDEN & MASK)

    def bits(self) -> int:
        """Return 64 random bits."""
        self._state = self._state + GOLDEN & MASK
        return mixed(self._state)

    def below(self, bound: int) -> int:
        """Return a number from 0 to bound - 1."""
        return self.bits() * bound >> BITS

    def between(self, least: int, most: int) -> int:
        return least + self.below(most - least + 1)

    def happens(self, permille: int) -> bool:
        return self.below(1000) < permille

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def exponential(self, mean: int) -> int:
        """Return a number of an exponential distribution, rounded down."""
        return mean * (BITS * ONE - log2(self.bits() | 1)) * LN2 >> 2 * FRACTION

    def around(self, median: int, spread: int) -> int:
        """Return a log-normal number of at least 1; spread: percent of an octave, one standard deviation.

        The normal variable is the sum of 12 uniform ones, less 6.
        """
        words = [self.bits() for _ in range(3)]
        normal = sum(word >> shift & 0xFFFF for word in words for shift in (0, 16, 32, 48)) - 6 * ONE
        return max(1, exp2(max(0, log2(median) + normal * spread // 100)))

    def turns(self, mean: int) -> int:
        """Return a number of at least 1 of a geometric distribution with that mean."""
        count = 1
        while self.below(mean):
            count += 1
        return count

    def choose(self, sums: Sequence[int]) -> int:
        """Return a number i in proportion to the i-th of the weights whose running sums are given."""
        return bisect_right(sums, self.below(sums[-1]))


@cache
def zipf(count: int, exponent: int) -> tuple[int, ...]:
    """Return running sums of the weights 1/r^(exponent/100) of the ranks from 1 to `count`, for `choose`."""
    least = log2(1 << 40)
    return tuple(accumulate(exp2(max(0, least - log2(rank) * exponent // 100)) for rank in range(1, count + 1)))
