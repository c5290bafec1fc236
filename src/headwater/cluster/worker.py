"""Worker: an engine that answers for routers, over one ROUTER socket, on a thread of its own.

A router whose connection is closed, or that is silent, has left: its requests are cancelled.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import zmq

from headwater.cluster.sockets import PLAIN, Server, Waker, bound, has_message
from headwater.cluster.wire import (
    Answered,
    Batch,
    Cancel,
    FailedMessage,
    FinishedMessage,
    FollowMessage,
    FromWorker,
    Heartbeat,
    KeepAnswer,
    Members,
    Peer,
    Ping,
    Prepare,
    PreparedMessage,
    StatsMessage,
    Submit,
    ToWorker,
    WireError,
    WorkerInfo,
    answer_of,
    encode,
    for_worker,
)
from headwater.engine.meter import Backlog, EngineStats
from headwater.errors import for_log
from headwater.events import Event, FailedEvent, FinishedEvent
from headwater.request import Generation
from headwater.schedule.handover import NO_HANDOVER, Handover
from headwater.threads import run_again

Ended = Callable[[Generation, FinishedEvent | FailedEvent], None]
Prepares = Callable[[bytes, Sequence[bytes], Callable[[bool], None]], Callable[[], None]]

HEARTBEAT_SECONDS = 0.1
STATISTICS_SECONDS = 1.0  # between statistics
ROUTER_TIMEOUT_SECONDS = 1.0  # of silence
ENDS = (FinishedMessage, FailedMessage, PreparedMessage)
COMPILER_THREADS = 2  # for requests with constraints, whose compilation may take long

log = logging.getLogger("headwater.cluster")


@contextmanager
def logged(what: str) -> Iterator[None]:
    """Log an error with what failed, so that it does not end the worker's thread."""
    try:
        yield
    except Exception as error:
        log.warning("%s: %s", what, for_log(error))


def ignore_pool(peers: set[Peer]) -> None:
    """Ignore the workers of a pool: nothing is pulled."""


def ignore_end(generation: Generation, event: FinishedEvent | FailedEvent) -> None:
    """Ignore the end of a request."""


def unprepared(segment: bytes, peers: Sequence[bytes], done: Callable[[bool], None]) -> Callable[[], None]:
    """Prepare no segment."""
    done(False)
    return lambda: None


@dataclass(frozen=True, slots=True)
class Pool:
    """Calls about other workers of a worker's fingerprint; the default ignores them, and nothing is pulled.

    `know` is called with all of them after a change, `prepare` to have a segment in memory.
    """

    know: Callable[[set[Peer]], None] = ignore_pool
    prepare: Prepares = unprepared


NO_POOL = Pool()


class WorkingEngine(Protocol):
    """Engine as a worker uses it."""

    def submit(
        self, generation: Generation, on_event: Callable[[Event], None], handover: Handover = NO_HANDOVER
    ) -> int: ...

    def cancel(self, request_id: int) -> None: ...

    def keep_answer(self, asked: Generation) -> None: ...

    def follow(self, peer: bytes, namespace: str, key: bytes) -> int: ...

    def unfollow(self, number: int) -> None: ...

    def backlog(self) -> Backlog: ...

    def stats(self) -> EngineStats: ...


class Task(NamedTuple):
    """Request of a router at this worker."""

    router: bytes
    request: int
    attempt: int


class Worker:
    """Serves an engine to routers."""

    def __init__(
        self,
        engine: WorkingEngine,
        info: WorkerInfo,
        incarnation: bytes,
        address: str,
        router_timeout: float = ROUTER_TIMEOUT_SECONDS,
        server: Server = PLAIN,
        pool: Pool = NO_POOL,
        ended: Ended = ignore_end,
    ) -> None:
        """Bind to an address such as tcp://127.0.0.1:*. Raises zmq.ZMQError.

        `router_timeout`: seconds of silence after which a router's requests are cancelled. `server`: security of its
        socket. `ended`: called with each request's last event.
        """
        self._engine, self._info, self._incarnation = engine, info, incarnation
        self._router_timeout, self._pool, self._ended = router_timeout, pool, ended
        self._members: dict[bytes, tuple[Peer, ...]] = {}  # by router
        self._socket, self.contact = bound(server, address)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a router that connects again is the same router
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to one that is not connected is an error
        self._heard: dict[bytes, float] = {}  # routers, and when each was heard last
        self._tasks: dict[Task, Callable[[], None] | None] = {}  # its cancel; None: being submitted
        self._lock = threading.Lock()  # of `_tasks`
        self._follows: dict[tuple[bytes, int], int] = {}  # the engine's numbers, by router and request
        self._came: deque[tuple[Task, Answered | PreparedMessage]] = deque()
        self._starting = ThreadPoolExecutor(COMPILER_THREADS, "headwater-worker-start")
        self._closing = False
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="headwater-worker", daemon=True)

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def close(self) -> None:
        """Send the pending answers, and close the socket."""
        self._closing = True
        self._waker.wake()
        self._thread.join()
        self._starting.shutdown(wait=False, cancel_futures=True)

    @property
    def open_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self._tasks)

    # -- on its own thread

    def _run(self) -> None:
        run_again(self._serve, lambda: self._closing)
        self._socket.close()
        self._waker.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._waker, zmq.POLLIN)
        beat = counted = time.monotonic()
        while not self._closing:
            poller.poll(max(0, int((beat - time.monotonic()) * 1000) + 1))
            self._waker.clear()
            self._receive()
            self._send_answers()
            now = time.monotonic()
            if now >= beat:
                beat = now + HEARTBEAT_SECONDS
                self._forget_silent(now)
                self._tell_all([Heartbeat(self._engine.backlog())])
            if now >= counted:
                counted = now + STATISTICS_SECONDS
                self._tell_all([StatsMessage(self._engine.stats())])
        self._send_answers()

    def _receive(self) -> None:
        """Handle all received messages."""
        while has_message(self._socket):
            try:
                router, payload = self._socket.recv_multipart(zmq.NOBLOCK)
                message = for_worker(payload)
            except (WireError, ValueError) as error:
                log.warning("a message of a router is ignored: %s", error)
                continue
            with logged("a message of a router is not handled"):
                self._handle(router, message)

    def _handle(self, router: bytes, message: ToWorker) -> None:
        if router not in self._heard or (isinstance(message, Ping) and message.is_first):
            self._cancel_all(router)
            self._send(router, [self._info])
        self._heard[router] = time.monotonic()
        if isinstance(message, Submit):
            self._begin(Task(router, message.request, message.attempt), message)
        elif isinstance(message, KeepAnswer):
            self._keep(message)
        elif isinstance(message, Prepare):
            self._begin_segment(Task(router, message.request, message.attempt), message)
        elif isinstance(message, Cancel):
            self._unfollow(router, message.request)
            self._cancel(Task(router, message.request, message.attempt))
        elif isinstance(message, FollowMessage):
            self._follow(router, message)
        elif isinstance(message, Members):
            self._members[router] = message.peers
            self._tell_known()
        else:
            assert isinstance(message, Ping)

    def _keep(self, message: KeepAnswer) -> None:
        """Let the engine prefill an answer; if that fails, its next turn computes more."""
        with logged("an answer is not prefilled"):
            self._engine.keep_answer(message.whole)

    def _follow(self, router: bytes, message: FollowMessage) -> None:
        self._unfollow(router, message.request)
        with logged("a prefill is not followed"):
            number = self._engine.follow(message.peer, message.namespace, message.prompt)
            self._follows[router, message.request] = number

    def _unfollow(self, router: bytes, request: int) -> None:
        self._give_up(self._follows.pop((router, request), None))

    def _give_up(self, follows: int | None) -> None:
        """Cancel a followed prefill; that fails only if the engine has failed."""
        with logged("a followed prefill is not cancelled"):
            if follows is not None:
                self._engine.unfollow(follows)

    def _begin(self, task: Task, work: Submit) -> None:
        follows = self._follows.pop((task.router, task.request), None)
        with self._lock:
            self._tasks[task] = None
        if work.generation.params.constraint is None:
            self._submit(task, work, follows)
        else:
            self._starting.submit(self._submit, task, work, follows)

    def _submit(self, task: Task, work: Submit, follows: int | None) -> None:
        """Submit a request to the engine; an error is the answer."""
        try:
            handover = Handover(tuple(work.output), tuple(work.peers), follows, work.begun)
            number = self._engine.submit(work.whole, self._receiver(task, work.generation), handover)
        except Exception as error:
            self._give_up(follows)
            self._receiver(task, work.generation)(FailedEvent(error))
            return
        self._began(task, partial(self._engine.cancel, number))

    def _began(self, task: Task, cancel: Callable[[], None]) -> None:
        with self._lock:
            if task in self._tasks:
                self._tasks[task] = cancel
                return
        cancel()  # it was cancelled meanwhile, or it has ended, and this call is ignored

    def _begin_segment(self, task: Task, work: Prepare) -> None:
        with self._lock:
            self._tasks[task] = None

        def done(stored: bool) -> None:
            self._answer(task, PreparedMessage(task.request, task.attempt, stored))

        try:
            cancel = self._pool.prepare(work.segment, work.peers, done)
        except Exception as error:
            log.warning("a segment is not prepared: %s", error)
            done(False)
            return
        self._began(task, cancel)

    def _receiver(self, task: Task, generation: Generation) -> Callable[[Event], None]:
        def on_event(event: Event) -> None:
            if isinstance(event, FinishedEvent | FailedEvent):
                self._ended(generation, event)
            self._answer(task, answer_of(task.request, task.attempt, event))

        return on_event

    def _answer(self, task: Task, message: Answered | PreparedMessage) -> None:
        self._came.append((task, message))
        self._waker.wake()

    def _cancel(self, task: Task) -> None:
        with self._lock:
            cancel = self._tasks.pop(task, None)
        with logged("a request is not cancelled"):
            if cancel is not None:
                cancel()

    def _forget_silent(self, now: float) -> None:
        for router in [router for router, heard in self._heard.items() if now - heard > self._router_timeout]:
            self._forget(router)

    def _forget(self, router: bytes) -> None:
        """Cancel the requests of a router that has left."""
        self._heard.pop(router, None)
        if self._members.pop(router, None) is not None:
            self._tell_known()
        self._cancel_all(router)

    def _tell_known(self) -> None:
        """Report the workers that routers name; an error does not end this thread."""
        try:
            self._pool.know({peer for peers in self._members.values() for peer in peers})
        except Exception:
            log.exception("workers that a router named cannot be added to the pool")

    def _cancel_all(self, router: bytes) -> None:
        for task in [task for task in self._tasks if task.router == router]:
            self._cancel(task)
        for other, request in [key for key in self._follows if key[0] == router]:
            self._unfollow(other, request)

    def _send_answers(self) -> None:
        """Send the pending answers, one message to each router."""
        answers: defaultdict[bytes, list[FromWorker]] = defaultdict(list)
        while self._came:
            task, message = self._came.popleft()
            if task not in self._tasks:
                continue  # cancelled
            answers[task.router].append(message)
            if isinstance(message, ENDS):
                with self._lock:
                    self._tasks.pop(task, None)
        for router, messages in answers.items():
            self._send(router, messages)

    def _tell_all(self, messages: list[FromWorker]) -> None:
        for router in tuple(self._heard):
            self._send(router, messages)

    def _send(self, router: bytes, messages: Iterable[FromWorker]) -> None:
        """Send to a router, or forget it if its connection is closed: the kernel closes that of a killed process."""
        try:
            self._socket.send_multipart((router, encode(Batch(self._incarnation, list(messages)))))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._forget(router)
