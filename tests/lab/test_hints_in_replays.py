"""Hints that a replayed trace carries, and the hits that they are worth."""

from dataclasses import replace

import pytest

from headwater.cache.eviction.headwater import Headwater
from headwater.cache.prefix_cache import PrefixCache
from headwater.errors import ConfigError
from headwater.lab.cost import StepCost, load_device
from headwater.lab.replay import hinted, replay, run_grid
from headwater.lab.serving import Engine
from headwater.lab.setup import Hints, Setup
from headwater.models.profiles import PROFILES
from headwater.plan import Retention
from headwater.traces.arrivals import Arrivals, natural
from headwater.traces.read import make_trace
from headwater.traces.request import Trace
from tests.lab.workload import SYSTEM, workload

PROFILE = PROFILES["qwen3.5-9b"]
QUEUED = Engine(StepCost(PROFILE, load_device("h100")))
engines = pytest.mark.parametrize("engine", [None, QUEUED], ids=["one by one", "queued"])


def make_natural(trace: Trace) -> Arrivals:
    return natural(trace).over(trace)


@pytest.mark.parametrize(
    ("text", "hints"),
    [
        ("off", None),
        ("ended", Hints(ended=True)),
        ("5m", Hints(ttl="5m")),
        ("1h", Hints(ttl="1h")),
        ("ended+1h", Hints(True, "1h")),
        ("high", Hints(high=True)),
        ("5m+high+ended", Hints(True, "5m", True)),
        ("5m+ended", Hints(True, "5m")),
    ],
)
def test_hints_are_spelled(text: str, hints: Hints | None) -> None:
    assert Hints.read(text) == hints
    assert hints is None or Hints.read(str(hints)) == hints


@pytest.mark.parametrize("text", ["", "2h", "high+high", "high+low", "ended+ended", "5m+1h", "off+ended", "ended 5m"])
def test_other_hints_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be off, or ended, high, 5m, 1h"):
        Hints.read(text)


def test_the_last_request_of_each_session_ends_it() -> None:
    trace = Hints(ended=True).given(workload(5, seed=1))
    ends = [request.session for request in trace.requests if request.ended]
    assert sorted(ends) == sorted({request.session for request in trace.requests})
    last = {request.session: request for request in trace.requests}
    assert all(request.ended for request in last.values())


def test_every_fourth_session_has_high_priority_and_its_hits_are_a_figure() -> None:
    trace = workload(60, seed=3, rate=0.1)
    given = Hints(high=True).given(trace)
    sessions = list(dict.fromkeys(request.session for request in trace.requests))
    assert {request.session for request in given.requests if request.priority == 1} == set(sessions[::4])
    assert {request.priority for request in given.requests} == {0, 1}
    setup = Setup(PROFILE, 1_000_000_000, eviction="headwater", hints=Hints(high=True))
    row = replay(given, setup, make_natural(given)).row
    without = replay(trace, replace(setup, hints=None), make_natural(trace)).row
    assert without.high_hit_rate is None
    assert row.high_hit_rate is not None
    assert row.high_hit_rate > row.token_hit_rate


def test_a_retry_ends_no_conversation() -> None:
    trace = make_trace("generated(2, requests=400)")
    retries = [request for request in Hints(ended=True).given(trace).requests if request.retry]
    assert retries
    assert not any(request.ended for request in retries)


def test_time_to_live_is_set_at_the_end_of_system_and_tools() -> None:
    trace = workload(2, seed=1)
    assert all(r.boundaries.retained == (Retention(SYSTEM, 300.0),) for r in Hints(ttl="5m").given(trace).requests)
    unknown = Trace(
        "made", tuple(replace(r, boundaries=replace(r.boundaries, system_end=None)) for r in trace.requests)
    )
    assert Hints(ttl="5m").given(unknown).requests == unknown.requests


@pytest.mark.parametrize("jobs", [pytest.param(1, marks=pytest.mark.full), 2])
@engines
def test_ended_conversations_free_memory_for_open_ones(engine: Engine | None, jobs: int) -> None:
    setups = [Setup(PROFILE, 1_000_000_000, eviction="headwater", hints=hints) for hints in (None, Hints(ended=True))]
    if engine is not None:
        setups = [replace(setup, memory=3_000_000_000) for setup in setups]
    results = run_grid(workload(60, seed=3, rate=0.1), setups, make_natural, engine, jobs)
    without, ended = (result.row.hit_tokens for _, result in sorted(results, key=lambda one: one[0]))
    assert ended > without


@engines
def test_a_time_to_live_lapses_by_the_time_of_the_trace(engine: Engine | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy reads the seconds of arrivals."""
    seconds = list[float]()
    victim = Headwater.victim
    monkeypatch.setattr(
        Headwater, "victim", lambda self, *given: (seconds.append(self.clock()), victim(self, *given))[1]
    )
    trace, setup = workload(60, seed=3, rate=0.1), Setup(PROFILE, 1_000_000_000, eviction="headwater")
    replay(trace, replace(setup, memory=3_000_000_000) if engine else setup, make_natural(trace), engine)
    assert seconds == sorted(seconds)
    assert seconds[-1] > 300.0


@engines
def test_the_cache_hears_of_each_end(engine: Engine | None, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, end = list[str](), PrefixCache.end_conversation
    monkeypatch.setattr(
        PrefixCache, "end_conversation", lambda self, *given: (ends.append(given[0]), end(self, *given))
    )
    trace = workload(6, seed=3)
    setup = Setup(PROFILE, 3_000_000_000, eviction="headwater", hints=Hints(ended=True))
    given = hinted(trace, setup)
    replay(given, setup, make_natural(given), engine)
    assert len(ends) == len({request.session for request in trace.requests})
