"""Requests come in their sessions' order whatever the load, and equally for an equal seed."""

import statistics
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.errors import ConfigError
from headwater.traces.arrivals import (
    DEFAULT_RATE,
    DEFAULT_THINK_SECONDS,
    Closed,
    Open,
    Poisson,
    Recorded,
    in_order,
    natural,
)
from headwater.traces.loads import make_arrivals
from headwater.traces.request import Request, Trace
from tests.support import examples


def request(session, at=None, think=None, number=0):
    return Request(session, b"0123" * (1 + number), 1 + number, 1, 1 + number, at, think)


def trace(*requests):
    return Trace("t", requests)


def sessions(n, length, **known):
    """Sessions one after the other, as a file has them."""
    return trace(*(request(f"s{s}", number=number, **known) for s in range(n) for number in range(length)))


def play(arrivals, seconds):
    """(time, request) of all, if answers take that long."""
    running, came, now = [], [], 0.0
    while len(arrivals) or running:
        due = arrivals.due()
        ends = min(running, default=(float("inf"), None), key=lambda one: one[0])
        if due is not None and due < ends[0]:
            now = max(now, due)
            one = arrivals.take()
            came.append((now, one))
            running.append((now + seconds, one))
        else:
            running.remove(ends)
            now = ends[0]
            arrivals.answered(ends[1], now)
    assert arrivals.due() is None
    return came


# -- recorded ------------------------------------------------------------------


def test_recorded_requests_come_at_their_times_from_0_on():
    arrivals = make_arrivals(trace(request("a", 105.0), request("b", 100.0), request("a", 107.0, number=1)))
    assert len(arrivals) == 3
    came = play(arrivals, 0.5)
    assert [(at, one.session) for at, one in came] == [(0.0, "b"), (5.0, "a"), (7.0, "a")]
    assert len(arrivals) == 0


def test_a_recorded_request_waits_for_the_answer_before_it():
    came = play(Recorded().over(trace(request("a", 0.0), request("a", 1.0), request("b", 2.0))), 10.0)
    assert [(at, one.session) for at, one in came] == [(0.0, "a"), (2.0, "b"), (10.0, "a")]


def test_twice_the_speed_is_half_the_time():
    of = trace(request("a", 0.0), request("b", 8.0), request("c", 20.0))
    assert [at for at, _ in in_order(make_arrivals(of, "recorded(speed=2)"))] == [0.0, 4.0, 10.0]


def test_without_recorded_times_there_are_none_to_go_by():
    with pytest.raises(ConfigError, match=r"1 of 2 requests have no recorded time: give a rate"):
        Recorded().over(trace(request("a", 0.0), request("b")))


# -- poisson -------------------------------------------------------------------


def test_sessions_begin_at_the_rate_and_think_as_long():
    arrivals = make_arrivals(sessions(4000, 2), "poisson(rate=4, think=3)", seed=1)
    times = {}
    for at, one in play(arrivals, 0.0):
        times.setdefault(one.session, []).append(at)
    starts = sorted(first for first, _ in times.values())
    gaps = [b - a for a, b in pairwise(starts)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 4, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 4, rel=0.08)
    thinks = [second - first for first, second in times.values()]
    assert statistics.fmean(thinks) == pytest.approx(3, rel=0.05)
    assert statistics.stdev(thinks) == pytest.approx(3, rel=0.08)


def test_sessions_begin_in_the_files_order():
    began = [one.session for _, one in in_order(Poisson(2.0).over(sessions(50, 3))) if one.prompt_tokens == 1]
    assert began == [f"s{number}" for number in range(50)]


def test_single_number_is_a_rate():
    of = sessions(20, 3)
    assert list(in_order(make_arrivals(of, "2.5"))) == list(in_order(Poisson(2.5).over(of)))


def test_recorded_think_times_begin_at_the_answer():
    of = trace(request("a", think=9.0), request("a", think=4.0), request("a", think=0.5))
    (first, _), (second, _), (third, _) = play(Poisson(1.0).over(of), 10.0)
    assert (second - first, third - second) == (pytest.approx(14.0), pytest.approx(10.5))


def test_recorded_times_stay_as_far_apart_where_sessions_begin_elsewhere():
    of = trace(request("a", 50.0), request("a", 57.0), request("a", 58.0))
    (first, _), (second, _), (third, _) = play(Poisson(1.0).over(of), 3.0)
    assert (second - first, third - first) == (pytest.approx(7.0), pytest.approx(10.0))


def test_given_think_times_go_before_recorded_ones():
    of = trace(request("a", 50.0, 9.0), request("a", 57.0, 9.0))
    (first, _), (second, _) = play(Poisson(1.0, think=0.0).over(of), 2.0)
    assert second - first == pytest.approx(2.0)


def test_sessions_without_times_are_interleaved():
    of = sessions(60, 4)
    assert natural(of) == Poisson(DEFAULT_RATE)
    order = [one.session for _, one in in_order(make_arrivals(of))]
    assert order != [one.session for one in of.requests]
    assert len(set(order[:40])) > 12
    assert DEFAULT_THINK_SECONDS > 0


# -- closed --------------------------------------------------------------------


def test_no_more_clients_ask_at_once_than_there_are():
    arrivals = make_arrivals(sessions(7, 3), "closed(3)")
    open_now = []
    for _ in range(7):
        while arrivals.due() is not None:
            open_now.append(arrivals.take())
        assert len(open_now) <= 3
        assert len({one.session for one in open_now}) == len(open_now)
        arrivals.answered(open_now.pop(0), 1.0)
    assert len(arrivals) == 21 - 7 - 2


def test_a_client_takes_the_next_session_when_its_last_is_done():
    came = play(Closed(2).over(sessions(3, 2)), 1.0)
    assert [(at, one.session) for at, one in came] == [
        (0.0, "s0"),
        (0.0, "s1"),
        (1.0, "s0"),
        (1.0, "s1"),
        (2.0, "s2"),
        (3.0, "s2"),
    ]


# -- open ----------------------------------------------------------------------


def gaps_within(of, load, seconds=0.0):
    """Times between two requests of a session."""
    times = {}
    for at, one in play(make_arrivals(of, load, seed=1), seconds):
        times.setdefault(one.session, []).append(at)
    return [b - a for own in times.values() for a, b in pairwise(own)]


def test_in_an_open_loop_no_request_waits_for_an_answer():
    of = sessions(30, 4)
    for load in ("open(sessions=2, think=5)", "open(rate=8, sessions=2, think=5)"):
        assert play(make_arrivals(of, load, 5), 1000.0) == play(make_arrivals(of, load, 5), 0.0)
    assert play(Poisson(2.0, 5.0).over(of, 5), 1000.0) != play(Poisson(2.0, 5.0).over(of, 5), 0.0)


def test_rate_keeps_the_order_of_think_times():
    of = sessions(400, 10)
    at_rate = play(Open(8.0, sessions=10.0, think=5.0).over(of, 3), 0.7)
    order = [one for _, one in in_order(Poisson(10.0, 5.0).over(of, 3))]
    assert [one for _, one in at_rate] == order
    gaps = [b - a for (a, _), (b, _) in pairwise(at_rate)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 8, rel=0.08)


@pytest.mark.parametrize("cv", [0.0, 0.3, 1.0, 2.0])
def test_think_times_vary_as_given(cv):
    gaps = gaps_within(sessions(1000, 6), f"open(sessions=2, think=5, cv={cv})")
    assert statistics.fmean(gaps) == pytest.approx(5, rel=0.06)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.08, abs=1e-9)


# -- all of them ---------------------------------------------------------------

LOADS = ["recorded", "recorded(speed=3)", "1.5", "poisson(rate=9,think=0)", "closed(4)", "closed(clients=2,think=2)"]


@pytest.mark.parametrize("load", LOADS)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), min_size=1, max_size=30), st.integers(0, 20))
@settings(max_examples=examples(25))
def test_a_session_keeps_its_order_and_waits_for_its_answers(load, drawn, seconds):
    of = trace(*(request(str(name), at, number=number) for number, (name, at) in enumerate(drawn)))
    came = play(make_arrivals(of, load, seed=3), seconds)
    assert len(came) == len(of.requests)
    assert [at for at, _ in came] == sorted(at for at, _ in came)
    for name in {one.session for one in of.requests}:
        own = [(at, one) for at, one in came if one.session == name]
        assert [one for _, one in own] == [one for one in of.requests if one.session == name]
        assert all(b - a >= seconds - 1e-9 for (a, _), (b, _) in pairwise(own))


@pytest.mark.parametrize("cv", [1e-6, 1e-7, 1e-160, 5e-324])
def test_think_times_of_a_tiny_variation_are_constant(cv):
    gaps = gaps_within(sessions(10, 6), f"open(sessions=2, think=5, cv={cv!r})")
    assert gaps == pytest.approx([5.0] * len(gaps), rel=1e-5)


@pytest.mark.parametrize("load", [*LOADS, "open(think=2)", "open(rate=3, cv=0.2)", None])
def test_equal_seeds_give_equal_loads(load):
    of = sessions(20, 3, at=1.0)
    assert play(make_arrivals(of, load, 5), 0.3) == play(make_arrivals(of, load, 5), 0.3)


def test_other_seeds_give_other_loads():
    of = sessions(20, 3)
    assert play(make_arrivals(of, "2.0", 5), 0.3) != play(make_arrivals(of, "2.0", 6), 0.3)


def test_drawn_arrivals_are_independent_of_answer_times():
    def starts(seconds):
        return [at for at, one in play(make_arrivals(sessions(30, 2), "2.0", 5), seconds) if one.prompt_tokens == 1]

    assert starts(0.0) == pytest.approx(starts(50.0))


@pytest.mark.parametrize(
    ("spelling", "what"),
    [
        ("hourly", "arrival 'hourly' is unknown; there are closed, like, open, poisson, recorded"),
        ("poisson(rate=0)", "rate is 0, must be a number above 0"),
        ("recorded(speed=-1)", "speed is -1, must be a number above 0"),
        ("closed(0)", "clients is 0, must be a number above 0"),
        ("closed", "cannot be made"),
        ("poisson('fast')", "rate is 'fast', must be a number"),
        ("0", "rate is 0.0, must be a number above 0"),
        ("open(rate=0)", "rate is 0, must be a number above 0"),
        ("open(cv=-1)", "cv is -1, must be a number from 0 to 100"),
        ("open(cv=1000)", "cv is 1000, must be a number from 0 to 100"),
        ("open(cv=None)", "cv is None, must be a number"),
        ("poisson(think=-2)", "think is -2, must be a number of 0 or more"),
    ],
)
def test_invalid_load_is_an_error(spelling, what):
    with pytest.raises(ConfigError, match=what.replace("(", r"\(")):
        make_arrivals(sessions(2, 2, at=1.0), spelling)
