"""Arrivals have the rate and the burstiness that were asked for, and are the same for the same seed."""

from __future__ import annotations

import random
import statistics
from itertools import islice, pairwise

import pytest

from headwater.load.session import Session, Turn, as_recorded, interleaved, scheduled
from headwater.traces.arrivals import PROCESSES

N = 20_000


def times(process, rate, cv=2.0, seed=0, n=N):
    return list(islice(PROCESSES[process](rate, cv, random.Random(seed)), n))


@pytest.mark.parametrize("rate", [0.2, 50.0])
@pytest.mark.parametrize(
    ("process", "cv", "spread"), [("poisson", 9.0, 1.0), ("gamma", 1.0, 1.0), ("gamma", 3.0, 3.0), ("constant", 9.0, 0)]
)
def test_the_rate_and_the_spread_of_gaps(process, cv, spread, rate):
    arrivals = times(process, rate, cv)
    gaps = [b - a for a, b in pairwise([0.0, *arrivals])]
    assert min(gaps) >= 0
    assert arrivals[-1] / N == pytest.approx(1 / rate, rel=0.06)
    assert statistics.stdev(gaps) * rate == pytest.approx(spread, rel=0.1, abs=1e-6)


@pytest.mark.parametrize("process", ["poisson", "gamma"])
def test_equal_seeds_give_equal_arrivals_and_others_do_not(process):
    assert times(process, 3.0, seed=1, n=50) == times(process, 3.0, seed=1, n=50)
    assert times(process, 3.0, seed=1, n=50) != times(process, 3.0, seed=2, n=50)


def session(name, n, *at):
    return Session(name, tuple(Turn(at=at[i] if at else None) for i in range(n)))


def test_sessions_take_turns_and_keep_their_own_order():
    order = [(s.id, turn) for s, turn in interleaved([session("a", 3), session("b", 1), session("c", 2)], at_once=2)]
    assert order == [("a", 0), ("b", 0), ("a", 1), ("c", 0), ("a", 2), ("c", 1)]


def test_each_turn_has_an_arrival_of_its_own():
    calls = list(scheduled(iter([1.0, 2.0, 4.0]), [session("a", 2), session("b", 1)], at_once=1))
    assert [(call.due, call.session.id, call.turn) for call in calls] == [(1.0, "a", 0), (2.0, "a", 1), (4.0, "b", 0)]


def test_recorded_times_begin_at_0_and_are_scaled():
    calls = as_recorded([session("a", 2, 100.0, 130.0), session("b", 1, 110.0)], speed=10.0)
    assert [(call.due, call.session.id, call.turn) for call in calls] == [(0.0, "a", 0), (1.0, "b", 0), (3.0, "a", 1)]
    assert [call.turn for call in as_recorded([session("a", 3, 2.0, 1.0, 3.0)], 1.0)] == [
        0,
        1,
        2,
    ]  # clocks may step back
    with pytest.raises(ValueError, match="c has no recorded times"):
        as_recorded([session("c", 1)], 1.0)
