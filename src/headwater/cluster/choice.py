"""Choice of the worker that a request goes to.

`LeastCost` is Headwater's; the others are what people compare it with: turns, and the fewest requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

TOKEN_SECONDS = 1e-3  # of a prompt, until a worker has measured it
TIE = 0.02  # of the least cost, within which load decides


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker, as a choice sees it."""

    running: int  # requests that compute
    waiting: int
    queued_tokens: int  # of prompts that are not computed yet
    token_seconds: float | None  # of a prompt, as measured
    request_seconds: float  # mean, from submission to end
    max_running: int
    reusable: int  # leading tokens of the request's prompt that it has states and KV for

    @property
    def load(self) -> int:
        """Number of requests that it has."""
        return self.running + self.waiting


class Choice(Protocol):
    """Rule of a router."""

    def choose(self, tokens: int, candidates: Sequence[Candidate]) -> int:
        """Return the index of the worker for a prompt of `tokens` tokens."""


class LeastCost:
    """The worker where the request's first token comes soonest, in seconds; of nearly equal ones the least loaded.

    A cost is what is queued there, and the part of the prompt that it has to compute, at its measured speed; and, if
    all its slots are taken, the mean time until one is free.
    """

    def __init__(self) -> None:
        self._turn = count()

    def choose(self, tokens: int, candidates: Sequence[Candidate]) -> int:
        costs = [self.seconds(tokens, one) for one in candidates]
        least = min(costs)
        near = [i for i, cost in enumerate(costs) if cost <= least * (1 + TIE)]
        fewest = min(candidates[i].load for i in near)
        equal = [i for i in near if candidates[i].load == fewest]
        return equal[next(self._turn) % len(equal)]

    def seconds(self, tokens: int, one: Candidate) -> float:
        """Return the expected seconds until the first token."""
        a_token = one.token_seconds or TOKEN_SECONDS
        too_many = max(0, one.load + 1 - one.max_running)
        waiting = too_many * one.request_seconds / max(1, one.max_running)
        return waiting + (one.queued_tokens + tokens - one.reusable) * a_token


class RoundRobin:
    """Workers in turns."""

    def __init__(self) -> None:
        self._turn = count()

    def choose(self, tokens: int, candidates: Sequence[Candidate]) -> int:
        return next(self._turn) % len(candidates)


class LeastLoaded:
    """The worker with the fewest requests."""

    def choose(self, tokens: int, candidates: Sequence[Candidate]) -> int:
        return min(range(len(candidates)), key=lambda i: candidates[i].load)


CHOICES: dict[str, Callable[[], Choice]] = {
    "least_cost": LeastCost,
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
}
