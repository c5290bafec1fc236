"""A request with somebody waiting for its tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headwater.engine.detokenizer import TextStream
from headwater.engine.prompt_scores import PromptScores
from headwater.engine.sampler import Sampling
from headwater.events import Event
from headwater.request import SamplingParams
from headwater.schedule.sequence import Sequence

OnEvent = Callable[[Event], None]


@dataclass(eq=False)
class Live:
    """Engine's data of a running request, in addition to the scheduler's sequence."""

    seq: Sequence
    on_event: OnEvent
    text: TextStream
    sampling: Sampling
    submitted: float  # seconds of a monotonic clock
    started: float | None = None  # when its first leg ran
    scores: PromptScores | None = None  # until they are told

    @property
    def params(self) -> SamplingParams:
        return self.seq.generation.params


class Observer(Protocol):
    """Listener to complete answers, called on the engine's thread; `close` follows when the engine stops."""

    def completed(self, seq: Sequence) -> None: ...

    def close(self) -> None: ...


class NoObserver(Observer):
    """Observer that does nothing."""
