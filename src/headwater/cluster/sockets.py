"""ZeroMQ sockets of workers, publishers and their readers, and their security: none here, CURVE in `encryption.py`."""

from __future__ import annotations

import socket as sockets
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import zmq

from headwater.cluster.messages import MAX_REPLAY_MESSAGES

MAX_LIVE_MESSAGES = 10_000  # that wait for one subscriber; further ones are dropped for it
MAX_ANSWER_MESSAGES = MAX_REPLAY_MESSAGES + 1_000  # that wait for one reader of a replay or a snapshot
MAX_MESSAGE_BYTES = 2**28  # of a router, or of another worker: a prompt has 4 bytes a token
MAX_REQUEST_BYTES = 1024  # of a reader of events: numbers have 8
MAX_ACTIONS = 64  # between two polls of workers, so that a burst of requests delays no heartbeat
ACTIONS_SECONDS = 0.05  # likewise

LOCAL_PREFIXES = ("tcp://127.", "tcp://localhost:", "tcp://[::1]:", "ipc://")

Connect = Callable[[zmq.Socket[bytes], str], None]  # connects a socket to an address


@dataclass(frozen=True)
class Contact:
    """Address of a worker, and the public key of its sockets: empty without CURVE."""

    address: str
    key: bytes


class Server(Protocol):
    """Security of sockets that bind."""

    @property
    def public(self) -> bytes:
        """The public key."""

    def bind(self, socket: zmq.Socket[bytes], address: str) -> None:
        """Bind a socket. Raises zmq.ZMQError."""

    def accept(self, clients: Iterable[bytes]) -> None:
        """Accept only clients with these public keys."""

    def exposed(self, addresses: Iterable[str]) -> list[str]:
        """Return the addresses at which anyone on the network can read."""


class Client(Protocol):
    """Security of sockets that connect."""

    def to(self, key: bytes) -> Connect:
        """Return a function that connects a socket to a server with this public key."""


class Plain:
    """Sockets without encryption: those of a publisher whose readers have no keys."""

    public = b""

    def bind(self, socket: zmq.Socket[bytes], address: str) -> None:
        socket.bind(address)

    def accept(self, clients: Iterable[bytes]) -> None:
        """Do nothing: every client is accepted."""

    def exposed(self, addresses: Iterable[str]) -> list[str]:
        return [address for address in addresses if not address.startswith(LOCAL_PREFIXES)]

    def to(self, key: bytes) -> Connect:
        return connect_plain


PLAIN = Plain()


def connect_plain(socket: zmq.Socket[bytes], address: str) -> None:
    """Connect a socket without encryption."""
    socket.connect(address)


def opened(kind: int, sends: int = 0, receives: int = 0, max_bytes: int = -1) -> zmq.Socket[bytes]:
    """Return a socket whose queues hold at most that many messages (0: no limit), which are dropped at its close.

    A peer that sends more than `max_bytes` in a frame is disconnected (-1: no limit).
    """
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    for option, value in (
        (zmq.SNDHWM, sends), (zmq.RCVHWM, receives), (zmq.LINGER, 0), (zmq.MAXMSGSIZE, max_bytes)
    ):  # fmt: skip
        socket.setsockopt(option, value)
    return socket


def queued(socket: zmq.Socket[bytes], *frames: bytes) -> bool:
    """Queue a message; False if the socket has no connection to queue it for, for which ZeroMQ's `send` waits.

    `send` could wait for ever: ZeroMQ may give a connection up if only one end encrypts.
    """
    try:
        socket.send_multipart(frames, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Return whether a message is there, in 1.4 us: the exception of a `recv` that finds none takes 3.2."""
    events = socket.getsockopt(zmq.EVENTS)
    return isinstance(events, int) and bool(events & zmq.POLLIN)


def bound(server: Server, address: str) -> tuple[zmq.Socket[bytes], Contact]:
    """Return a socket that answers at an address such as tcp://127.0.0.1:*, and its contact. Raises zmq.ZMQError."""
    socket = opened(zmq.ROUTER, max_bytes=MAX_MESSAGE_BYTES)
    try:
        server.bind(socket, address)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket, Contact(socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"), server.public)


class Waker:
    """Pair of sockets by which other threads wake one that polls. `fileno` is for the poller.

    The thread calls `clear` after each poll, and then reads everything that others have queued before `wake`.
    """

    def __init__(self) -> None:
        self._is_woken = False
        self._reading, self._writing = sockets.socketpair()
        for end in (self._reading, self._writing):
            end.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor that is readable after `wake`."""
        return self._reading.fileno()

    def wake(self) -> None:
        """Wake the thread. Does nothing if another call has, or after `close`."""
        if self._is_woken:
            return
        self._is_woken = True  # before the byte is sent: `clear` may follow at once
        with suppress(OSError):  # enough bytes are there already, or the thread has ended
            self._writing.send(b"\0")

    def clear(self) -> None:
        """Forget all calls of `wake`: the thread is awake."""
        with suppress(BlockingIOError):
            self._reading.recv(4096)
        self._is_woken = False  # after the bytes are read: those that called meanwhile have queued what they had

    def close(self) -> None:
        """Close both ends."""
        self._reading.close()
        self._writing.close()


class Actions:
    """Queue of actions for a router's thread, and its waker."""

    def __init__(self) -> None:
        self.waker = Waker()
        self._queue: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, action: Callable[[], None]) -> None:
        """Queue an action. For any thread."""
        self._queue.append(action)
        self.waker.wake()

    def run(self) -> None:
        """Run at most `MAX_ACTIONS`, and none that would begin more than `ACTIONS_SECONDS` after the first one."""
        until = time.monotonic() + ACTIONS_SECONDS
        for _ in range(min(len(self._queue), MAX_ACTIONS)):
            self._queue.popleft()()
            if time.monotonic() > until:
                break


class Sockets:
    """The two bound sockets of a publisher."""

    def __init__(self, live: str, replay: str, server: Server = PLAIN) -> None:
        """Bind to addresses such as tcp://127.0.0.1:5557; port * is any free one. Raises zmq.ZMQError."""
        self.live = opened(zmq.PUB, MAX_LIVE_MESSAGES, max_bytes=MAX_REQUEST_BYTES)
        self.replay = opened(zmq.ROUTER, MAX_ANSWER_MESSAGES, max_bytes=MAX_REQUEST_BYTES)
        try:
            server.bind(self.live, live)
            server.bind(self.replay, replay)
        except zmq.ZMQError:
            self.close()
            raise

    @property
    def addresses(self) -> tuple[str, str]:
        """The addresses that the sockets are bound to."""
        live, replay = (one.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0") for one in (self.live, self.replay))
        return live, replay

    def close(self) -> None:
        self.live.close()
        self.replay.close()
