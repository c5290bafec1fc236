"""Engines in this process, over the model that speed is measured on, and requests with the time of every token."""

from __future__ import annotations

import json
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from headwater.account import CacheAccount
from headwater.config import ServeConfig
from headwater.engine.engine import Engine
from headwater.engine.proof.selfcheck import SelfCheck
from headwater.engine.proof.verdict import verdict
from headwater.events import Event, FailedEvent, FinishedEvent, TokenEvent
from headwater.mixers import numerics
from headwater.mixers.numerics import Numerics, end_workers
from headwater.models.load import LoadedModel, load_model, read_spec
from headwater.request import Generation, SamplingParams
from tests import checkpoints
from tests.checkpoints.tokenizer import sayable

MODEL = "hidden 512, 8 layers (6 Gated DeltaNet, 2 attention), vocabulary 2,048"
RECIPE, MAX_LENGTH = "qwen3_5_bench", 65536  # tokens
PATIENCE = 3600  # seconds after which a request will not end any more: 32,000 tokens may take half an hour


@contextmanager
def bench_checkpoint() -> Iterator[Path]:
    """The folder of a checkpoint of MODEL, as long as it is needed."""
    with tempfile.TemporaryDirectory() as root:
        folder = checkpoints.checkpoint(Path(root), RECIPE)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MAX_LENGTH}))
        yield folder


@dataclass(eq=False)
class Asked:
    """A request as it runs. Times are `perf_counter`'s."""

    submitted: float
    times: list[float] = field(default_factory=list)  # of its tokens
    account: CacheAccount | None = None
    error: Exception | None = None
    first: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.submitted

    def on_event(self, event: Event) -> None:
        if isinstance(event, TokenEvent):
            self.times.append(time.perf_counter())
            self.first.set()
            return
        if isinstance(event, FinishedEvent):
            self.account = event.account
        if isinstance(event, FailedEvent):
            self.error = event.error
        self.first.set()
        self.done.set()


class Model:
    """One set of weights; the engines over it have a memory and a cache of their own."""

    def __init__(
        self, folder: Path, dtype: str = "float32", weights: str = "auto", mtp: bool = False, device: str = "cpu"
    ) -> None:
        self.check: SelfCheck = verdict(read_spec(folder, dtype, device, weights=weights), device)
        numerics.use(Numerics(self.check.mode))
        self.loaded: LoadedModel = load_model(folder, dtype, device, weights=weights, mtp=mtp)
        self._words = sayable(self.loaded.tokenizer)

    def prompt(self, rng: random.Random, n_tokens: int) -> list[int]:
        """Tokens that their own text encodes to, and that no other prompt begins with."""
        return rng.choices(self._words, k=n_tokens)

    @contextmanager
    def engines(self, **settings: ServeConfig) -> Iterator[list[Engine]]:
        """One started engine for each setting, in their order."""
        with ExitStack() as stack:
            yield [stack.enter_context(self._engine(config)) for config in settings.values()]

    @contextmanager
    def _engine(self, config: ServeConfig) -> Iterator[Engine]:
        engine = Engine.over(self.loaded, self.check, config)
        _end_workers_when_idle(engine)
        end_workers()
        engine.start()
        try:
            yield engine
        finally:
            engine.stop()


def _end_workers_when_idle(engine: Engine) -> None:
    """Let an engine that waits have no worker threads: beside them those of the one that computes sleep at once.

    A server has one engine.
    """
    wait = engine.changed.wait

    def without_workers(timeout: float | None = None) -> bool:
        if threading.current_thread() is engine.loop.thread:
            end_workers()
        return wait(timeout)

    engine.changed.wait = without_workers  # type: ignore[method-assign]


def params(max_tokens: int) -> SamplingParams:
    """Return greedy sampling parameters for an answer of `max_tokens` tokens."""
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


def submit(engine: Engine, prompt: list[int], max_tokens: int) -> Asked:
    return sent(engine, Generation(tuple(prompt), params(max_tokens)))


def sent(engine: Engine, generation: Generation) -> Asked:
    asked = Asked(time.perf_counter())
    engine.submit(generation, asked.on_event)
    return asked


def finished(asked: Asked) -> Asked:
    """Waits; raises what the engine said if it failed."""
    if not asked.done.wait(PATIENCE):
        raise TimeoutError(f"no answer within {PATIENCE} seconds")
    if asked.error is not None:
        raise asked.error
    return asked


def ask(engine: Engine, prompt: list[int], max_tokens: int = 1) -> Asked:
    """Submit to an idle engine, and wait until the answer is there and prefilled."""
    asked = finished(submit(engine, prompt, max_tokens))
    settle(engine)
    return asked


def settle(engine: Engine) -> None:
    if not engine.drain(PATIENCE):
        raise TimeoutError(f"the engine was not idle within {PATIENCE} seconds")
