"""Situations of the exactness matrix through a router: answers have the bits of one server without a cache.

With one, two and three workers, and with prompts prefilled apart. Pulls and lost workers are in `test_routed_answers`
and `test_disaggregation`, other families in `test_pulls`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from headwater.account import CacheAccount
from headwater.cluster.cost import Role
from headwater.cluster.router import Router
from headwater.engine.meter import Backlog
from headwater.request import Generation, SamplingParams
from headwater.schedule.prefill_seconds import PrefillSpeed
from tests.cluster.fake import until
from tests.cluster.test_disaggregation import FAST, one_server
from tests.cluster.test_routed_answers import RealWorker, Whole, settle
from tests.cluster.test_routed_answers import cluster as real_cluster
from tests.exactness.conftest import load  # noqa: F401  a fixture
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
            for name, role in named.items():  # one request waits: cold prompts are prefilled apart, next turns not
                busy = Backlog(1 if role == DECODE else 0, 0, 0, SPEED, 1.0, pull=FAST if role == DECODE else None)
                workers[name].engine.backlog = lambda busy=busy: busy
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
def test_an_answer_has_the_bits_of_one_server(load, scenario: str, roles: tuple[Role, ...]) -> None:  # noqa: F811
    model = load("qwen3_5", "float32", 2)
    answers = SCENARIOS[scenario](RoutedMake(model, roles))
    assert any(answer.account.cached_tokens for answer in answers)
    assert any(answer.account.prefilled_by for answer in answers) == (PREFILL in roles)
    alone = one_server(model, *(answer.generation for answer in answers))
    assert [one.comparable for one in answers] == [one.comparable for one in alone]
