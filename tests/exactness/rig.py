"""Engines over one model, and requests whose every logit is kept."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from headwater.account import CacheAccount
from headwater.config import ServeConfig
from headwater.engine.engine import Engine
from headwater.engine.proof.selfcheck import SelfCheck
from headwater.events import Event, FailedEvent, FinishedEvent, TokenEvent
from headwater.models.load import LoadedModel
from headwater.plan import CacheLayout
from headwater.request import Fidelity, Generation, SamplingParams, Span
from headwater.schedule.speculation import Speculation

PATIENCE = 300  # seconds


@dataclass
class Answer:
    """A request as it runs, and what came of it."""

    prompt: list[int]
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    account: CacheAccount | None = None
    most_running: int = 0  # requests that ran at the same time, itself included
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    @property
    def everything(self) -> list[int]:
        return self.prompt + self.tokens

    def same_bits(self, other: Answer) -> bool:
        """Return whether the logits of every generated token are equal, bit for bit."""
        assert len(self.logits) == self.max_tokens == len(other.logits)
        return torch.equal(torch.stack(self.logits), torch.stack(other.logits))


class Rig:
    """One engine, started; `with` stops it."""

    def __init__(self, loaded: LoadedModel, check: SelfCheck, pages: int, device: str = "cpu", **settings) -> None:
        config = ServeConfig(memory=pages * loaded.spec.page_bytes, device=device, **settings)
        self.engine = Engine.over(loaded, check, config)
        self.engine.verification.logits_tap = self._keep
        self._answers: dict[int, Answer] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Rig:
        self.engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.drain(PATIENCE)
        self.engine.stop()
        self.engine.scheduler.cache.check()

    def _keep(self, request: int, logits_V: torch.Tensor) -> None:
        with self._lock:
            if request in self._answers:
                self._answers[request].logits.append(logits_V.clone())

    def submit(self, prompt: list[int], max_tokens: int, **more) -> Answer:
        """`more`: fields of the Generation."""
        answer = Answer(list(prompt), max_tokens)
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        with self._lock:
            request = self.engine.submit(Generation(tuple(prompt), params, **more), self._listener(answer))
            self._answers[request] = answer
        return answer

    def _listener(self, answer: Answer) -> Callable[[Event], None]:
        def on_event(event: Event) -> None:
            if isinstance(event, TokenEvent):
                answer.tokens.append(event.token)
                answer.most_running = max(answer.most_running, len(self.engine.scheduler.running))
                return
            if isinstance(event, FinishedEvent):
                answer.account = event.account
            if isinstance(event, FailedEvent):
                answer.error = event.error
            answer.done.set()

        return on_event

    def ask(self, prompt: list[int], max_tokens: int = 8, **more) -> Answer:
        return self.wait(self.submit(prompt, max_tokens, **more))

    def settle(self) -> None:
        """Let finished answers be prefilled, as they are between two turns of a chat."""
        assert self.engine.drain(PATIENCE)

    def wait(self, answer: Answer) -> Answer:
        assert answer.done.wait(PATIENCE), "no answer"
        if answer.error:
            raise answer.error
        return answer


def verify_every_draft(speculation: Speculation) -> None:
    """Let each step verify all drafts that there are, and the head draft before each of them, whatever that costs."""
    speculation.worth = lambda drafts, rows, room: [most for _, most in drafts]  # type: ignore[method-assign]
    speculation.seconds.min_chance = lambda rows: -1e9  # type: ignore[method-assign]
    speculation.is_to_measure = lambda rows: False  # type: ignore[method-assign]
    speculation._is_asked = lambda asking, rows: bool(asking)  # type: ignore[method-assign]


@dataclass(frozen=True)
class Make:
    """Makes rigs over one model."""

    loaded: LoadedModel
    check: SelfCheck
    settings: dict = field(default_factory=dict)
    device: str = "cpu"
    memories: ClassVar[int] = 1  # the workers of a cluster have several

    @property
    def checkpoint_pages(self) -> int:
        return self.loaded.spec.checkpoint_pages

    @property
    def layout(self) -> CacheLayout:
        return self.loaded.spec.layout(2**30)

    def __call__(self, pages: int, **settings) -> Rig:
        return Rig(self.loaded, self.check, pages, self.device, **self.settings, **settings)


def words(n: int, *seed: object) -> list[int]:
    """n token ids that nothing else begins with."""
    rng = random.Random(repr(seed))
    return [rng.randrange(1, 1000) for _ in range(n)]


LEAD, QUESTION = words(150, "lead"), words(40, "question")
DOCUMENTS = [words(n, "document", n) for n in (200, 90, 333)]
FAST = {"fidelity": Fidelity.FAST}


def prompt_of(
    documents: list[list[int]], lead: list[int] = LEAD, question: list[int] = QUESTION
) -> tuple[list[int], tuple[Span, ...]]:
    """Return a prompt of documents, and its segments."""
    tokens, spans = list(lead), []
    for document in documents:
        spans.append(Span(len(tokens), len(tokens) + len(document)))
        tokens += document
    return tokens + question, tuple(spans)
