"""The tuner: when it starts, what it replays, and what it adopts."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

from headwater.cache import PrefixCache
from headwater.cache.placement import make_placement
from headwater.cache.placement.base import Placement
from headwater.plan import PrefillFlops
from headwater.schedule.planner import Planner
from headwater.schedule.replayed import Replayed, prefill
from headwater.schedule.tuner import ALPHAS, SERVED, Tuner
from headwater.traces.request import Request, Trace
from tests.cache.toy import LAYOUT, PAGE, key_of, words

SMALL = replace(LAYOUT, n_pages=60, slot_pages=0, flops=PrefillFlops(1.0, 0.01))


def served(prompt: tuple[int, ...], answer: tuple[int, ...] = ()) -> Request:
    return Request("", key_of(prompt + answer), len(prompt), len(answer), len(prompt) + len(answer))


def turns_among_strays(strays: int = 4, rounds: int = 40) -> Iterator[Request]:
    """Yield rounds in which one of three long prompts repeats, after short ones that never repeat."""
    stray = 1000
    for round_ in range(rounds):
        yield served((*words(round_ % 3, 8 * PAGE), 1))
        for _ in range(strays):
            stray += 1
            yield served(words(stray, PAGE + 1))


class Lab:
    """Requests one by one through planner, cache and tuner."""

    def __init__(self, eviction: str = "marconi(multiplier=2)", **options: object) -> None:
        self.cache = PrefixCache(SMALL, eviction)
        placement = make_placement("branch")
        self.planner = Planner(self.cache, placement)
        self.tuner = Tuner(self.cache, placement, **options)  # type: ignore[arg-type]
        self.hits: list[int] = []
        self.alphas: list[float] = []

    def serve(self, request: Request) -> None:
        seq = Replayed(len(self.hits), SERVED, request)
        assert prefill(self.planner, self.cache, seq)
        assert seq.account is not None
        self.hits.append(seq.account.resumed_at)
        self.tuner.observe(request)
        self.alphas.append(self.cache.policy.alpha)  # type: ignore[attr-defined]
        self.cache.check()

    def run(self, requests: Iterator[Request]) -> Lab:
        for request in requests:
            self.serve(request)
        return self


def test_the_alpha_with_most_hits_is_adopted_and_of_equals_the_smallest() -> None:
    lab = Lab().run(turns_among_strays())
    hits = lab.tuner.hits
    assert list(hits) == list(ALPHAS)
    assert max(hits.values()) > hits[0.0]
    assert lab.alphas[-1] == min(alpha for alpha in ALPHAS if hits[alpha] == max(hits.values()))
    assert lab.alphas[-1] > 0


def test_tuner_hits_more_than_a_fixed_alpha() -> None:
    tuned = Lab().run(turns_among_strays())
    untuned = Lab("marconi(multiplier=1000)").run(turns_among_strays())
    assert untuned.alphas[-1] == 0
    assert sum(tuned.hits) > sum(untuned.hits)


def test_tuner_is_repeatable() -> None:
    runs = [Lab().run(turns_among_strays()) for _ in range(2)]
    assert runs[0].hits == runs[1].hits
    assert runs[0].alphas == runs[1].alphas
    assert runs[0].tuner.hits == runs[1].tuner.hits


def test_processes_come_to_the_same_at_the_same_request() -> None:
    alone, helped = Lab().run(turns_among_strays()), Lab(workers=2).run(turns_among_strays())
    assert helped.tuner.hits == alone.tuner.hits
    assert helped.alphas == alone.alphas


def test_window_is_a_multiple_of_requests_before_the_first_eviction() -> None:
    for multiplier in (1, 3):
        lab = Lab(f"marconi(multiplier={multiplier})")
        first = done = None
        for number, request in enumerate(turns_among_strays(), 1):
            lab.serve(request)
            stats = lab.cache.stats()
            first = first or (number if stats.evicted_checkpoints or stats.evicted_kv_pages else None)
            done = done or (number if lab.tuner.done else None)
        assert first is not None
        assert done == first * (1 + multiplier)


def test_tuner_replays_the_window_from_the_snapshot() -> None:
    """Alpha 0 replayed is what happened: the window was served with alpha 0."""
    lab = Lab()
    lab.run(turns_among_strays())
    at = next(number for number, alpha in enumerate(lab.alphas, 1) if alpha)
    window = lab.hits[at // 3 : at]
    assert lab.tuner.hits[0.0] == sum(window)


def test_alpha_stays_0_if_the_traffic_ends_early() -> None:
    lab = Lab().run(turns_among_strays(rounds=4))
    assert lab.cache.stats().evicted_checkpoints
    assert not lab.tuner.done
    assert set(lab.alphas) == {0.0}


def test_tuner_without_evictions_records_nothing() -> None:
    lab = Lab().run(turns_among_strays(rounds=1))
    assert lab.tuner._begin is None
    assert lab.tuner._window == []


@pytest.mark.parametrize(("guard", "kept"), [(0.0, False), (100.0, True)])
def test_a_guard_keeps_0_unless_the_gain_is_clear(guard: float, kept: bool) -> None:
    lab = Lab(f"marconi(multiplier=2, guard={guard})").run(turns_among_strays())
    assert lab.tuner.done
    assert (lab.alphas[-1] == 0.0) == kept


def test_the_guard_is_in_points_of_the_token_hit_rate() -> None:
    lab = Lab().run(turns_among_strays())
    at = next(number for number, alpha in enumerate(lab.alphas, 1) if alpha)
    prompts = sum(request.prompt_tokens for request in [*turns_among_strays()][at // 3 : at])
    gain = 100 * (max(lab.tuner.hits.values()) - lab.tuner.hits[0.0]) / prompts
    for guard, kept in ((gain * 0.99, False), (gain * 1.01, True)):
        guarded = Lab(f"marconi(multiplier=2, guard={guard})").run(turns_among_strays())
        assert (guarded.alphas[-1] == 0.0) == kept


def finish(lab: Lab, requests: Iterator[Request]) -> None:
    """Wait for the replays, and serve one more request, which adopts the result."""
    if lab.tuner._running is not None:
        for future in lab.tuner._running._futures:
            future.exception(timeout=300)
        lab.serve(next(requests))
    assert lab.tuner.done


def test_requests_continue_while_the_tuner_replays() -> None:
    lab = Lab(workers=1, wait=False)
    requests = turns_among_strays(rounds=10_000)
    try:
        while lab.tuner._running is None:
            lab.serve(next(requests))
        assert not lab.tuner.done
        served = len(lab.hits)
        for _ in range(5):
            lab.serve(next(requests))
        assert len(lab.hits) == served + 5
        finish(lab, requests)
    finally:
        lab.tuner.close()
    assert lab.tuner.hits == Lab().run(turns_among_strays()).tuner.hits


def failing(cache: PrefixCache, placement: Placement, window: Trace) -> int:
    raise RuntimeError("the replay broke")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_replay_that_fails_is_not_swallowed(workers: int) -> None:
    lab = Lab()
    lab.tuner = Tuner(lab.cache, make_placement("branch"), failing, workers)
    with pytest.raises(RuntimeError, match="the replay broke"):
        lab.run(turns_among_strays())
    lab.tuner.close()


def test_in_serving_a_replay_that_fails_leaves_alpha_at_0() -> None:
    lab = Lab()
    lab.tuner = Tuner(lab.cache, make_placement("branch"), failing, workers=1, wait=False)
    requests = turns_among_strays(rounds=10_000)
    while lab.tuner._running is None:
        lab.serve(next(requests))
    finish(lab, requests)
    assert str(lab.tuner.failure) == "the replay broke"
    assert set(lab.alphas) == {0.0}


def endless(cache: PrefixCache, placement: Placement, window: Trace) -> int:
    while True:
        signal.pause()


def test_closed_while_it_replays_it_leaves_no_process_behind() -> None:
    before = set(multiprocessing.active_children())
    lab = Lab()
    lab.tuner = Tuner(lab.cache, make_placement("branch"), endless, workers=2, wait=False)
    requests = turns_among_strays()
    while lab.tuner._running is None:
        lab.serve(next(requests))
    started = set(multiprocessing.active_children()) - before
    assert len(started) == 2
    lab.tuner.close()
    for process in started:
        process.join(10)  # the pool's own thread may have reaped it: then `is_alive` does not know
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid or 0, 0)


def test_other_policies_have_nothing_to_tune() -> None:
    with pytest.raises(TypeError, match="Lru has no alpha"):
        Tuner(PrefixCache(SMALL, "lru"), make_placement("branch"))
