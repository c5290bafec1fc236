"""Server of a worker's cached prefixes for others of its pool, over one ROUTER socket, on a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Protocol

import zmq

from headwater.cluster.part_messages import FAILED, Find, Found, Get, encode, question
from headwater.cluster.sockets import Server, Waker, bound
from headwater.tiers.part import Buffer

log = logging.getLogger("headwater.cluster")


class Parts(Protocol):
    """Parts of an engine's cached prefixes."""

    def find(self, namespace: str, key: bytes, tokens: int) -> tuple[int, list[str]]:
        """Return where the deepest prefix of a prompt ends, and the names of its parts."""

    def sealed(self, namespace: str, key: bytes, at: int, name: str) -> AbstractContextManager[Sequence[Buffer] | None]:
        """Yield the bytes of a part, in pieces, which stay as they are meanwhile; None if it is not there."""


class PartServer:
    """Answers questions for one incarnation of a worker; it has nothing for those that ask another one."""

    def __init__(self, parts: Parts, incarnation: bytes, address: str, server: Server) -> None:
        """Bind to an address such as tcp://127.0.0.1:*. `server`: security of the socket. Raises zmq.ZMQError."""
        self._parts, self._incarnation = parts, incarnation
        self._socket, self.contact = bound(server, address)
        self._closing = False
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="headwater-parts", daemon=True)

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, and close the socket."""
        self._closing = True
        self._waker.wake()
        self._thread.join()

    # -- on its own thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._waker, zmq.POLLIN)
        try:
            while not self._closing:
                poller.poll()
                self._waker.clear()
                self._answer()
        finally:
            self._socket.close()
            self._waker.close()

    def _answer(self) -> None:
        """Answer one question, if there is any."""
        try:
            peer, payload = self._socket.recv_multipart(zmq.NOBLOCK)
        except (zmq.ZMQError, ValueError) as error:
            if not isinstance(error, zmq.Again):
                log.warning("a question of another worker cannot be read: %s", error)
            return
        try:
            frames = self._frames(question(payload))
        except Exception as error:  # the worker that asked computes, and others are answered
            log.warning("a question of another worker is not answered: %r", error)
            frames = [FAILED]
        with suppress(zmq.ZMQError):  # it has left
            self._socket.send_multipart((peer, *frames), copy=False)

    def _frames(self, asked: Find | Get) -> list[bytes]:
        """Return an answer; pages may be evicted then."""
        is_own = asked.incarnation == self._incarnation
        if isinstance(asked, Find):
            at, names = self._parts.find(asked.namespace, asked.key, asked.tokens) if is_own else (0, [])
            return [encode(Found(at, names))]
        if not is_own:
            return [b""]
        with self._parts.sealed(asked.namespace, asked.key, asked.at, asked.name) as pieces:
            return [bytes(piece) for piece in pieces or (b"",)]
