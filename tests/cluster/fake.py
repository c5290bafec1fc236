"""Workers with an engine whose answers are a formula of all tokens before, and a router over them."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

from headwater.account import CacheAccount, Reason
from headwater.cache.stats import CacheStats
from headwater.cluster.cost import Role
from headwater.cluster.links import zero
from headwater.cluster.router import RoutedModel, Router
from headwater.cluster.sockets import PLAIN, Client, Contact, Server
from headwater.cluster.wire import NO_CONTACT, Peer, WorkerInfo
from headwater.cluster.worker import Ended, Pool, Worker, ignore_end
from headwater.engine.meter import Backlog, EngineStats
from headwater.events import Event, FailedEvent, FinishedEvent, TokenEvent
from headwater.request import Generation, SamplingParams
from headwater.schedule.handover import NO_HANDOVER, Handover
from headwater.schedule.prefill_seconds import PrefillSpeed
from headwater.schedule.tier_load import ReadSpeed

PATIENCE = 20.0  # seconds
LONG = 15.0  # seconds of silence, so that a busy machine makes none


def token_after(tokens: list[int], seed: int) -> int:
    return hash((seed, *tokens)) % 1000


@dataclass(eq=False)
class Running:
    """A request of a formula engine."""

    generation: Generation
    on_event: Callable[[Event], None]
    output: list[int]


class FormulaEngine:
    """Says a token of each request every `pace` seconds; the formula has the seed, as sampling has."""

    def __init__(self, pace: float = 0.002, other: int = 0, pull: ReadSpeed | None = None) -> None:
        """`other`: added to each token, for an engine whose bits differ. `pull`: as it says of itself."""
        self.pace, self.other, self.pull = pace, other, pull
        self.finish_reason = "length"
        self.raises: Exception | None = None
        self.seen: list[Generation] = []
        self.cancelled: list[int] = []
        self.followed: list[tuple[bytes, str, bytes]] = []
        self.unfollowed: list[int] = []
        self.submitted_follows: list[int | None] = []
        self.peers: list[tuple[bytes, ...]] = []
        self.begun: list[bool] = []
        self.kept: list[Generation] = []  # answers of other workers that it was to prefill
        self._open: dict[int, Running] = {}
        self._ids = 0
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, generation: Generation, on_event, handover: Handover = NO_HANDOVER) -> int:
        if self.raises is not None:
            raise self.raises
        with self._lock:
            self._ids += 1
            self.seen.append(generation)
            self.submitted_follows.append(handover.follows)
            self.peers.append(handover.peers)
            self.begun.append(handover.begun)
            self._open[self._ids] = Running(generation, on_event, list(handover.output))
            return self._ids

    def cancel(self, request_id: int) -> None:
        with self._lock:
            self.cancelled.append(request_id)
            self._open.pop(request_id, None)

    def keep_answer(self, asked: Generation) -> None:
        if self.raises is not None:
            raise self.raises
        self.kept.append(asked)

    def follow(self, peer: bytes, namespace: str, key: bytes) -> int:
        self.followed.append((peer, namespace, key))
        return len(self.followed)

    def unfollow(self, number: int) -> None:
        self.unfollowed.append(number)

    def backlog(self) -> Backlog:
        return Backlog(len(self._open), 0, 0, PrefillSpeed(0.0, 0.001), 1.0, pull=self.pull)

    def stats(self) -> EngineStats:
        cache = zero(CacheStats)
        return zero(EngineStats, cache=cache, tiers=(), running=len(self._open))

    def fail(self, error: Exception) -> None:
        """End as an engine that fails: all requests do, and later ones are refused."""
        with self._lock:
            self.raises = error
            ended, self._open = self._open, {}
        for one in ended.values():
            one.on_event(FailedEvent(error))

    def close(self) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends.wait(self.pace):
            with self._lock:
                for number, one in tuple(self._open.items()):
                    params, prompt = one.generation.params, one.generation.prompt
                    token = token_after([*prompt, *one.output], params.seed or 0) + self.other
                    one.output.append(token)
                    one.on_event(TokenEvent(token, f"{token} ", -0.5))
                    if len(one.output) == params.max_tokens:
                        del self._open[number]
                        account = CacheAccount(len(prompt), 0, 0, 0, Reason.COLD)
                        one.on_event(FinishedEvent(self.finish_reason, "", account, len(one.output)))


def kill(router: Router, name: str, worker: FakeWorker) -> None:
    """End a worker without a word, and let the router know, as Ray does."""
    worker.kill()
    router.leave(name)


class FakeWorker:
    """A worker over a formula engine. `kill` ends it without a word."""

    def __init__(
        self,
        engine: FormulaEngine,
        fingerprint: str = "one",
        router_timeout: float = LONG,
        server: Server = PLAIN,
        parts: Contact = NO_CONTACT,
        role: Role = Role.BOTH,
        mtp_bytes: int = 0,
        ended: Ended = ignore_end,
    ) -> None:
        self.engine = engine
        self.known: list[set[Peer]] = []  # workers of its pool, as last sent
        self.peer = Peer(uuid.uuid4().bytes, parts)
        health = {"deterministic": "yes"}
        info = WorkerInfo(fingerprint, 1, "formula", 100_000, 4, 0, "", "", health, parts, role, mtp_bytes=mtp_bytes)
        given = "tcp://127.0.0.1:*", router_timeout, server, Pool(self.known.append)
        self.worker = Worker(engine, info, self.peer.incarnation, *given, ended)
        self.worker.start()

    def kill(self) -> None:
        self.worker._send_answers = lambda: None
        self.worker.close()


@dataclass
class Received:
    """Events that a client got."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finished: FinishedEvent | None = None
    error: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def on_event(self, event: Event) -> None:
        if isinstance(event, TokenEvent):
            self.tokens.append(event.token)
            self.text += event.text
            return
        if isinstance(event, FailedEvent):
            self.error = event.error
        if isinstance(event, FinishedEvent):
            self.finished = event
        if isinstance(event, FailedEvent | FinishedEvent):
            self.done.set()

    def wait(self) -> Received:
        assert self.done.wait(PATIENCE), f"no end after {len(self.tokens)} tokens"
        return self

    def wait_for(self, tokens: int) -> None:
        until(lambda: len(self.tokens) >= tokens)


def until(holds: Callable[[], object]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.002)


def asking(prompt: Iterable[int], max_tokens: int, seed: int | None = 7, **more: object) -> Generation:
    return Generation(tuple(prompt), SamplingParams(max_tokens=max_tokens, seed=seed), **more)


def formula(prompt: Iterable[int], count: int, seed: int = 7) -> list[int]:
    """Return the answer to a prompt."""
    tokens, n = list(prompt), len(tuple(prompt))
    for _ in range(count):
        tokens.append(token_after(tokens, seed))
    return tokens[n:]


MODEL = RoutedModel("formula", SimpleNamespace(), None, {}, {}, SimpleNamespace(max_length=100_000))


@contextmanager
def cluster(heartbeat_timeout: float = LONG, client: Client = PLAIN, **workers: FakeWorker) -> Iterator[Router]:
    """Yield a router over workers, all of which have joined."""
    with ExitStack() as stack:
        router = Router(MODEL, b"k" * 32, patience=1.0, heartbeat_timeout=heartbeat_timeout, client=client)
        router.start()
        stack.callback(router.stop)
        for name, worker in workers.items():
            stack.callback(worker.engine.close)
            stack.callback(worker.worker.close)
            router.join(name, worker.worker.contact)
        until(lambda: len(router.links.infos) == len(workers))
        yield router
