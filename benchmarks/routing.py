"""Costs of a router: the time that it adds to a request, and the requests that it routes each second.

    python -m benchmarks.routing [--workers 16] [--tokens 8192] [--blocks 1000000] [--small]

Workers run in two processes beside the router, and answer at once: what is measured is the router, messages and the
workers' thread. Each worker's picture has its share of the blocks, and half of the prompts are there, at one worker,
but for their last tokens. A request alone is timed from its submission to the end of its answer; the rate is that of
requests of which 64 are open at any time.
"""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from multiprocessing.connection import Connection
from types import SimpleNamespace

from benchmarks import measure
from benchmarks.measure import Row
from headwater.account import CacheAccount, Reason
from headwater.cache.view import CacheStats
from headwater.cluster.digests import Digests
from headwater.cluster.messages import KV, KV_KINDS
from headwater.cluster.picture import Picture
from headwater.cluster.router import RoutedModel, Router, zero
from headwater.cluster.wire import WorkerInfo
from headwater.cluster.worker import Worker
from headwater.engine.meter import Backlog, EngineStats
from headwater.events import Event, FinishedEvent, TokenEvent
from headwater.request import Generation, SamplingParams

PAGE, TOKEN_BYTES = 64, 4
STATES = KV + 1  # the group of states
OPEN = 64  # requests at a time
PROCESSES = 2
KEY = b"k" * 32
PATIENCE = 60.0  # seconds
MODEL = RoutedModel("instant", SimpleNamespace(), None, {}, {}, SimpleNamespace(max_length=10**6))


class InstantEngine:
    """Answers one token at once."""

    def __init__(self) -> None:
        self._ids = count(1)

    def submit(self, generation: Generation, on_event: Callable[[Event], None], output: Iterable[int] = ()) -> int:
        on_event(TokenEvent(1, "a", -0.5))
        prompt = len(generation.prompt)
        on_event(FinishedEvent("length", "", CacheAccount(prompt, 0, 0, 0, Reason.COLD), 1))
        return next(self._ids)

    def cancel(self, request_id: int) -> None:
        """Do nothing: the answer was given."""

    def backlog(self) -> Backlog:
        return Backlog(0, 0, 0, 1e-4, 0.1)

    def stats(self) -> EngineStats:
        return zero(EngineStats, cache=zero(CacheStats), tiers=())


def serve_instantly(workers: int, unit_bytes: int, addresses: Connection) -> None:
    """Run workers until the other end of the pipe is closed; send their addresses first."""
    info = WorkerInfo("one", 1, "instant", 10**6, 16, unit_bytes, "", "", {"deterministic": "yes"})
    running = [Worker(InstantEngine(), info, uuid.uuid4().bytes, "tcp://127.0.0.1:*") for _ in range(workers)]
    for worker in running:
        worker.start()
    addresses.send([worker.address for worker in running])
    try:
        addresses.recv()
    except EOFError:
        for worker in running:
            worker.close()


@contextmanager
def routed(workers: int) -> Iterator[Router]:
    """Yield a router over workers in other processes."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        router = Router(MODEL, KEY, heartbeat_timeout=PATIENCE)
        router.start()
        stack.callback(router.stop)
        for part in range(PROCESSES):
            ours, theirs = context.Pipe()
            share = workers // PROCESSES + (part < workers % PROCESSES)
            process = context.Process(target=serve_instantly, args=(share, PAGE * TOKEN_BYTES, theirs))
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(ours.close)
            for i, address in enumerate(ours.recv()):
                router.join(f"w{part}.{i}", address)
        if not router.wait_for(workers, PATIENCE):
            raise TimeoutError(f"not all of {workers} workers joined within {PATIENCE:g} s")
        yield router


def picture_of(prompts: Iterable[tuple[int, ...]], blocks: int, rng: random.Random) -> SimpleNamespace:
    """Return a follower whose picture has these prompts without their last block, and others to fill it up."""
    picture, digests = Picture(), Digests(KEY, PAGE * TOKEN_BYTES)
    picture.next, picture.block_size = 1, PAGE
    picture.groups = {KV: next(iter(KV_KINDS)), STATES: "mamba"}
    for prompt in prompts:
        held = digests.prompt(prompt)[:-1]
        picture.held[KV].update(held)
        picture.held[STATES].update(held[-1:])
    picture.held[KV].update(rng.getrandbits(64) for _ in range(blocks - len(picture.held[KV])))
    return SimpleNamespace(picture=picture)


def asked(prompt: tuple[int, ...]) -> Generation:
    return Generation(prompt, SamplingParams(max_tokens=1, seed=1))


def alone(router: Router, prompts: list[tuple[int, ...]]) -> list[float]:
    """Return the seconds of each request, one after the other."""
    seconds = []
    for prompt in prompts:
        done = threading.Event()
        begun = time.perf_counter()
        router.submit(asked(prompt), lambda event, done=done: done.set() if isinstance(event, FinishedEvent) else None)
        if not done.wait(PATIENCE):
            raise TimeoutError(f"no answer within {PATIENCE:g} s")
        seconds.append(time.perf_counter() - begun)
    return seconds


def rate(router: Router, prompts: list[tuple[int, ...]]) -> float:
    """Return the requests that are answered a second, OPEN at a time."""
    room = threading.Semaphore(OPEN)

    def on_event(event: Event) -> None:
        if isinstance(event, FinishedEvent):
            room.release()

    begun = time.perf_counter()
    for prompt in prompts:
        room.acquire()
        router.submit(asked(prompt), on_event)
    for _ in range(OPEN):
        if not room.acquire(timeout=PATIENCE):
            raise TimeoutError(f"no answer within {PATIENCE:g} s")
    return len(prompts) / (time.perf_counter() - begun)


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = measure.parser(__doc__, "routing", repeats=5)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8192, help="of a prompt")
    parser.add_argument("--blocks", type=int, default=10**6, help="of all pictures together")
    parser.add_argument("--requests", type=int, default=1000)
    given = measure.prepared(parser)
    if given.small:
        given.workers, given.tokens, given.blocks, given.requests = 2, 256, 1000, 20
    rng = random.Random(given.seed)
    prompts = [tuple(rng.randrange(50_000) for _ in range(given.tokens)) for _ in range(given.requests)]
    with routed(given.workers) as router:
        for number, link in enumerate(router._links.values()):
            known = prompts[number : given.requests // 2 : given.workers]
            link._follower = picture_of(known, given.blocks // given.workers, rng)  # type: ignore[assignment]
        alone(router, prompts)
        times = [alone(router, prompts) for _ in range(given.repeats)]
        rates = [rate(router, prompts) for _ in range(given.repeats)]
        if router.counts["answered"] != (2 * given.repeats + 1) * given.requests:
            raise RuntimeError(f"not every request was answered: {dict(router.counts)}")
    label = f"{given.tokens:,} tokens, {given.workers} workers"
    rows = [
        Row(f"a request alone, p50, {label}", "ms", [1e3 * quantile(one, 0.5) for one in times], "<= 1"),
        Row(f"a request alone, p99, {label}", "ms", [1e3 * quantile(one, 0.99) for one in times]),
        Row(f"requests routed, {OPEN} open, {label}", "1/s", rates, ">= 2000"),
    ]
    measure.report(given, rows, blocks=given.blocks, workers=given.workers)


if __name__ == "__main__":
    main()
