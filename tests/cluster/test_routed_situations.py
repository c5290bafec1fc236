"""Real engines behind a router, in each situation of the exactness matrix and with stores of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from headwater.account import CacheAccount
from headwater.cluster.cost import Role
from headwater.cluster.messages import SEGMENTS, STATES
from headwater.cluster.router import Router
from headwater.engine.meter import Backlog
from headwater.request import Generation, SamplingParams
from headwater.schedule.prefill_seconds import PrefillSpeed
from headwater.schedule.sequence import key_of
from tests.cluster.fake import until
from tests.cluster.test_disaggregation import FAST, one_server
from tests.cluster.test_parallel_segments import cold, composed, turned
from tests.cluster.test_routed_answers import RealWorker, Whole, ask, cluster, generation, settle
from tests.cluster.test_routed_answers import cluster as real_cluster
from tests.exactness.rig import words
from tests.exactness.scenarios import SCENARIOS

BOTH, PREFILL, DECODE = Role.BOTH, Role.PREFILL, Role.DECODE
TOGETHER = {"1": (BOTH,), "2": (BOTH,) * 2, "3": (BOTH,) * 3}
APART = {"2 apart": (PREFILL, DECODE), "3 apart": (PREFILL, DECODE, DECODE)}
OF_ONE_MEMORY = ("after_eviction_and_refill", "after_preemption", "with_seven_other_requests_running")
SPEED = PrefillSpeed(0.0, 0.001)  # of all workers, whatever else the machine does


class Asked(Whole):
    """An answer, as scenarios see it."""

    def __init__(self, generation: Generation, rig: RoutedRig) -> None:
        super().__init__()
        self.generation, self._rig = generation, rig

    @property
    def most_running(self) -> int:
        return self._rig.most_running

    @property
    def everything(self) -> list[int]:
        return [*self.generation.prompt, *self.tokens]

    @property
    def account(self) -> CacheAccount:
        return self.finished.account


class RoutedRig:
    """A cluster, as scenarios see an engine."""

    def __init__(self, router: Router, workers: list[RealWorker]) -> None:
        self.router, self.workers = router, workers
        self.engine = workers[0].engine  # scenarios that look at it have one worker
        self.most_running = 0  # requests in a step of it
        run = self.engine.runner.run

        def noting(step) -> torch.Tensor:
            self.most_running = max(self.most_running, len(self.engine.scheduler.running))
            return run(step)

        self.engine.runner.run = noting

    def submit(self, prompt: list[int], max_tokens: int) -> Asked:
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, logprobs=3)
        answer = Asked(Generation(tuple(prompt), params), self)
        self.router.submit(answer.generation, answer.on_event)
        return answer

    def ask(self, prompt: list[int], max_tokens: int = 8) -> Asked:
        return self.wait(self.submit(prompt, max_tokens))

    def wait(self, answer: Asked) -> Asked:
        answer.wait()
        assert answer.error is None
        return answer

    def settle(self) -> None:
        for worker in self.workers:
            assert worker.engine.drain(60)
        settle(self.router)


@dataclass(frozen=True)
class RoutedMake:
    """Makes clusters over one model."""

    model: tuple
    roles: tuple[Role, ...]
    running: int = 1  # requests that wait at a decoder: cold prompts are prefilled apart, next turns not

    settings: ClassVar[dict[str, object]] = {}  # as one server has by default

    @property
    def memories(self) -> int:
        return len(self.roles)

    @property
    def loaded(self):
        return self.model[0]

    @property
    def checkpoint_pages(self) -> int:
        return self.loaded.spec.checkpoint_pages

    @contextmanager
    def __call__(self, pages: int) -> Iterator[RoutedRig]:
        named = {f"{role.value}{n}": role for n, role in enumerate(self.roles)}
        with real_cluster(self.model, pages, **named) as (router, workers):
            for name, role in named.items():
                running, pull = (self.running, FAST) if role == DECODE else (0, None)
                busy = Backlog(running, 0, 0, SPEED, 1.0, pull=pull)
                workers[name].engine.backlog = lambda busy=busy: busy
                tiers = workers[name].engine.scheduler.tiers
                tiers.prefill_seconds = lambda tokens: 1.0 * tokens  # reading always wins
            until(lambda: all(link.backlog.prefill == SPEED for link in router.links.values()))
            yield RoutedRig(router, list(workers.values()))


def cells() -> Iterator[object]:
    """Yield a scenario, and the roles of the workers that it runs through."""
    for name, roles in (TOGETHER | APART).items():
        for scenario in SCENARIOS:
            if scenario not in OF_ONE_MEMORY or len(roles) == 1:
                marks = [] if (name, scenario) == ("3", "chat_turn") else [pytest.mark.full]
                yield pytest.param(scenario, roles, id=f"{scenario} {name}", marks=marks)


@pytest.mark.parametrize(("scenario", "roles"), cells())
def test_an_answer_has_the_bits_of_one_server(load, scenario: str, roles: tuple[Role, ...]) -> None:
    model = load("qwen3_5", "float32", 2)
    running = 3 if scenario == "tails_of_any_length" else 1  # also short prompts are prefilled apart
    answers = SCENARIOS[scenario](RoutedMake(model, roles, running))
    assert any(answer.account.cached_tokens for answer in answers)
    assert any(answer.account.prefilled_by for answer in answers) == (PREFILL in roles)
    alone = one_server(model, *(answer.generation for answer in answers))
    assert [one.comparable for one in answers] == [one.comparable for one in alone]


PAGES = 60
PROMPT = words(1300, "stored")  # a whole run of KV, and a ragged one
MEDIUM = "STORAGE"


def queued(worker: RealWorker, tokens: int) -> None:
    """Let a worker report `tokens` tokens in its queue, and a millisecond for each token that it computes."""
    io, speed = worker.engine.scheduler.tiers, PrefillSpeed(0.0, 1e-3)
    io.prefill_seconds = lambda tokens: 1e-3 * tokens
    worker.engine.backlog = lambda: Backlog(0, 0, tokens, speed, 1.0, pull=io.figures().pull, loads=io.figures().loads)


@contextmanager
def lost_from_memory(model, folder: Callable[[str], Path]) -> Iterator:
    """Yield a router, its workers and pictures, the worker that had a prompt and lost it in memory, and its answer."""
    with cluster(model, PAGES, folder, a="one", b="one") as (router, workers):
        for worker in workers.values():
            queued(worker, 0)
        pictures = {name: router.links[name].follower.picture for name in workers}
        first = ask(router, generation("greedy", PROMPT, 8)).wait()
        for worker in workers.values():
            worker.engine.drain(60)
            until(lambda worker=worker: not worker.engine.scheduler.tiers.busy)
        settle(router)
        (had,) = (name for name, one in workers.items() if one.engine.scheduler.cache.stats().checkpoints)
        for n in range(4):
            others = ask(workers[had].engine, generation("greedy", words(1300, "other", n), 8)).wait()
            assert others.error is None
        workers[had].engine.drain(60)
        cache = workers[had].engine.scheduler.cache
        assert not cache.match(key_of(tuple(PROMPT)), len(PROMPT), "").checkpoint_tokens
        queued(workers[had], 200)
        settle(router)
        until(lambda: router.links[had].backlog.queued_tokens == 200)
        yield router, workers, pictures, had, first


def test_a_prefix_on_a_workers_own_disk_is_loaded_there(model, tmp_path: Path) -> None:
    with lost_from_memory(model, lambda name: tmp_path / name) as (router, workers, pictures, had, first):
        assert pictures[had].stored[MEDIUM][STATES]
        again = ask(router, generation("greedy", PROMPT, 8)).wait()
        counts = dict(router.counts)
        loaded = {name: one.engine.stats().loaded_tokens for name, one in workers.items()}
    assert loaded == {had: len(PROMPT), "b" if had == "a" else "a": 0}
    assert again.comparable == first.comparable
    account = again.finished.account
    assert (account.loaded_from, account.loaded_tokens) == ("disk", len(PROMPT))
    wanted = {"expected_loads": 1, "loaded": 1, "missed_loads": 0, "cached_as_predicted": 2}
    assert {name: counts.get(name, 0) for name in wanted} == wanted


def test_a_folder_that_workers_share_is_not_published_and_serves_each(model, tmp_path: Path) -> None:
    """The other worker, which has an empty queue, loads what the first one has stored."""
    with lost_from_memory(model, lambda name: tmp_path) as (router, workers, pictures, had, first):
        assert not any(one.stored.get(MEDIUM, {}).get(STATES) for one in pictures.values())
        again = ask(router, generation("greedy", PROMPT, 8)).wait()
        loaded = {name: one.engine.stats().loaded_tokens for name, one in workers.items()}
        counts = dict(router.counts)
    assert loaded == {had: 0, "b" if had == "a" else "a": len(PROMPT)}
    assert again.comparable == first.comparable
    assert (counts.get("expected_loads", 0), counts["loaded"], counts["cached_as_predicted"]) == (0, 1, 2)


@contextmanager
def segments_lost_from_memory(model, folder: Callable[[str], Path]) -> Iterator:
    """Yield a router, its workers, one that has built a prompt's segments and lost them in memory, and the prompt.

    The prompt has the same segments in another order, so that no prefix is there.
    """
    with cluster(model, folder=folder, a="one", b="one") as (router, workers):
        first, had = composed("stored"), workers["a"]
        pictures = [router.links[name].follower.picture for name in "ab"]
        queued(had, 0)
        queued(workers["b"], 100_000)
        until(lambda: router.links["b"].backlog.queued_tokens)
        assert ask(router, first).wait().error is None
        until(lambda: not had.engine.scheduler.tiers.busy)
        assert had.engine.stats().segment_tokens == cold(first), "they were built at one worker"
        with had.engine.changed:
            while had.engine.scheduler.cache.segments.evict():
                pass
        assert ask(had.engine, generation("greedy", words(9, "a step"), 2)).wait().error is None
        until(lambda: not pictures[0].held[SEGMENTS])
        queued(had, 200)
        queued(workers["b"], 0)
        until(lambda: [router.links[name].backlog.queued_tokens for name in "ab"] == [200, 0])
        yield router, workers, pictures, turned(first)


def test_segments_on_a_workers_own_disk_are_loaded_there(model, tmp_path: Path) -> None:
    with segments_lost_from_memory(model, lambda name: tmp_path / name) as (router, workers, pictures, asked):
        assert len(pictures[0].stored[MEDIUM][SEGMENTS]) == len(asked.segments)
        again = ask(router, asked).wait()
        counts = dict(router.counts)
        loaded = {name: one.engine.stats().loaded_segments for name, one in workers.items()}
    assert loaded == {"a": len(asked.segments), "b": 0}
    assert again.finished.account.loaded_from == "disk"
    wanted = {"combined": 0, "expected_loads": 1, "loaded": 1, "missed_loads": 0}
    assert {name: counts.get(name, 0) for name in wanted} == wanted


def test_segments_in_a_folder_that_workers_share_are_not_published(model, tmp_path: Path) -> None:
    """The router takes them to be cold, and has them prepared at both workers."""
    with segments_lost_from_memory(model, lambda name: tmp_path) as (router, _, pictures, asked):
        assert not any(one.stored.get(MEDIUM, {}).get(SEGMENTS) for one in pictures)
        assert ask(router, asked).wait().error is None
        assert (router.counts["combined"], router.counts["expected_loads"]) == (1, 0)
