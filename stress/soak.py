"""Random clients against one small server, for as long as one likes; at the end nothing may be lost.

    python -m stress.soak [--for 3m] [--visits 100000] [--clients 8] [--seed 0]
        [--dtype auto|float32|bfloat16] [--weights auto|int8|int4] [--threads 2]
        [--speculation off|auto|ngram|suffix|mtp] [--compared 200] [--tier] [--device cpu|cuda]

Memory is tiny, so checkpoints are evicted, requests preempted and queues full all the time. Prints counts; exits with
1, and the seed, if a request had no proper answer, a page was lost, an invariant broke, or an answer differs from
that of a server without a cache. With speculation every draft is verified, whether it pays or not, and answers are
compared with those of three servers: without a cache, without drafts, and without either. With --tier every checkpoint
is stored in a folder that is too small for all, whatever it has is loaded, and a second server goes on with the folder
after half of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from headwater.config import DEVICES, DTYPES, SPECULATION, WEIGHTS
from stress.answers import Choices, Wrong
from stress.draw import Draw
from stress.live_server import PATIENCE, LiveServer, embedded_model, release_free_memory, resident_bytes
from stress.visits import KINDS, Client, post
from tests.exactness.rig import verify_every_draft

PAGES = 120  # a checkpoint takes 10 of them, and the state of each running request as many again
MAX_RUNNING, MAX_WAITING = 4, 12
CHECK_EVERY = 2.0  # seconds
WARM_UP = 0.3  # of the time
# loaded kernels, recorded steps, the allocator's free memory; `stress.memory` holds the rest of the server to far less
MAX_GROWTH = 2**29  # bytes

Body = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """Limits of a soak: seconds or visits until its end, and the number of requests whose answers are compared."""

    seconds: float
    visits: int
    clients: int = 8
    compared: int = 200


@dataclass
class Samples:
    """Answers to compare, each of those seen with the same chance (reservoir sampling: Vitter 1985, algorithm R)."""

    rng: random.Random
    most: int
    seen: int = 0
    kept: list[tuple[str, Body, Choices]] = field(default_factory=list)

    @property
    def choices(self) -> int:
        """Answers that are kept: a request may have several."""
        return sum(len(choices) for _, _, choices in self.kept)

    def keep(self, path: str, body: Body, choices: Choices) -> None:
        self.seen += 1
        if len(self.kept) < self.most:
            self.kept.append((path, body, choices))
            return
        at = self.rng.randrange(self.seen)
        if at < self.most:
            self.kept[at] = (path, body, choices)


@dataclass
class Soak:
    """One run: its counts and its faults."""

    server: LiveServer
    seed: int
    limits: Limits
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)  # resident bytes
    equal: dict[str, int] = field(default_factory=dict)  # requests answered alike, by the server compared with
    checks: int = 0
    visits: int = 0

    def __post_init__(self) -> None:
        self.samples = Samples(random.Random(self.seed), self.limits.compared)

    async def run(self) -> None:
        """Send clients until the time, or their number, is up; then all must be as it was before."""
        self.memory["start"] = resident_bytes()
        begun = time.monotonic()
        until = begun + self.limits.seconds
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
        async with httpx.AsyncClient(base_url=self.server.url, timeout=PATIENCE, limits=limits) as http:
            watching = asyncio.create_task(self._watch(begun))
            await asyncio.gather(*(self._client(http, number, until) for number in range(self.limits.clients)))
            watching.cancel()
        self._must("after all clients left", self.server.check_idle)
        release_free_memory()
        self.memory["end"] = resident_bytes()
        growth = self.memory["end"] - self.memory["start"]
        if growth > MAX_GROWTH:
            self.faults.append(
                f"resident memory grew by {growth / 2**20:.1f} MiB, at most {MAX_GROWTH >> 20} are allowed"
            )

    async def _client(self, http: httpx.AsyncClient, number: int, until: float) -> None:
        draw = Draw(self.seed, number)
        client = Client(http, self.server.port, draw, self.samples.keep, MAX_RUNNING)
        kinds, weights = list(KINDS), list(KINDS.values())
        while time.monotonic() < until and self.visits < self.limits.visits and len(self.faults) < 20:
            self.visits += 1
            kind = draw.rng.choices(kinds, weights)[0]
            try:
                outcome = await kind(client)
            except (Wrong, httpx.HTTPError, OSError, ValueError, KeyError, EOFError) as error:
                outcome = "FAILED"
                self.faults.append(f"client {number}, {kind.__name__}: {type(error).__name__}: {error}")
            self.outcomes[kind.__name__, outcome] += 1

    async def _watch(self, begun: float) -> None:
        """Check the cache between steps, and note when the warm-up is over."""
        while True:
            await asyncio.sleep(min(CHECK_EVERY, self.limits.seconds / 10))
            await asyncio.to_thread(self._must, "under load", self.server.check)
            self.checks += 1
            if "after warm-up" not in self.memory and time.monotonic() - begun > WARM_UP * self.limits.seconds:
                release_free_memory()
                self.memory["after warm-up"] = resident_bytes()

    def _must(self, when: str, check: Any) -> None:
        try:
            check()
        except AssertionError as error:
            self.faults.append(f"{when}: {error}")

    async def compare(self, name: str, reference: LiveServer) -> None:
        """Count the samples for which another server has the same tokens and log probabilities."""
        self.equal[name] = 0
        left = list(self.samples.kept)
        async with httpx.AsyncClient(base_url=reference.url, timeout=PATIENCE) as http:
            client = Client(http, reference.port, Draw(0), lambda *_: None, MAX_RUNNING)

            async def ask() -> None:
                while left:
                    path, body, choices = left.pop()
                    _, expected = await post(client, path, body)
                    if same(choices, expected):
                        self.equal[name] += 1
                    else:
                        self.faults.append(f"not as {name}: {path} {str(body)[:300]}: {choices}, {expected}")

            await asyncio.gather(*(ask() for _ in range(self.limits.clients)))


def same(a: Choices, b: Choices) -> bool:
    """Texts, ends and log probabilities, to the last bit that JSON carries (all of them: repr of a double)."""
    return {i: (c.text, c.finish_reason, flat(c.logprobs)) for i, c in a.items()} == {
        i: (c.text, c.finish_reason, flat(c.logprobs)) for i, c in b.items()
    }


def flat(logprobs: list[Any]) -> dict[str, list[Any]]:
    """Log probabilities of a choice, whether they came whole or token by token."""
    joined: dict[str, list[Any]] = {}
    for part in logprobs:
        for name, values in (part or {}).items():
            joined.setdefault(name, []).extend(values or [])
    return joined


def report(soak: Soak, console: Console) -> None:
    names = sorted({outcome for _, outcome in soak.outcomes})
    table = Table("visit", *names, title=f"{soak.visits:,} visits of {soak.limits.clients} clients, seed {soak.seed}")
    for kind in KINDS:
        table.add_row(kind.__name__, *(f"{soak.outcomes[kind.__name__, name] or '·'}" for name in names))
    console.print(table)
    spec, stats = soak.server.engine.spec, soak.server.engine.stats()
    cache, pages = stats.cache, stats.cache.pages_by_use()
    prompts = stats.prefill_tokens + cache.resumed_tokens
    threads = soak.server.engine.loop.compute_threads
    for name, value in {
        "computed in": f"{spec.dtype_name}, weights {spec.weights_held}, {threads} threads",
        "steps": stats.steps,
        "tokens (prefill, answers, decode)": (stats.prefill_tokens, stats.answer_tokens, stats.decode_tokens),
        "resumed": f"{cache.resumes:,} requests, {cache.resumed_tokens:,} of {prompts:,} tokens",
        "evictions": cache.evictions_by_kind(),
        "preemptions": stats.preemptions,
        "turned away": stats.refused,
        "expired": stats.expired,
        "failed steps": stats.failed_steps,
        "pages at the end": pages,
        "check() under load": soak.checks,
        "resident MiB": {when: round(size / 2**20, 1) for when, size in soak.memory.items()},
        "drafts": f"{stats.accepted_drafts:,} accepted, {stats.rejected_drafts:,} rejected",
        "tier": [
            f"{one.states:,} states, {one.read:,} parts read, {one.written:,} written, {one.evicted:,} evicted, "
            f"{one.corrupt:,} corrupt, "
            f"{one.errors:,} errors, {stats.loaded_tokens:,} tokens loaded, {stats.copies_dropped:,} copies dropped"
            for one in stats.tiers
        ],
        "compared": f"{len(soak.samples.kept)} of {soak.samples.seen} requests, {soak.samples.choices} answers",
        **{f"equal to a server {name}": equal for name, equal in soak.equal.items()},
    }.items():
        console.print(f"{name}: {value}", highlight=False)
    for fault in soak.faults:
        console.print(f"FAULT {fault}", markup=False, style="red")
    console.print(f"{'FAILED' if soak.faults else 'passed'}: {len(soak.faults)} faults, seed {soak.seed}")


def soak(
    seed: int,
    limits: Limits,
    model: tuple[Any, Any],
    console: Console,
    speculation: str = SPECULATION[0],
    tier: Path | None = None,
    device: str = "cpu",
) -> Soak:
    """Run, compare, report."""
    small: Body = {"max_running": MAX_RUNNING, "max_waiting": MAX_WAITING, "max_tokens_per_step": 256, "device": device}
    others: dict[str, Body] = {"without a cache": {"cache": False, "speculation": speculation}}
    if speculation != SPECULATION[0]:
        others |= {"without drafts": {}, "without either": {"cache": False}}
    with LiveServer(*model, PAGES, tier, speculation=speculation, **small) as server:
        verify_every_draft(server.engine.scheduler.speculation)
        run = Soak(server, seed, limits)
        asyncio.run(run.run())
        run.faults += [
            f"tier: {one.errors:,} errors, {one.corrupt:,} corrupt parts, {one.other_states:,} states of others"
            for one in server.engine.stats().tiers
            if one.errors or one.corrupt or one.other_states
        ]
        for name, settings in others.items():
            with LiveServer(*model, 40 * PAGES, device=device, **settings) as reference:
                verify_every_draft(reference.engine.scheduler.speculation)
                asyncio.run(run.compare(name, reference))
        report(run, console)
    return run


def seconds(text: str) -> float:
    """Return the seconds of "90", "90s", "3m" or "2h"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90s, 3m or 2h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Random clients against one small server.")
    parser.add_argument("--for", dest="seconds", type=seconds, default=seconds("3m"))
    parser.add_argument("--visits", type=int, default=10**9)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--weights", choices=WEIGHTS, default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--speculation", choices=SPECULATION, default=SPECULATION[0])
    parser.add_argument("--tier", action="store_true", help="store checkpoints in a folder, and restart once")
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--compared", type=int, default=200, help="requests, at most, whose answers are compared")
    return parser.parse_args(given)


def main() -> int:
    args = arguments()
    logging.getLogger("headwater.request").setLevel(logging.ERROR)  # refusals are counted, not told
    limits = Limits(args.seconds, args.visits, args.clients, args.compared)
    model = embedded_model(args.dtype, args.weights, args.threads, args.device)
    console = Console(width=140)
    if not args.tier:
        return 1 if soak(args.seed, limits, model, console, args.speculation, device=args.device).faults else 0
    half = replace(limits, seconds=limits.seconds / 2, visits=limits.visits // 2)
    with tempfile.TemporaryDirectory() as folder:
        runs = [soak(args.seed, half, model, console, args.speculation, Path(folder)) for _ in range(2)]
    return 1 if any(run.faults for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
