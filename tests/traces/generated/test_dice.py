"""Draws are integers: equal keys give equal draws everywhere, and distributions are what they are called."""

import math
from collections import Counter
from statistics import mean, median, pstdev

import pytest

from headwater.traces.generated.dice import ONE, Dice, exp2, log2, zipf

N = 4000


def test_splitmix64_is_the_published_one() -> None:
    """The first numbers of the seed 1234567, as in Rosetta Code's task on SplitMix64."""
    dice = Dice()
    dice._state = 1234567
    assert [dice.bits() for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def first_bits(*key: int) -> tuple[int, ...]:
    dice = Dice(*key)
    return tuple(dice.bits() for _ in range(3))


def test_equal_keys_give_equal_draws_and_others_do_not() -> None:
    draws = {key: first_bits(*key) for key in [(1, 2), (2, 1), (1,), (1, 2, 0), ()]}
    assert len(set(draws.values())) == len(draws)
    assert draws[1, 2] == first_bits(1, 2)


@pytest.mark.parametrize("number", [1, 2, 3, 1000, 2**40 + 12345, 2**63])
def test_logarithms_and_powers(number: int) -> None:
    assert log2(number) == pytest.approx(ONE * math.log2(number), abs=1.001)
    assert exp2(log2(number)) == pytest.approx(number, rel=2e-5, abs=1)


def test_uniform_draws_are_within_their_bounds() -> None:
    dice = Dice(1)
    counts = Counter(dice.between(3, 6) for _ in range(N))
    assert sorted(counts) == [3, 4, 5, 6]
    assert min(counts.values()) > 0.9 * N / 4
    assert mean(dice.happens(250) for _ in range(N)) == pytest.approx(0.25, abs=0.03)


def test_exponential_draws_have_their_mean_and_spread() -> None:
    dice = Dice(2)
    draws = [dice.exponential(10_000) for _ in range(N)]
    assert mean(draws) == pytest.approx(10_000, rel=0.06)
    assert pstdev(draws) == pytest.approx(10_000, rel=0.08)


def test_log_normal_draws_have_their_median_and_spread() -> None:
    dice = Dice(3)
    draws = [dice.around(1000, 50) for _ in range(N)]
    assert median(draws) == pytest.approx(1000, rel=0.05)
    assert pstdev([math.log2(one) for one in draws]) == pytest.approx(0.5, rel=0.05)
    assert {dice.around(700, 0) for _ in range(5)} <= {699, 700}


def test_numbers_of_turns_have_their_mean() -> None:
    dice = Dice(4)
    draws = [dice.turns(6) for _ in range(N)]
    assert min(draws) == 1
    assert mean(draws) == pytest.approx(6, rel=0.06)


@pytest.mark.parametrize("exponent", [50, 100, 140])
def test_zipf_has_its_slope(exponent: int) -> None:
    """The slope of log frequency over log rank, by least squares over the first 20 ranks."""
    dice, sums = Dice(5, exponent), zipf(200, exponent)
    counts = Counter(dice.choose(sums) for _ in range(40_000))
    points = [(math.log(rank), math.log(counts[rank - 1])) for rank in range(1, 21)]
    x, y = (mean(axis) for axis in zip(*points, strict=True))
    slope = sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)
    assert slope == pytest.approx(-exponent / 100, abs=0.08)
