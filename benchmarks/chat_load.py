"""Is anything computed twice in chats?

    python -m benchmarks.chat_load [--repeats 5] [--threads 2] [--small]

8 clients with one system prompt hold chats of 12 turns at once, through the official client, without pausing between
turns. A request may compute what lies past the longest prefix that was sent before or is part of an answer, and 64
tokens. Answers that are prefilled when they end are counted apart. A turn that comes before the answer was prefilled
computes it instead, which is the same work at another time, so single requests are held to what was sent.
Each repetition has a namespace of its own. The weights are random, such that answers do not end and their text encodes
back to their tokens.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from os.path import commonprefix
from pathlib import Path

import openai

from benchmarks import measure
from benchmarks.engines import Model, settle
from benchmarks.measure import Row
from benchmarks.servers import ServerThread
from headwater.account import CacheAccount
from headwater.config import ServeConfig
from headwater.engine.engine import Engine
from headwater.events import Event, FinishedEvent, TokenEvent
from headwater.models.files import embedded
from headwater.request import Generation
from tests import checkpoints

RECIPE = "qwen3_5"
CLIENTS, TURNS, SMALL_TURNS = 8, 12, 3
SYSTEM, QUESTION, ANSWER = 600, 120, 48  # tokens, nearly
SLACK = 64  # tokens a request
PATIENCE = 300  # seconds


@contextmanager
def chat_checkpoint() -> Iterator[Path]:
    """The folder of a random checkpoint with a chat template, as long as it is needed."""
    with tempfile.TemporaryDirectory() as root:
        folder = checkpoints.checkpoint(Path(root), RECIPE)
        shutil.copy(embedded() / "chat_template.jinja", folder)
        yield folder


@dataclass(eq=False)
class Record:
    """A request as the engine got it, with the longest prefix of it that was sent, or sent or answered, before."""

    generation: Generation
    sent: int
    known: int
    answer: list[TokenEvent] = field(default_factory=list)
    account: CacheAccount | None = None

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.generation.prompt

    @property
    def namespace(self) -> str:
        return self.generation.namespace

    @property
    def text(self) -> tuple[int, ...]:
        """Tokens of the prompt and of the answer."""
        return (*self.prompt, *(event.token for event in self.answer))

    @property
    def computed(self) -> int:
        assert self.account is not None
        return self.account.prompt_tokens - self.account.cached_tokens

    @property
    def lost(self) -> int:
        """Tokens that were computed although they were sent or answered before."""
        return self.computed - (len(self.prompt) - self.known)

    @property
    def allowed(self) -> int:
        return len(self.prompt) - self.known + SLACK

    @property
    def beyond_sent(self) -> int:
        return self.computed - (len(self.prompt) - self.sent + SLACK)


class Watched:
    """An engine that keeps account of what goes through it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self.records: list[Record] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def submit(self, generation: Generation, on_event: Callable[[Event], None]) -> int:
        with self._lock:
            same = [r for r in self.records if r.namespace == generation.namespace]
            sent = longest_shared(generation.prompt, (r.prompt for r in same))
            known = longest_shared(generation.prompt, (r.text for r in same if r.account))
            record = Record(generation, sent, max(sent, known))
            self.records.append(record)

        def watch(event: Event) -> None:
            if isinstance(event, TokenEvent):
                record.answer.append(event)
            if isinstance(event, FinishedEvent):
                record.account = event.account
            on_event(event)

        return self._engine.submit(generation, watch)


def longest_shared(prompt: tuple[int, ...], earlier: Iterable[tuple[int, ...]]) -> int:
    """Tokens that `prompt` begins with like one of the earlier texts."""
    return max((len(commonprefix((prompt, text))) for text in earlier), default=0)  # noqa: RUF071 (of any sequences)


def chat(client: openai.OpenAI, system: str, salt: str, question: Callable[[], str], turns: int) -> None:
    messages = [{"role": "system", "content": system}]
    for _ in range(turns):
        messages.append({"role": "user", "content": question()})
        answer = client.chat.completions.create(
            model="any",
            messages=messages,
            max_tokens=ANSWER,
            temperature=0,
            extra_body={"cache_salt": salt, "ignore_eos": True},
        )
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})


def load(client: openai.OpenAI, model: Model, salt: str, turns: int) -> None:
    """All clients at once, to the end of their chats."""

    def text(rng: random.Random, n_tokens: int) -> str:
        return model.loaded.tokenizer.decode(model.prompt(rng, n_tokens)).strip()

    system = text(random.Random(salt), SYSTEM)
    with ThreadPoolExecutor(CLIENTS) as pool:
        chats = []
        for number in range(CLIENTS):
            question = partial(text, random.Random(f"{salt}, {number}"), QUESTION)
            chats.append(pool.submit(chat, client, system, salt, question, turns))
        for done in chats:
            done.result(PATIENCE)


def rows_of(by_run: list[list[Record]], answers: list[int]) -> list[Row]:
    """One value for each run of the load."""
    prompts = [sum(len(r.prompt) for r in records) for records in by_run]
    computed = [sum(r.computed for r in records) for records in by_run]
    allowed = [sum(r.allowed for r in records) for records in by_run]
    early = [[r.computed - r.allowed for r in records if r.computed > r.allowed] for records in by_run]
    return [
        Row("prefill computed / allowed", "x", measure.ratios(computed, allowed), "<= 1"),
        Row(
            "worst request, computed - allowed past what was sent",
            "tokens",
            list(map(worst, by_run)),
            "<= 0",
        ),
        Row("prefill computed by requests", "tokens", computed),
        Row("prefill allowed", "tokens", allowed),
        Row("prefill of finished answers, apart", "tokens", answers),
        Row("turns that came before their answer was prefilled", "requests", [len(tokens) for tokens in early]),
        Row("what these computed of it beyond their allowance", "tokens", [sum(tokens) for tokens in early]),
        Row("prompts", "tokens", prompts),
        Row("prompt tokens not computed", "%", [100 - 100 * c / p for c, p in zip(computed, prompts, strict=True)]),
    ]


def worst(records: list[Record]) -> int:
    return max(r.beyond_sent for r in records)


def main() -> None:
    given = measure.options(__doc__, "chat_load", repeats=5)
    with chat_checkpoint() as folder:
        model = Model(folder)
    config = ServeConfig(memory=2 * 10**9)
    by_run, answers = [], []
    with model.engines(only=config) as (engine,):
        watched = Watched(engine)
        with ServerThread(watched, config) as server:
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", timeout=PATIENCE)
            for run in range(given.repeats):
                salt, before = f"{given.seed}, {run}", engine.stats().answer_tokens
                load(client, model, salt, SMALL_TURNS if given.small else TURNS)
                settle(engine)
                answers.append(engine.stats().answer_tokens - before)
                by_run.append([record for record in watched.records if record.namespace == salt])
    measure.report(given, rows_of(by_run, answers), model=f"random {RECIPE}", clients=CLIENTS, turns=TURNS)


if __name__ == "__main__":
    main()
