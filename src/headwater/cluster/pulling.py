"""Pulls of one worker: it reads prefixes in the memory of others of its pool, and sends them its own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from headwater.cluster.encryption import CurveClient, CurveServer, KeyPair
from headwater.cluster.part_server import Parts, PartServer
from headwater.cluster.peer_memory import PeerMemory
from headwater.cluster.sockets import Client, Contact, Server
from headwater.cluster.wire import Peer
from headwater.config import ServeConfig
from headwater.tiers.fingerprint import Fingerprint
from headwater.tiers.store import PeerStore


class PullingEngine(Protocol):
    """Engine as pulls need it."""

    def join_peers(self, store: PeerStore, key: bytes, fingerprint: Fingerprint, config: ServeConfig) -> Parts: ...


def own_security() -> tuple[CurveServer, CurveClient]:
    """Return the security of both ends of one worker's pulls: a pair of its own, and nobody is accepted yet.

    Routers' sockets have other keys: a worker cannot send requests to another one.
    """
    pair = KeyPair.new()
    return CurveServer(pair, ()), CurveClient(pair)


class Pulling:
    """Both ends of one worker's pulls. A worker is let in once a router says that it is of the pool."""

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
        self._memory = PeerMemory(incarnation, client)
        parts = engine.join_peers(self._memory, key, fingerprint, config)
        self._sending = PartServer(parts, incarnation, address, self._server)

    @property
    def contact(self) -> Contact:
        """The address from which others pull, and the public key of both ends."""
        return self._sending.contact

    def start(self) -> None:
        """Send to others from now on."""
        self._sending.start()

    def know(self, peers: Collection[Peer]) -> None:
        """Let these workers pull, and no others, and pull from them."""
        self._server.accept(peer.contact.key for peer in peers)
        self._memory.know(peers)

    def close(self) -> None:
        """Send nothing more. The engine's end ends its own pulls."""
        self._sending.close()
