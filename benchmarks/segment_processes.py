"""Workers in processes of this machine that compute the cold segments of one request, for `parallel_segments`."""

from __future__ import annotations

import multiprocessing
import random
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection

import torch

from benchmarks.measure import console
from headwater.account import CacheAccount
from headwater.cli.router_process import router_of
from headwater.cluster.curve import RouterKeys, WorkerKeys
from headwater.cluster.hosting import Host
from headwater.cluster.router import Router
from headwater.config import ServeConfig
from headwater.engine.engine import Engine
from headwater.events import Event, FailedEvent, FinishedEvent, TokenEvent
from headwater.models.embedded import embedded
from headwater.request import Fidelity, Generation, SamplingParams, Span
from headwater.schedule.step import Step
from headwater.table import Table

COMPUTE = ("emulated", "real")
MEMORY = 600_000_000  # bytes of each worker
LEAD, QUESTION, ANSWER = 64, 64, 8  # tokens
REPEATS = 3  # requests that are counted, after one that is not
PATIENCE = 300.0  # seconds
HEARD = 0.5  # seconds until a router knows what workers have measured
MS = 1000


@dataclass
class Answer:
    """Tokens of an answer with their log probabilities, when the first one came, and the account."""

    tokens: list[tuple[int, float | None]] = field(default_factory=list)
    first: float = 0.0  # seconds of a clock
    account: CacheAccount | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def on_event(self, event: Event) -> None:
        if isinstance(event, TokenEvent):
            self.first = self.first or time.perf_counter()
            self.tokens.append((event.token, event.logprob))
        if isinstance(event, FinishedEvent):
            self.account = event.account
        if isinstance(event, FinishedEvent | FailedEvent):
            self.ended.set()


def asking(segments: int, tokens: int, seed: int) -> Generation:
    """Return a request with cold segments between a leading part and a question."""
    ends = [LEAD + n * tokens for n in range(segments + 1)]
    prompt = random.Random(seed).choices(range(1000), k=ends[-1] + QUESTION)
    spans = tuple(Span(start, end) for start, end in pairwise(ends))
    params = SamplingParams(max_tokens=ANSWER, temperature=0.0, seed=seed, logprobs=0, ignore_eos=True)
    return Generation(tuple(prompt), params, segments=spans, fidelity=Fidelity.FAST)


def ask(router: Router, generation: Generation) -> tuple[float, Answer]:
    """Return the milliseconds to the first token, and the answer."""
    answer, begun = Answer(), time.perf_counter()
    router.submit(generation, answer.on_event)
    assert answer.ended.wait(PATIENCE), "no answer"
    assert answer.account is not None, "the request failed"
    return (answer.first - begun) * MS, answer


# -- processes


def emulate(engine: Engine, token_seconds: float) -> None:
    """Let an engine compute nothing, and sleep for the time of a step's tokens. Its answers are token 0."""

    def run(step: Step) -> torch.Tensor:
        time.sleep(token_seconds * (sum(leg.plan.computed_tokens for leg in step.legs) + len(step.decodes)))
        return torch.zeros(sum(item.wants_token for item in step.items), engine.spec.vocab_size)

    engine.runner.run = run  # type: ignore[method-assign]


def serve(config: ServeConfig, keys: WorkerKeys, token_seconds: float | None, pipe: Connection) -> None:
    """Run one worker (a process of its own) until the other end of the pipe is closed."""
    host = Host(config, keys, lambda: "127.0.0.1", share_weights=False)
    if token_seconds is not None:
        emulate(host._engine, token_seconds)
    pipe.send(host.contact())
    try:
        pipe.recv()
    except EOFError:
        host.stop()


@contextmanager
def workers(count: int, token_seconds: float | None) -> Iterator[Router]:
    """Yield a router over workers with one thread each, which compute, or sleep so long for a token."""
    config = ServeConfig(model=embedded(), memory=MEMORY, threads=1, log_format="text", healing="off")
    keys, spawn = RouterKeys.new(), multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        router = router_of(config, keys, "least_cost")
        router._links.heartbeat_timeout = PATIENCE  # a busy machine loses no worker, since nobody starts another
        router.start()
        pipes = []
        for _ in range(count):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=serve, args=(config, keys.for_workers, token_seconds, theirs), daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.join, PATIENCE)
            stack.callback(ours.close)
            pipes.append(ours)
        stack.callback(router.stop)  # before the workers end
        for n, pipe in enumerate(pipes):
            router.join(f"w{n}", pipe.recv())
        assert router.wait_for(count, PATIENCE), "workers are missing"
        yield router


@dataclass(frozen=True, slots=True)
class Measured:
    """Requests to one number of workers."""

    row: dict[str, object]
    answers: list[list[tuple[int, float | None]]]
    token_seconds: float | None  # as the workers have measured


def measure(count: int, segments: int, tokens: int, token_seconds: float | None) -> Measured:
    """Ask workers for the same prompts as any other number of them."""
    with workers(count, token_seconds) as router:
        ask(router, asking(segments, tokens, 0))
        time.sleep(HEARD)
        found = []
        for seed in range(1, REPEATS + 1):
            found.append(ask(router, asking(segments, tokens, seed)))
            time.sleep(HEARD)
        times = [first for first, _ in found]
        accounts = [answer.account for _, answer in found if answer.account is not None]
        row = {
            "workers": count,
            "first_token_ms": statistics.median(times),
            "least_ms": min(times),
            "most_ms": max(times),
            "segments_apart": [account.segments_apart for account in accounts],
            "cold_tokens": [account.cold_tokens for account in accounts],
            "pulled_bytes": sum(one.bytes_read for one in router.stats().tiers),
        }
        measured = [link.backlog.token_seconds for link in router._links.values()]
        return Measured(row, [answer.tokens for _, answer in found], measured[0])


def over_processes(counts: list[int], compute: str, segments: int, tokens: int) -> list[dict[str, object]]:
    """Print and return a row for each number of workers. Raises SystemExit if an answer's bits differ."""
    token_seconds = None
    if compute == "emulated":
        token_seconds = measure(1, segments, tokens, None).token_seconds
    rows: list[dict[str, object]] = []
    answers = None
    for count in counts:
        measured = measure(count, segments, tokens, token_seconds)
        answers = answers or measured.answers
        same = None if compute == "emulated" else measured.answers == answers
        rows.append({**measured.row, "token_ms": (measured.token_seconds or 0.0) * MS, "same_bits": same})
    table = Table(
        f"processes of this machine, compute {compute}: {segments} segments of {tokens:,} tokens",
        ("workers",),
        ("first token, ms", "least", "most", "speed-up", "segments apart", "same bits"),
    )
    for row in rows:
        one, first = row["first_token_ms"], rows[0]["first_token_ms"]
        assert isinstance(one, float)
        assert isinstance(first, float)
        times = (f"{row[name]:,.0f}" for name in ("first_token_ms", "least_ms", "most_ms"))
        bits = "not computed" if row["same_bits"] is None else "yes" if row["same_bits"] else "no"
        table.add_row(str(row["workers"]), *times, f"{first / one:.2f}", str(row["segments_apart"]), bits)
    console().print(table)
    if any(row["same_bits"] is False for row in rows):
        raise SystemExit("an answer differs from that of the first number of workers")
    return rows
