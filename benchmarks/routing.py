"""Costs of a router: the time that it adds to a request, and the requests that it routes each second.

    python -m benchmarks.routing [--workers 16] [--tokens 1024,8192] [--blocks 1000000] [--plain] [--small]

Workers run in two processes beside the router, and answer at once: what is measured is the router, messages and the
workers' thread. Each worker's picture has its share of the blocks, and half of the prompts are there, at one worker,
but for their last tokens. A request alone is timed from its submission to the end of its answer, in turns with one
that is sent to a worker without a router; the rate is that of requests of which 64 are open at any time. Where other
programs use the processors, the time that this process uses of them says more. `--plain`: sockets without encryption,
which a cluster does not have.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from types import SimpleNamespace

from benchmarks import measure
from benchmarks.measure import Row
from headwater.account import CacheAccount, Reason
from headwater.cache.stats import CacheStats
from headwater.cluster.encryption import CurveClient, CurveServer, KeyPair
from headwater.cluster.links import Link, zero
from headwater.cluster.messages import KV, KV_KINDS, Digests
from headwater.cluster.picture import Picture
from headwater.cluster.router import RoutedModel, Router
from headwater.cluster.sockets import PLAIN, Client, Contact
from headwater.cluster.wire import FailedMessage, FinishedMessage, Ping, Submit, WorkerInfo
from headwater.cluster.worker import Worker
from headwater.engine.meter import Backlog, EngineStats
from headwater.events import Event, FailedEvent, FinishedEvent, TokenEvent
from headwater.request import Generation, SamplingParams
from headwater.schedule.handover import NO_HANDOVER, Handover
from headwater.schedule.prefill_seconds import PrefillSpeed
from headwater.schedule.sequence import key_of

PAGE, TOKEN_BYTES = 64, 4
STATES = KV + 1  # the group of states
OPEN = 64  # requests at a time
PROCESSES = 2
PARTS = "the router's thread", "its client's", "encryption, and the rest"  # of what the router's process uses
KEY = b"k" * 32
PATIENCE = 60.0  # seconds
MODEL = RoutedModel("instant", SimpleNamespace(), None, {}, {}, SimpleNamespace(max_length=10**6))


class InstantEngine:
    """Answers one token at once."""

    def __init__(self) -> None:
        self._ids = count(1)

    def submit(
        self,
        generation: Generation,
        on_event: Callable[[Event], None],
        handover: Handover = NO_HANDOVER,
    ) -> int:
        on_event(TokenEvent(1, "a", -0.5))
        prompt = len(generation.prompt)
        on_event(FinishedEvent("length", "", CacheAccount(prompt, 0, 0, 0, Reason.COLD), 1))
        return next(self._ids)

    def cancel(self, request_id: int) -> None:
        """Do nothing: the answer was given."""

    def keep_answer(self, asked: Generation) -> None:
        """Do nothing: it has no cache."""

    def backlog(self) -> Backlog:
        return Backlog(0, 0, 0, PrefillSpeed(0.0, 1e-4), 0.1)

    def stats(self) -> EngineStats:
        return zero(EngineStats, cache=zero(CacheStats), tiers=())


def serve_instantly(workers: int, unit_bytes: int, router: KeyPair | None, contacts: Connection) -> None:
    """Run workers until the other end of the pipe is closed; send their contacts first. `router`: its keys."""
    info = WorkerInfo("one", 1, "instant", 10**6, 16, unit_bytes, "", "", {"deterministic": "yes"})
    running = []
    for _ in range(workers):
        server = CurveServer(KeyPair.new(), [router.public]) if router else PLAIN
        running.append(Worker(InstantEngine(), info, uuid.uuid4().bytes, "tcp://127.0.0.1:*", server=server))
    for worker in running:
        worker.start()
    contacts.send([worker.contact for worker in running])
    try:
        contacts.recv()
    except EOFError:
        for worker in running:
            worker.close()


def client_of(keys: KeyPair | None) -> Client:
    return CurveClient(keys) if keys else PLAIN


@contextmanager
def routed(workers: int, keys: KeyPair | None) -> Iterator[Router]:
    """Yield a router with these keys over workers in other processes."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        router = Router(MODEL, KEY, heartbeat_timeout=PATIENCE, client=client_of(keys))
        router.start()
        stack.callback(router.stop)
        for part in range(PROCESSES):
            ours, theirs = context.Pipe()
            share = workers // PROCESSES + (part < workers % PROCESSES)
            process = context.Process(target=serve_instantly, args=(share, PAGE * TOKEN_BYTES, keys, theirs))
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(ours.close)
            for i, contact in enumerate(ours.recv()):
                router.join(f"w{part}.{i}", contact)
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
        events: SimpleQueue[Event] = SimpleQueue()
        begun = time.perf_counter()
        router.submit(asked(prompt), events.put)
        wait_for_end(events)
        seconds.append(time.perf_counter() - begun)
    return seconds


def wait_for_end(events: SimpleQueue[Event]) -> None:
    """Return once the last event is there. Raises what it says if the request failed, and TimeoutError."""
    while True:
        try:
            event = events.get(timeout=PATIENCE)
        except Empty:
            raise TimeoutError(f"no answer within {PATIENCE:g} s") from None
        if isinstance(event, FailedEvent):
            raise event.error
        if isinstance(event, FinishedEvent):
            return


class Direct:
    """A worker that is asked without a router, over the same messages."""

    def __init__(self, contact: Contact, client: Client) -> None:
        self._link, self._ids = Link("direct", contact, uuid.uuid4().bytes, client), count(1)
        self._link.send(Ping(is_first=True))
        end = time.monotonic() + PATIENCE
        while self._link.info is None and time.monotonic() < end:
            self._link.receive()

    def alone(self, prompts: list[tuple[int, ...]]) -> list[float]:
        """Return the seconds of each request, one after the other."""
        return [self._asked(prompt) for prompt in prompts]

    def _asked(self, prompt: tuple[int, ...]) -> float:
        begun = time.perf_counter()
        self._link.send(Submit(next(self._ids), 1, asked(()), key_of(prompt)))
        while self._link.socket.poll(int(1000 * PATIENCE)):
            for message in self._link.receive():
                if isinstance(message, FailedMessage):
                    raise message.event.error
                if isinstance(message, FinishedMessage):
                    return time.perf_counter() - begun
        raise TimeoutError(f"no answer within {PATIENCE:g} s")

    def close(self) -> None:
        self._link.close()


def rate(router: Router, prompts: list[tuple[int, ...]]) -> float:
    """Return the requests that are answered a second, OPEN at a time."""
    room = threading.Semaphore(OPEN)

    def on_event(event: Event) -> None:
        if isinstance(event, FinishedEvent | FailedEvent):  # those that failed are counted by the caller
            room.release()

    begun = time.perf_counter()
    for prompt in prompts:
        room.acquire()
        router.submit(asked(prompt), on_event)
    for _ in range(OPEN):
        if not room.acquire(timeout=PATIENCE):
            raise TimeoutError(f"no answer within {PATIENCE:g} s")
    return len(prompts) / (time.perf_counter() - begun)


def processors_of(router: Router) -> tuple[float, float, float]:
    """Return the seconds of a processor of the router's thread, of this one, and of this process's others."""
    assert router._thread.ident is not None
    thread, own = time.clock_gettime(time.pthread_getcpuclockid(router._thread.ident)), time.thread_time()
    return thread, own, time.process_time() - thread - own


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def rows_at(
    router: Router, client: Client, tokens: int, given: argparse.Namespace, rng: random.Random
) -> Iterator[Row]:
    """Yield the figures of prompts of one length."""
    prompts = [tuple(rng.randrange(50_000) for _ in range(tokens)) for _ in range(given.requests)]
    links = list(router.links.values())
    for number, link in enumerate(links):
        known = prompts[number : given.requests // 2 : given.workers]
        link.follower = picture_of(known, given.blocks // given.workers, rng)  # type: ignore[assignment]
    before = router.counts["answered"]
    with closing(Direct(links[0].contact, client)) as direct:
        works = {"routed": partial(alone, router, prompts), "direct": partial(direct.alone, prompts)}
        for work in works.values():
            work()
        times = [{name: work() for name, work in works.items()} for _ in range(given.repeats)]
    rates, processors = [], []
    for _ in range(given.repeats):
        begun = processors_of(router)
        rates.append(rate(router, prompts))
        ended = processors_of(router)
        processors.append([1e6 * (b - a) / len(prompts) for a, b in zip(begun, ended, strict=True)])
    if router.counts["answered"] - before != (2 * given.repeats + 1) * given.requests:
        raise RuntimeError(f"not every request was answered: {dict(router.counts)}")
    p50 = {name: [1e3 * quantile(one[name], 0.5) for one in times] for name in works}
    label = f"{tokens:,} tokens"
    yield Row(f"{label}: a request alone, p50", "ms", p50["routed"])
    yield Row(f"{label}: p99", "ms", [1e3 * quantile(one["routed"], 0.99) for one in times])
    yield Row(f"{label}: without a router, p50", "ms", p50["direct"])
    added = [a - b for a, b in zip(p50["routed"], p50["direct"], strict=True)]
    yield Row(f"{label}: what the router adds, p50", "ms", added, "<= 1")
    yield Row(f"{label}: routed, {OPEN} open", "1/s", rates, ">= 2000")
    for name, times in zip(PARTS, zip(*processors, strict=True), strict=True):
        yield Row(f"{label}: processor a route, {name}", "us", list(times))


def main() -> None:
    parser = measure.parser(__doc__, "routing", repeats=5)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--tokens", type=measure.numbers, default=(1024, 8192), help="of prompts")
    parser.add_argument("--blocks", type=int, default=10**6, help="of all pictures together")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--plain", action="store_true", help="without encryption")
    given = measure.prepared(parser)
    if given.small:
        given.workers, given.tokens, given.blocks, given.requests = 2, (256,), 1000, 20
    rng = random.Random(given.seed)
    keys = None if given.plain else KeyPair.new()
    with routed(given.workers, keys) as router:
        rows = [row for tokens in given.tokens for row in rows_at(router, client_of(keys), tokens, given, rng)]
    measure.report(given, rows, blocks=given.blocks, workers=given.workers, plain=given.plain)


if __name__ == "__main__":
    main()
