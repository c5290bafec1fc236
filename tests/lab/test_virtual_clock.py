"""Requests under a virtual clock: steps, queues and preemption; rows in processes; reports to the tuner."""

import multiprocessing
import os
import threading
from dataclasses import replace
from functools import partial

import pytest

import headwater.lab.replay as grid
import headwater.lab.serving as module
from headwater.cache.placement.base import Placed, Placement, PlacementQuery
from headwater.errors import ConfigError, HeadwaterError
from headwater.lab.cost import StepCost, load_device
from headwater.lab.replay import replay
from headwater.lab.row import Result, Spread
from headwater.lab.serving import Engine, Serving
from headwater.lab.setup import Setup
from headwater.models.profiles import load_profile
from headwater.schedule.kinds.answer import FinishedAnswer
from headwater.schedule.scheduler import Scheduler
from headwater.schedule.sequence import Purpose
from headwater.traces.loads import make_arrivals
from headwater.traces.request import Request, Trace
from tests.lab.test_sequential import PAGE, PROFILE, chat

COST = StepCost(PROFILE, load_device("h100"))


def sessions(count: int, turns: int = 4) -> Trace:
    return Trace("made", [request for i in range(count) for request in chat(chr(97 + i), 1, turns, 400, 300)])


def serve(trace: Trace, arrival: str = "poisson(rate=5, think=0.5)", pages: int = 20_000, **changes: object) -> Result:
    engine = Engine(COST, **{name: changes.pop(name) for name in ("max_running",) if name in changes})  # type: ignore[arg-type]
    setup = replace(Setup(PROFILE, pages * PAGE * PROFILE.kv_bytes_per_token, page_size=PAGE), **changes)  # type: ignore[arg-type]
    return replay(trace, setup, make_arrivals(trace, arrival, seed=3), engine)


def test_isolated_request_takes_the_time_of_its_steps() -> None:
    trace = Trace("one", chat("a", 1, 1, 4000, 3))
    result = serve(trace, "poisson(rate=1)")
    from headwater.lab.cost import Load

    prompt = 4064
    load = Load(prefill_tokens=prompt, prefill_squares=prompt**2, legs=1, logits=1, states=2)
    (outcome,) = result.outcomes
    assert outcome.ttft == pytest.approx(COST.seconds(load), rel=1e-9)


def test_every_request_is_answered_and_sessions_keep_their_order() -> None:
    trace = sessions(6)
    result = serve(trace, pages=700, max_running=3)
    assert result.row.requests == 24
    for name in "abcdef":
        lengths = [outcome.prompt_tokens for outcome in result.outcomes if outcome.session == name]
        assert lengths == sorted(lengths)
        assert len(lengths) == 4
    assert all(outcome.ttft is not None and outcome.ttft > 0 for outcome in result.outcomes)


@pytest.mark.parametrize("decode_reuse", ["canonical", "raw", "none"])
def test_steps_computed_together_equal_single_steps(decode_reuse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = sessions(6)
    leaping = serve(trace, decode_reuse=decode_reuse)
    monkeypatch.setattr(Scheduler, "free_steps", lambda scheduler, most: 0)
    walking = serve(trace, decode_reuse=decode_reuse)
    assert [o.resumed_at for o in leaping.outcomes] == [o.resumed_at for o in walking.outcomes]
    for one, other in zip(leaping.outcomes, walking.outcomes, strict=True):
        assert one.ttft == pytest.approx(other.ttft, rel=1e-6)
        assert one.at == pytest.approx(other.at, rel=1e-6)
    assert leaping.row.queue_depth == walking.row.queue_depth


def test_answers_that_are_replayed_after_preemption_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay has several tokens a step: while there is one, no steps are taken at once."""
    trace, setup = sessions(6), Setup(PROFILE, 300 * PAGE * PROFILE.kv_bytes_per_token, page_size=PAGE)

    def served() -> Serving:
        run = Serving(trace, setup, Engine(COST))
        run.run(make_arrivals(trace, "poisson(rate=50, think=0.1)", seed=3))
        return run

    leaping = served()
    monkeypatch.setattr(Scheduler, "free_steps", lambda scheduler, most: 0)
    walking = served()
    assert leaping.scheduler.preemptions == walking.scheduler.preemptions > 0
    assert leaping.scheduler.computed == walking.scheduler.computed
    assert leaping.now == pytest.approx(walking.now, rel=1e-9)


def test_an_unforeseen_error_ends_the_run_also_if_it_is_an_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(seq: FinishedAnswer, placement: Placement, query: PlacementQuery) -> Placed:
        raise RuntimeError("the placement broke")

    monkeypatch.setattr(FinishedAnswer, "place", broken)
    with pytest.raises(RuntimeError, match="the placement broke"):
        serve(sessions(1))


def test_equal_decode_steps_are_computed_together() -> None:
    trace = sessions(2)
    setup = Setup(PROFILE, 4 * 10**9, page_size=PAGE)
    run = Serving(trace, setup, Engine(COST))
    run.run(make_arrivals(trace, "poisson(rate=5, think=0.5)"))
    tokens = sum(request.output_tokens for request in trace.requests)
    assert run.scheduler.computed[Purpose.DECODE] == tokens - len(
        trace.requests
    )  # the first of each comes with its prompt
    assert run.steps < tokens / 10


def test_hits_without_queues_equal_sequential_replay() -> None:
    trace = sessions(4)
    slow = "poisson(rate=0.01, think=30)"
    setup = Setup(PROFILE, 20_000 * PAGE * PROFILE.kv_bytes_per_token, page_size=PAGE)
    alone = replay(trace, setup, make_arrivals(trace, slow, seed=3))
    served = serve(trace, slow)
    assert [o.resumed_at for o in served.outcomes] == [o.resumed_at for o in alone.outcomes]
    assert served.row.queue_depth == 0


def test_more_load_makes_a_queue() -> None:
    trace = sessions(12, turns=1)
    relaxed = serve(trace, "poisson(rate=0.5)", max_running=2)
    pressed = serve(trace, "poisson(rate=500)", max_running=2)
    assert relaxed.row.queue_depth is not None
    assert pressed.row.queue_depth is not None
    assert relaxed.row.ttft_ms is not None
    assert pressed.row.ttft_ms is not None
    assert pressed.row.queue_depth > 10 * relaxed.row.queue_depth
    assert pressed.row.ttft_ms.p50 > 2 * relaxed.row.ttft_ms.p50


def test_open_loop_requests_arrive_independently_of_the_device() -> None:
    trace = sessions(8)
    slow, fast = (serve(trace, "open(rate=50, sessions=5, think=0.5)", max_running=n).row for n in (1, 32))
    assert slow.requests == fast.requests == 32
    assert slow.ttft_ms is not None
    assert fast.ttft_ms is not None
    assert slow.ttft_ms.mean > 2 * fast.ttft_ms.mean
    waiting = serve(trace, "poisson(rate=5, think=0.5)", max_running=1).row
    assert slow.queue_depth > 2 * waiting.queue_depth


def test_hits_save_time() -> None:
    trace = Trace("long", [request for i in range(3) for request in chat(chr(97 + i), 1, 4, 4000, 20)])
    cold = serve(trace, eviction="none")
    warm = serve(trace)
    assert warm.row.hit_tokens > 0
    assert cold.row.ttft_ms is not None
    assert warm.row.ttft_ms is not None
    assert warm.row.ttft_ms.mean < cold.row.ttft_ms.mean


def test_request_that_never_fits_is_refused_and_its_session_continues() -> None:
    trace = Trace("big", [*chat("a", 1, 1, 40, 20), *chat("b", 1, 2, 20_000, 20), *chat("c", 1, 1, 40, 20)])
    result = serve(trace, pages=500)
    assert result.row.requests == 4
    assert result.row.misses_by_reason["too_large"] == 2


def test_raw_publishes_only_recorded_tokens() -> None:
    trace = sessions(3)
    unknown = replace(trace, requests=[replace(one, known_tokens=one.prompt_tokens) for one in trace.requests])
    known, blind = serve(trace, decode_reuse="raw"), serve(unknown, decode_reuse="raw")
    assert known.row.hit_tokens > blind.row.hit_tokens > 0


def test_pages_of_one_token_grow_a_page_a_step() -> None:
    trace = Trace("small", [request for name in "ab" for request in chat(name, 1, 3, 40, 30)])
    served = serve(trace, page_size=1)
    assert served.row.hit_tokens > 0
    assert served.row.misses_by_reason.get("too_large", 0) == 0
    with pytest.raises(ConfigError, match="a page has 1 token"):
        serve(trace, page_size=1, decode_reuse="raw")


@pytest.mark.parametrize(("pool", "refused"), [("split", 1), ("elastic", 0)])
def test_elastic_pool_accepts_a_prompt_longer_than_its_kv_part(pool: str, refused: int) -> None:
    setup = Setup(PROFILE, 4 * 10**9, pool=pool, state_fraction=0.9, page_size=PAGE)  # type: ignore[arg-type]
    pages = setup.layout(Trace("any", ())).n_pages
    trace = Trace("long", chat("a", 1, 1, pages * PAGE // 5, 20))
    result = replay(trace, setup, make_arrivals(trace, "poisson(rate=1)"), Engine(COST))
    assert result.row.misses_by_reason.get("too_large", 0) == refused


def test_percentiles_are_interpolated() -> None:
    spread = Spread.of([i / 1000 for i in range(1, 101)])
    assert spread == Spread(mean=50.5, p5=5.95, p50=50.5, p95=95.05, p99=99.01)
    assert Spread.of([]) is None


def test_a_larger_model_takes_longer() -> None:
    trace = sessions(1)
    small, large = (
        replay(
            trace,
            Setup(load_profile(name), 40 * 10**9),
            make_arrivals(trace, "poisson(rate=1)"),
            Engine(StepCost(load_profile(name), load_device("h100"))),
        )
        for name in ("qwen3.5-0.8b", "qwen3.5-9b")
    )
    assert small.row.ttft_ms is not None
    assert large.row.ttft_ms is not None
    assert small.row.ttft_ms.p50 < large.row.ttft_ms.p50


def test_killed_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "replay", lambda *arguments: os._exit(9))
    setups = [Setup(PROFILE, 10**9, page_size=PAGE)] * 2
    with pytest.raises(HeadwaterError, match="one of 2 processes was killed"):
        list(grid.run_grid(sessions(1), setups, partial(make_arrivals, spelling="poisson(rate=1)"), jobs=2))


@pytest.mark.parametrize("rows", [1, 3])
def test_no_process_and_no_thread_is_left(rows: int) -> None:
    threads, processes = set(threading.enumerate()), set(multiprocessing.active_children())
    setups = [Setup(PROFILE, 10**9, page_size=PAGE)] * 3
    found = grid.run_grid(sessions(1), setups, partial(make_arrivals, spelling="poisson(rate=1)"), jobs=2)
    for _ in range(rows):
        next(found)
    found.close()  # type: ignore[attr-defined]
    assert not set(threading.enumerate()) - threads
    assert not set(multiprocessing.active_children()) - processes


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
