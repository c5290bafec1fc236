"""Questions of a worker to others of its pool, in msgpack, and the channel to one of them.

The index key of a prompt is sent to the holder once, with `Find`; its answer, `Found`, has a ticket for the prefix, and
the parts are asked for by their number. A segment is one part, asked for by its key. The answer
to `Get` and `GetSegment` is `Sent`, after which the payload follows in
frames of its own unless it is in the shared buffer that was named; or `Missing`. `FAILED` is the answer to a question
that cannot be answered.

A channel has a socket for each open question, and a pause after a failure.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import msgspec
import zmq

from headwater.cluster.shared_buffers import BufferPlace, this_host
from headwater.cluster.sockets import Client, opened, queued
from headwater.cluster.wire import Peer, WireError, decoded
from headwater.tiers.part import Buffer

POLL_MILLISECONDS = 50  # between checks whether the peer is still a member
PAUSE_SECONDS = 10.0  # without questions to a peer that failed

log = logging.getLogger("headwater.cluster")


class AboutPrefix(msgspec.Struct, array_like=True):
    """Question to one incarnation of a worker."""

    incarnation: bytes


class Find(AboutPrefix, tag=True):
    """Question for the deepest prefix of a prompt. `key`: of the index. `tokens`: of the prompt."""

    namespace: str
    key: bytes
    tokens: int


class Follow(AboutPrefix, tag=True):
    """Question for the prefix that ends at `at`, in tokens, which may not have been computed yet.

    The answer is `Found`, with the names of all of its parts, if the worker may have it at all.
    """

    namespace: str
    key: bytes
    at: int


class Ready(AboutPrefix, tag=True):
    """Question for how much of a prefix is there: `Progress`."""

    ticket: bytes


class Get(AboutPrefix, tag=True):
    """Question for one part of a prefix, by its place among the names that were found."""

    ticket: bytes
    part: int
    into: BufferPlace | None = None


class GetSegment(AboutPrefix, tag=True):
    """Question for a segment. `key`: encoded."""

    key: bytes
    into: BufferPlace | None = None


class Found(msgspec.Struct, array_like=True, tag=True):
    """Position at which a prefix ends, in tokens, and the names of its parts; none if nothing is cached."""

    at: int
    names: list[str]
    ticket: bytes = b""  # secret, and forgotten after a while


class Sent(msgspec.Struct, array_like=True, tag=True):
    """A part, without its key, which the worker that asks has, and its payload."""

    header: bytes
    seal: bytes
    shared: int | None = None  # bytes of payload in the buffer that was named; None: it follows
    why_not: str = ""  # a buffer was named, and the payload follows


class Progress(msgspec.Struct, array_like=True, tag=True):
    """Parts of a prefix that are there."""

    kv_tokens: int
    state_at: int  # the prefix's length, or 0: its state is not there


class Missing(msgspec.Struct, array_like=True, tag=True):
    """A part is not there."""

    is_forgotten: bool = False  # the ticket is not known: the prompt is to be sent again


Question = Find | Follow | Ready | Get | GetSegment
Answer = Found | Progress | Sent | Missing
FAILED = b"\xc0"  # nil

encode: Callable[[Question | Answer], bytes] = msgspec.msgpack.Encoder().encode
# of the first frame; both raise WireError
question: Callable[[bytes], Question] = partial(decoded, msgspec.msgpack.Decoder(Question))
answer: Callable[[bytes], Answer] = partial(decoded, msgspec.msgpack.Decoder(Answer))


class PeerFailed(Exception):
    """A peer did not answer in time, answered wrongly, or has left."""


class Channel:
    """Sockets to one peer: a thread uses an idle one, or opens another, and returns it after the answer."""

    def __init__(self, peer: Peer, client: Client) -> None:
        self.peer = peer
        self._connect = client.to(peer.contact.key)
        self._idle: list[zmq.Socket[bytes]] = []
        self._closed = False
        self.failed_until = 0.0
        self.shares = bool(this_host())  # it is assumed to be able to write to this worker's buffers

    @property
    def usable(self) -> bool:
        return not self._closed and time.monotonic() >= self.failed_until

    def ask(self, message: Question, seconds: float) -> tuple[Answer, list[Buffer]]:
        """Send a question; return its answer and the payload after it. Raises PeerFailed."""
        with self._socket() as socket:
            if not queued(socket, encode(message)):
                raise PeerFailed("has no connection")
            until = time.monotonic() + seconds
            while not socket.poll(POLL_MILLISECONDS):
                if self._closed:
                    raise PeerFailed("has left")
                if time.monotonic() > until:
                    raise PeerFailed(f"has not answered for {seconds:g} s")
            frames = socket.recv_multipart(copy=False)
        if len(frames) == 1 and frames[0].bytes == FAILED:
            raise PeerFailed("cannot answer")
        try:
            return answer(frames[0].bytes), [frame.buffer for frame in frames[1:]]
        except WireError as error:
            raise PeerFailed(f"answers wrongly: {error}") from error

    @contextmanager
    def _socket(self) -> Iterator[zmq.Socket[bytes]]:
        """Yield a socket for one question; it is closed unless the answer came."""
        try:
            socket = self._idle.pop()
        except IndexError:
            socket = opened(zmq.DEALER)
            self._connect(socket, self.peer.contact.address)
        try:
            yield socket
        except BaseException:
            socket.close()
            raise
        self._idle.append(socket)
        if self._closed:
            self.close()

    def note_transport(self, sent: Sent) -> None:
        """Stop naming buffers to a peer that cannot write to them."""
        if self.shares and sent.why_not:
            self.shares = False
            where = self.peer.contact.address
            log.info(
                "parts of the worker at %s come over the network: it cannot write to the buffer here, since %s",
                where,
                sent.why_not,
            )

    def fail(self, why: object) -> None:
        """Ask the peer nothing for PAUSE_SECONDS."""
        if self.usable:
            log.warning(
                "worker at %s %s; nothing is pulled from it for %g s", self.peer.contact.address, why, PAUSE_SECONDS
            )
        self.failed_until = time.monotonic() + PAUSE_SECONDS

    def close(self) -> None:
        """Close idle sockets now, and others after their answers."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()
