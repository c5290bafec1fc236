"""Hints that a replayed trace carries, and the hits that they are worth."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headwater.errors import ConfigError
from headwater.lab.hints import Hints
from headwater.lab.replay import hinted, replay
from headwater.lab.setup import Setup
from headwater.models.profiles import PROFILES
from headwater.plan import Retention
from headwater.traces.arrivals import natural
from headwater.traces.read import make_trace
from headwater.traces.request import Trace
from tests.lab.workload import SYSTEM, workload


@pytest.mark.parametrize(
    ("text", "hints"),
    [
        ("off", None),
        ("ended", Hints(ended=True)),
        ("5m", Hints(ttl="5m")),
        ("1h", Hints(ttl="1h")),
        ("ended+1h", Hints(True, "1h")),
        ("5m+ended", Hints(True, "5m")),
    ],
)
def test_hints_are_spelled(text: str, hints: Hints | None) -> None:
    assert Hints.read(text) == hints
    assert hints is None or Hints.read(str(hints)) == hints


@pytest.mark.parametrize("text", ["", "2h", "ended+ended", "5m+1h", "off+ended", "ended 5m"])
def test_other_hints_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be off, or ended, 5m, 1h"):
        Hints.read(text)


def test_the_last_request_of_each_session_ends_it() -> None:
    trace = Hints(ended=True).given(workload(5, seed=1))
    ends = [request.session for request in trace.requests if request.ended]
    assert sorted(ends) == sorted({request.session for request in trace.requests})
    last = {request.session: request for request in trace.requests}
    assert all(request.ended for request in last.values())


def test_a_retry_ends_no_conversation() -> None:
    trace = make_trace("generated(2, requests=400)")
    retries = [request for request in Hints(ended=True).given(trace).requests if request.retry]
    assert retries
    assert not any(request.ended for request in retries)


def test_a_time_to_live_is_given_to_the_end_of_system_prompt_and_tools() -> None:
    trace = workload(2, seed=1)
    assert all(r.boundaries.retained == (Retention(SYSTEM, 300.0),) for r in Hints(ttl="5m").given(trace).requests)
    unknown = Trace(
        "made", tuple(replace(r, boundaries=replace(r.boundaries, system_end=None)) for r in trace.requests)
    )
    assert Hints(ttl="5m").given(unknown).requests == unknown.requests


def test_ends_of_conversations_leave_room_for_those_that_go_on() -> None:
    trace, hits = workload(60, seed=3, rate=0.1), []
    for hints in (None, Hints(ended=True)):
        setup = Setup(PROFILES["qwen3.5-9b"], 1_000_000_000, eviction="headwater", hints=hints)
        given = hinted(trace, setup)
        hits.append(replay(given, setup, natural(given).over(given)).row.hit_tokens)
    assert hits[1] > hits[0]
