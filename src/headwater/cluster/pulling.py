"""Pulls of one worker: a thread sends parts of its cached prefixes to others of its pool, and it reads theirs.

Parts are sent over one ROUTER socket. `peer_memory.py` reads.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Protocol

import zmq

from headwater.cluster.encryption import CurveClient, CurveServer, KeyPair
from headwater.cluster.peer_channel import (
    FAILED,
    Find,
    Follow,
    Found,
    GetSegment,
    Missing,
    Progress,
    Question,
    Ready,
    Sent,
    encode,
    question,
)
from headwater.cluster.peer_memory import PeerMemory
from headwater.cluster.shared_buffers import BufferPlace, NotShared, fill
from headwater.cluster.sockets import Client, Server, Waker, bound
from headwater.cluster.wire import Peer
from headwater.config import ServeConfig
from headwater.errors import for_log
from headwater.threads import run_again
from headwater.tiers.fingerprint import Fingerprint
from headwater.tiers.part import Buffer, Prefix
from headwater.tiers.store import PeerStore

MAX_PREFIXES = 32  # with valid tickets
TICKET_BYTES = 16

log = logging.getLogger("headwater.cluster")


class Parts(Protocol):
    """Parts of an engine's cached prefixes."""

    def find(self, namespace: str, key: bytes, tokens: int) -> Prefix | None:
        """Return the deepest prefix of a prompt that is cached, with its parts; None if there is none."""

    def follow(self, namespace: str, key: bytes, at: int) -> Prefix | None:
        """Return the prefix that ends at `at`, which may not be computed yet; None if it has no parts."""

    def progress(self, prefix: Prefix) -> tuple[int, int]:
        """Return the tokens of a prefix with KV, and its length if its state is cached, else 0."""

    def sealed(self, prefix: Prefix, part: int) -> AbstractContextManager[Sequence[Buffer] | None]:
        """Yield the bytes of a part, as `Sealer.seal` returns them, which do not change meanwhile.

        None: the part is not there.
        """

    def sealed_segment(self, key: bytes) -> AbstractContextManager[Sequence[Buffer] | None]:
        """Yield the bytes of the segment with this encoded key in the same way."""


class PartServer:
    """Server of one incarnation's parts; questions to another incarnation find nothing."""

    def __init__(self, parts: Parts, incarnation: bytes, address: str, server: Server) -> None:
        """Bind to an address such as tcp://127.0.0.1:*. `server`: security of the socket. Raises zmq.ZMQError."""
        self.parts, self._incarnation = parts, incarnation
        self._prefixes: OrderedDict[bytes, Prefix] = OrderedDict()  # by their tickets, the last used last
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
        run_again(self._serve, lambda: self._closing)
        self._socket.close()
        self._waker.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._waker, zmq.POLLIN)
        while not self._closing:
            poller.poll()
            self._waker.clear()
            self._answer()

    def _answer(self) -> None:
        """Answer one question, if there is any."""
        try:
            peer, payload = self._socket.recv_multipart(zmq.NOBLOCK)
        except (zmq.ZMQError, ValueError) as error:
            if not isinstance(error, zmq.Again):
                log.warning("a question of another worker is unreadable: %s", error)
            return
        try:
            frames = self._frames(question(payload))
        except Exception as error:  # the worker that asked computes, and others are answered
            log.warning("a question of another worker is not answered: %s", for_log(error))
            frames = [FAILED]
        with suppress(zmq.ZMQError):  # the peer has left
            self._socket.send_multipart((peer, *frames), copy=False)

    def _frames(self, asked: Question) -> list[bytes]:
        """Return an answer; pages may be evicted then."""
        is_own = asked.incarnation == self._incarnation
        if isinstance(asked, Find):
            return [self._found(self.parts.find(asked.namespace, asked.key, asked.tokens) if is_own else None)]
        if isinstance(asked, Follow):
            return [self._found(self.parts.follow(asked.namespace, asked.key, asked.at) if is_own else None)]
        if isinstance(asked, GetSegment):
            if not is_own:
                return [encode(Missing())]
            with self.parts.sealed_segment(asked.key) as pieces:
                return _part(pieces, asked.into)
        prefix = self._prefixes.get(asked.ticket)
        if prefix is None:
            return [encode(Missing(is_forgotten=is_own))]
        self._prefixes.move_to_end(asked.ticket)
        if isinstance(asked, Ready):
            return [encode(Progress(*self.parts.progress(prefix)))]
        with self.parts.sealed(prefix, asked.part) as pieces:
            return _part(pieces, asked.into)

    def _found(self, prefix: Prefix | None) -> bytes:
        """Return the answer with a prefix and its ticket; an empty answer without a prefix."""
        if prefix is None:
            return encode(Found(0, []))
        ticket = secrets.token_bytes(TICKET_BYTES)
        self._prefixes[ticket] = prefix
        if len(self._prefixes) > MAX_PREFIXES:
            self._prefixes.popitem(last=False)
        return encode(Found(prefix.at, prefix.names, ticket))


def _part(pieces: Sequence[Buffer] | None, into: BufferPlace | None) -> list[bytes]:
    """Return the answer with a part; its payload is written to the named buffer, if that is possible."""
    if pieces is None:
        return [encode(Missing())]
    header, _, *payload, seal = pieces
    shared, why_not = None, ""
    if into is not None:
        try:
            shared = fill(into, payload)
        except NotShared as error:
            why_not = str(error)
    sent = encode(Sent(bytes(header), bytes(seal), shared, why_not))
    return [sent] if shared is not None else [sent, *map(bytes, payload)]


class PullingEngine(Protocol):
    """Engine as pulls need it."""

    def join_peers(self, store: PeerStore, key: bytes, fingerprint: Fingerprint, config: ServeConfig) -> Parts: ...


def own_security() -> tuple[CurveServer, CurveClient]:
    """Return the security of both ends of one worker's pulls: a new key pair, and no accepted clients.

    Routers' sockets have other keys: a worker cannot send requests to another one.
    """
    pair = KeyPair.new()
    return CurveServer(pair, ()), CurveClient(pair)


class Pulling:
    """Both ends of one worker's pulls. A worker is accepted once a router has named it as a member of the pool."""

    def __init__(
        self,
        engine: PullingEngine,
        key: bytes,
        fingerprint: Fingerprint,
        config: ServeConfig,
        incarnation: bytes,
        address: str,
        security: tuple[Server, Client],
    ) -> None:
        """Bind to an address such as tcp://127.0.0.1:*. The engine is not started yet. Raises zmq.ZMQError.

        `key`: the cluster's secret one, of parts' names and digests.
        """
        self._server, client = security
        self.memory = PeerMemory(incarnation, client)
        parts = engine.join_peers(self.memory, key, fingerprint, config)
        self.sending = PartServer(parts, incarnation, address, self._server)
        self.contact = self.sending.contact  # from which others pull; its public key is that of both ends
        self.start, self.close = self.sending.start, self.sending.close  # the engine's end ends its own pulls

    def know(self, peers: Collection[Peer]) -> None:
        """Let only these workers pull, and pull only from them."""
        self._server.accept(peer.contact.key for peer in peers)
        self.memory.know(peers)
