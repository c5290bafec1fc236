"""Workers in processes of this machine that compute the cold segments of one request, for `parallel_segments`."""

from __future__ import annotations

import random
import statistics
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise

from benchmarks.measure import console
from benchmarks.worker_processes import PATIENCE, worker_config, workers
from headwater.account import CacheAccount
from headwater.cluster.router import Router
from headwater.events import Event, FailedEvent, FinishedEvent, TokenEvent
from headwater.request import Fidelity, Generation, SamplingParams, Span
from headwater.table import Table

COMPUTE = ("emulated", "real")
MEMORY = 600_000_000  # bytes of each worker
LEAD, QUESTION, ANSWER = 64, 64, 8  # tokens
REPEATS = 3  # requests that are counted, after one that is not
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


@dataclass(frozen=True, slots=True)
class Measured:
    """Requests to one number of workers."""

    row: dict[str, object]
    answers: list[list[tuple[int, float | None]]]
    token_seconds: float | None  # as the workers have measured


def measure(count: int, segments: int, tokens: int, token_seconds: float | None) -> Measured:
    """Ask workers for the same prompts as any other number of them."""
    with workers(count, worker_config(MEMORY), token_seconds) as running, running.routers() as (router,):
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
        measured = next(iter(router.links.values())).backlog.prefill
        return Measured(row, [answer.tokens for _, answer in found], measured and measured.token)


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
