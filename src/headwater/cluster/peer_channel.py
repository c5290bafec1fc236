"""Channel to one peer of a worker: a socket for each open question, and a pause after a failure."""

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

POLL_MILLISECONDS = 50  # between checks whether the peer is still a member
PAUSE_SECONDS = 10.0  # without questions to a peer that failed

log = logging.getLogger("headwater.cluster")


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
