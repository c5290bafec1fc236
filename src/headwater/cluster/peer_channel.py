"""Channel to one peer of a worker: questions on sockets of their own, and a break after a failure."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from headwater.cluster.part_messages import FAILED, Answer, Question, Sent, answer, encode
from headwater.cluster.shared_buffers import this_host
from headwater.cluster.sockets import Client, opened, queued
from headwater.cluster.wire import Peer, WireError
from headwater.tiers.part import Buffer

POLL_MILLISECONDS = 50  # milliseconds between looks at whether a peer is still there
BREAK_SECONDS = 10.0  # seconds for which a peer that failed is left alone

log = logging.getLogger("headwater.cluster")


class PeerFailed(Exception):
    """A peer did not answer in time, not as it should, or has left."""


class Channel:
    """Sockets to one peer: a thread takes one, or opens another, and puts it back after its answer."""

    def __init__(self, peer: Peer, client: Client) -> None:
        self.peer = peer
        self._connect = client.to(peer.contact.key)
        self._idle: list[zmq.Socket[bytes]] = []
        self._closed = False
        self.failed_until = 0.0
        self.shares = bool(this_host())  # it is thought to be able to write to this worker's buffers

    @property
    def usable(self) -> bool:
        return not self._closed and time.monotonic() >= self.failed_until

    def ask(self, message: Question, seconds: float) -> tuple[Answer, list[Buffer]]:
        """Return an answer, and the payload that follows it. Raises PeerFailed."""
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
            raise PeerFailed(f"does not answer as it should: {error}") from error

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

    def note_way(self, sent: Sent) -> None:
        """Name the peer no more buffers if it cannot write to them."""
        if self.shares and sent.why_not:
            self.shares = False
            where = self.peer.contact.address
            log.info(
                "parts of the worker at %s come over the network: it says of this worker that %s", where, sent.why_not
            )

    def fail(self, why: object) -> None:
        """Leave the peer alone for a while."""
        if self.usable:
            log.warning(
                "worker at %s %s; nothing is pulled from it for %g s", self.peer.contact.address, why, BREAK_SECONDS
            )
        self.failed_until = time.monotonic() + BREAK_SECONDS

    def close(self) -> None:
        """Close idle sockets now, and others after their answers."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()
