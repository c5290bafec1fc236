"""The lab reports requests to Marconi's tuner as they were cached here."""

from __future__ import annotations

import pytest

import headwater.lab.serving as module
from headwater.lab.replay import replay
from headwater.lab.serving import Engine
from headwater.lab.setup import Setup
from headwater.traces.loads import make_arrivals
from headwater.traces.request import Request
from tests.lab.test_virtual_clock import COST, PAGE, PROFILE, sessions


@pytest.mark.parametrize("engine", [None, Engine(COST)])
@pytest.mark.parametrize(("decode_reuse", "kept"), [("canonical", True), ("none", False)])
def test_answers_are_reported_where_they_are_cached(
    engine: Engine | None, decode_reuse: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[Request] = []

    class Listener:
        done = False

        def __init__(self, *arguments: object, **options: object) -> None: ...

        def observe(self, request: Request) -> None:
            reported.append(request)

        def close(self) -> None: ...

    monkeypatch.setattr(module, "Tuner", Listener)
    trace = sessions(2)
    setup = Setup(PROFILE, 10**10, "branch", "marconi", page_size=PAGE, decode_reuse=decode_reuse)  # type: ignore[arg-type]
    replay(trace, setup, make_arrivals(trace, "poisson(rate=1)"), engine)
    assert len(reported) == len(trace.requests)
    assert all((one.known_tokens > one.prompt_tokens) == kept for one in reported)
