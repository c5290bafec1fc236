"""Requests with a client: their text, sampling, deadlines, and the observer of complete answers."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Protocol

from headwater.engine.detokenizer import TextStream
from headwater.engine.prompt_scores import PromptScores
from headwater.engine.sampler import Sampling
from headwater.events import Event
from headwater.request import SamplingParams
from headwater.schedule.kinds.request import Request

OnEvent = Callable[[Event], None]


@dataclass(eq=False)
class Live:
    """State that the engine keeps of a request, in addition to the scheduler's sequence."""

    seq: Request
    on_event: OnEvent
    text: TextStream
    sampling: Sampling
    submitted: float  # seconds of a monotonic clock
    started: float | None = None  # when its first leg ran
    scores: PromptScores | None = None  # until they are sent

    @property
    def params(self) -> SamplingParams:
        return self.seq.generation.params


class Observer(Protocol):
    """Listener to complete answers, called on the engine's thread; `close` follows when the engine stops."""

    def completed(self, seq: Request) -> None: ...

    def close(self) -> None: ...


class NoObserver:
    """Observer that does nothing."""

    def completed(self, seq: Request) -> None:
        """Ignore the answer."""

    def close(self) -> None:
        """Nothing is open."""


class Deadlines:
    """Deadlines of requests, in seconds of a monotonic clock: a heap, from which ended requests are dropped late."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at: float, request: int) -> None:
        """Add a request that must end by `at`."""
        heappush(self._heap, (at, request))

    def forget_all_but(self, open_requests: Container[int]) -> None:
        """Drop the entries of requests that have ended."""
        self._heap = [entry for entry in self._heap if entry[1] in open_requests]
        heapify(self._heap)

    def take_passed(self, now: float) -> list[int]:
        """Return the requests whose deadline has passed, each once."""
        passed = []
        while self._heap and self._heap[0][0] <= now:
            passed.append(heappop(self._heap)[1])
        return passed
