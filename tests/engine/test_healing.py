"""Healing on a real model: the turn after a composed one is exact, and whoever comes meanwhile does not notice."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable

import pytest
import torch

from headwater.cache.segments.compose import MAX_TOKEN_ID
from headwater.request import Healing, Span
from headwater.schedule.kinds.request import Request
from headwater.schedule.step import Step
from tests.exactness.rig import DOCUMENTS, FAST, LEAD, Answer, Make, Rig, prompt_of, words

PAGES = 1500
MORE = words(30, "more")


@pytest.fixture(params=["qwen3_5", "qwen3_window"])
def make(load, request: pytest.FixtureRequest) -> Make:
    """Maker of rigs over a model with recurrent layers, and over one with a window."""
    return Make(*load(request.param, "float32", 2))


PROMPT, SPANS = prompt_of(DOCUMENTS)


def first_turn(rig: Rig, max_tokens: int = 70, **more) -> Answer:
    return rig.ask(PROMPT, max_tokens, segments=SPANS, **FAST, **more)


def next_turn(rig: Rig, first: Answer, **more) -> Answer:
    return rig.ask(first.everything + MORE, segments=SPANS, **FAST, **more)


def exactly(make: Make, prompt: list[int]) -> Answer:
    """By a server without segments, and with an empty cache."""
    with make(PAGES, cache=False) as rig:
        return rig.ask(prompt)


def on_grid(tokens: int) -> int:
    return tokens // 64 * 64


def marked_ends(rig: Rig) -> list[int]:
    """Return the positions, in tokens, of checkpoints with approximate states."""
    index = rig.engine.scheduler.cache.index
    nodes = (node for node in index if node.checkpoint is not None and array("I", node.edge)[-1] > MAX_TOKEN_ID)
    return sorted(node.end * 64 for node in nodes)


class Watch:
    """Sees each step of a rig before it runs, and acts once, when the healing leg of that number is about to run."""

    def __init__(self, rig: Rig, at: int = 1, act: Callable[[], object] = lambda: None) -> None:
        self.rig, self.at, self.act = rig, at, act
        self.steps: list[str] = []
        self.acted = threading.Event()
        self.result: object = None
        self._run = rig.engine.runner.run
        rig.engine.runner.run = self.run

    def run(self, step: Step) -> torch.Tensor:
        seqs = [item.seq for item in step.items]
        heals = self.rig.engine.scheduler.healer.seq in seqs
        self.steps.append("healing" if heals else "request" if any(isinstance(s, Request) for s in seqs) else "other")
        if self.steps.count("healing") == self.at and not self.acted.is_set():
            act, self.act = self.act, lambda: None
            self.result = act()
            self.acted.set()
        return self._run(step)


@pytest.mark.parametrize("healing", ["idle", "always"])
def test_next_turn_after_healing_matches_a_server_without_segments(make: Make, healing: str) -> None:
    with make(PAGES, healing=healing) as rig:
        first = first_turn(rig)
        rig.settle()
        turn = next_turn(rig, first)
        stats = rig.engine.stats()
    assert first.account.segments == 3
    assert (turn.account.approximate_tokens, turn.account.segments) == (0, 0)
    assert turn.account.cached_tokens == on_grid(len(first.everything))
    assert turn.same_bits(exactly(make, first.everything + MORE))
    assert (stats.healed, stats.healings_given_up) == (1, 0)
    assert stats.healing_tokens == on_grid(len(first.everything)) - on_grid(len(LEAD))


def test_without_healing_the_next_turn_is_approximate(make: Make) -> None:
    with make(PAGES, healing="off") as rig:
        first = first_turn(rig)
        rig.settle()
        turn = next_turn(rig, first)
        assert rig.engine.stats().healing_tokens == 0
    assert turn.account.approximate_tokens == on_grid(len(first.everything)) - len(LEAD) - 8
    assert not turn.same_bits(exactly(make, first.everything + MORE))


def test_healing_frees_the_approximate_prefix_and_loses_no_page(make: Make) -> None:
    with make(PAGES, healing="off") as rig:
        first = first_turn(rig)
        rig.settle()
        unhealed = rig.engine.stats().cache
        assert marked_ends(rig)[-1] == on_grid(len(first.everything))
    with make(PAGES) as rig:
        first_turn(rig)
        rig.settle()
        healed = rig.engine.stats().cache
        assert marked_ends(rig) == []
    assert (healed.pages_kv, healed.checkpoints) == (unhealed.pages_kv, unhealed.checkpoints)
    assert healed.pages_free == unhealed.pages_free
    assert healed.leases == healed.pages_private == healed.pages_slot == healed.open_plans == 0


def test_healing_keeps_approximate_pages_that_other_requests_share(make: Make) -> None:
    other, spans = prompt_of(DOCUMENTS, question=words(200, "another question"))
    with make(PAGES, healing="off") as rig:
        first_turn(rig)
        rig.ask(other, segments=spans, **FAST)
        rig.settle()
        assert marked_ends(rig) == [768, 832, 832, 896, 960]
        rig.engine.scheduler.healer.healing = Healing.IDLE
        first_turn(rig)
        rig.settle()
        assert rig.engine.stats().healed == 1
        assert marked_ends(rig) == [768, 832, 896, 960], "its own is gone"
        again = rig.ask(other, segments=spans, **FAST)
        assert again.account.approximate_tokens > 600


def test_exact_prefix_is_preferred_at_equal_depth(make: Make) -> None:
    with make(PAGES, healing="off") as rig:
        composed = rig.ask(PROMPT, segments=SPANS, **FAST)
        rig.settle()
        rig.ask(PROMPT)
        again = rig.ask(PROMPT, segments=SPANS, **FAST)
    assert composed.account.segments == 3
    assert (again.account.cached_tokens, again.account.approximate_tokens) == (len(PROMPT), 0)
    assert again.same_bits(exactly(make, PROMPT))


def test_request_during_healing_waits_for_one_leg_and_healing_resumes_after(make: Make) -> None:
    with make(PAGES) as rig:
        watch = Watch(rig, 2, lambda: rig.submit(words(300, "visitor"), 8))
        first = first_turn(rig)
        assert watch.acted.wait(60)
        visitor = rig.wait(watch.result)
        rig.settle()
        turn = next_turn(rig, first)
        stats = rig.engine.stats()
    second = [i for i, kind in enumerate(watch.steps) if kind == "healing"][1]
    assert watch.steps[second + 1 : second + 9] == ["request"] * 8
    assert "healing" in watch.steps[second + 9 :]
    assert stats.healing_tokens == on_grid(len(first.everything)) - on_grid(len(LEAD)), "no token ran twice"
    assert (stats.healed, stats.healings_given_up, turn.account.approximate_tokens) == (1, 0, 0)
    assert visitor.same_bits(exactly(make, visitor.prompt))
    assert turn.same_bits(exactly(make, turn.prompt))


def test_healing_with_a_running_request_changes_no_bit(make: Make) -> None:
    long = words(100, "long")
    with make(PAGES, healing="always") as rig:
        watch = Watch(rig)
        companion = rig.submit(long, 200)
        first = first_turn(rig)
        assert watch.acted.wait(60)
        rig.wait(companion)
        rig.settle()
        turn = next_turn(rig, first)
    with make(PAGES, cache=False) as rig:
        assert companion.same_bits(rig.ask(long, 200))
        assert turn.same_bits(rig.ask(turn.prompt))


def test_half_healed_prefix_can_be_evicted(make: Make) -> None:
    pages = 40 + 6 * make.checkpoint_pages
    with make(pages) as rig:
        watch = Watch(rig, 2, lambda: rig.submit(words(64 * (pages - 2 * make.checkpoint_pages) - 80, "large"), 8))
        first = first_turn(rig)
        assert watch.acted.wait(60)
        visitor = rig.wait(watch.result)
        rig.settle()
        assert rig.engine.stats().healings_given_up == 1
        turn = next_turn(rig, first)  # when it has ended, its own healing is given up, too
        rig.engine.scheduler.cache.check()
    assert visitor.same_bits(exactly(make, visitor.prompt))
    assert (turn.account.resumed_at, turn.account.segments, turn.account.approximate_tokens) == (0, 3, 0)
    with make(PAGES, healing="off") as rig:
        assert turn.same_bits(next_turn(rig, first)), "it is composed anew"


def test_approximate_prefix_without_memory_to_heal_stays(make: Make) -> None:
    with make(PAGES, healing="off") as rig:
        first_turn(rig)
        rig.settle()
        taken = rig.engine.stats().cache
    smallest = taken.pages_kv + taken.pages_checkpoint + taken.pages_segment + 2 * make.checkpoint_pages
    outcomes = []
    for pages in range(smallest, smallest + 18, 3):
        with make(pages) as rig:
            first = first_turn(rig)
            rig.settle()
            stats = rig.engine.stats()
            turn = next_turn(rig, first)
        approximate = 0 if stats.healed else on_grid(len(first.everything)) - len(LEAD) - 8
        assert turn.account.cached_tokens == on_grid(len(first.everything)), f"{pages} pages"
        assert turn.account.approximate_tokens == approximate, f"{pages} pages"
        outcomes.append((stats.healed, stats.healings_given_up))
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {(0, 1), (1, 0)}


def test_healing_evicts_only_entries_older_than_its_prefix(make: Make) -> None:
    with make(PAGES, healing="off") as rig:
        first_turn(rig)
        rig.settle()
        taken = rig.engine.stats().cache
    pages = taken.pages_kv + taken.pages_checkpoint + taken.pages_segment + 2 * make.checkpoint_pages + 20
    with make(pages, eviction="lru") as rig:
        rig.ask(words(64 * 16, "old"), 1)
        rig.settle()
        first = first_turn(rig)
        rig.settle()
        stats = rig.engine.stats()
        turn = next_turn(rig, first)
    assert stats.cache.evicted_kv_pages > 0
    assert (stats.healed, turn.account.approximate_tokens) == (1, 0)
    assert turn.account.cached_tokens == on_grid(len(first.everything))


def test_cancelled_request_is_not_healed(make: Make) -> None:
    with make(PAGES) as rig:
        answer = rig.submit(PROMPT, 2000, segments=SPANS, **FAST)
        rig.engine.cancel(next(iter(rig._answers)))
        rig.settle()
        assert not answer.done.is_set()
        stats = rig.engine.stats()
    assert stats.healing_tokens == stats.healings_waiting == stats.healed == 0


def test_an_exact_request_has_nothing_to_heal(make: Make) -> None:
    with make(PAGES) as rig:
        rig.ask(PROMPT)
        rig.ask(LEAD, segments=(Span(64, 80),), **FAST)
        rig.settle()
        stats = rig.engine.stats()
    assert stats.healing_tokens == stats.healed == stats.healings_given_up == 0


def test_healed_prefix_stays_in_its_namespace(make: Make) -> None:
    with make(PAGES) as rig:
        first = first_turn(rig, namespace="a")
        rig.settle()
        other, own = next_turn(rig, first, namespace="b"), next_turn(rig, first, namespace="a")
    assert (other.account.cached_tokens, other.account.cold_tokens) == (0, other.account.composed_tokens)
    assert own.account.cached_tokens == on_grid(len(first.everything))
    assert own.same_bits(exactly(make, own.prompt))


def test_a_fault_while_it_heals_costs_nothing_but_the_healing(make: Make) -> None:
    def fault() -> None:
        raise RuntimeError("a fault")

    with make(PAGES) as rig:
        Watch(rig, 2, fault)
        first = first_turn(rig)
        rig.settle()
        stats = rig.engine.stats()
        turn = next_turn(rig, first)
    assert (stats.failed_steps, stats.healed, stats.healings_given_up) == (1, 0, 1)
    assert stats.cache.leases == stats.cache.open_plans == stats.cache.pages_slot == 0
    assert turn.account.approximate_tokens > 0


def test_a_server_that_takes_no_more_requests_heals_no_more(make: Make) -> None:
    with make(PAGES) as rig:
        watch = Watch(rig, 2, rig.engine.refuse_new)
        first_turn(rig)
        assert rig.engine.drain(60)
        stats = rig.engine.stats()
    assert watch.steps.count("healing") == 2
    assert stats.healed == stats.healings_waiting == stats.cache.leases == 0


def test_an_engine_that_stops_does_not_wait_for_healing(make: Make) -> None:
    with make(PAGES) as rig:
        watch = Watch(rig, 2, lambda: setattr(rig.engine.loop, "stopping", True))
        first_turn(rig)
        assert watch.acted.wait(60)
        rig.engine.stop()
        assert watch.steps.count("healing") == 2
        rig.engine.scheduler.cache.check()
