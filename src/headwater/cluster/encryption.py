"""Keys of a cluster, and sockets with ZeroMQ's CURVE, which encrypts messages and lets both ends prove their keys.

Each worker makes a key pair of its own, and its public key goes with its address. All routers of a cluster have one
pair, whose public key every worker is given. No secret key of a socket leaves its host.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

import zmq

from headwater.cluster.authenticator import authenticator
from headwater.cluster.sockets import Connect
from headwater.errors import ConfigError

DIGEST_KEY_BYTES = 32


@dataclass(frozen=True)
class KeyPair:
    """Keys of one end, in Z85."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> KeyPair:
        """Make a pair. Raises ConfigError if the installed ZeroMQ was built without CURVE."""
        if not zmq.has("curve"):
            raise ConfigError(
                f"messages of a cluster are encrypted with CURVE, which the installed ZeroMQ {zmq.zmq_version()} does "
                "not have: pip install --force-reinstall --only-binary pyzmq pyzmq"
            )
        return cls(*zmq.curve_keypair())


@dataclass(frozen=True)
class WorkerKeys:
    """Keys that workers get through Ray."""

    digests: bytes = field(repr=False)  # secret key of the block hashes in KV events
    router: bytes  # public


@dataclass(frozen=True)
class RouterKeys:
    """Keys that all routers of a cluster have."""

    digests: bytes = field(repr=False)
    pair: KeyPair

    @classmethod
    def new(cls) -> RouterKeys:
        """Make the keys of a cluster. Raises ConfigError, as `KeyPair.new` does."""
        return cls(secrets.token_bytes(DIGEST_KEY_BYTES), KeyPair.new())

    @property
    def for_workers(self) -> WorkerKeys:
        return WorkerKeys(self.digests, self.pair.public)


class CurveServer:
    """Security of a worker's sockets: they accept only clients with known keys."""

    def __init__(self, pair: KeyPair, clients: Iterable[bytes]) -> None:
        """`clients`: public keys."""
        self._pair = pair
        self.accept(clients)

    def accept(self, clients: Iterable[bytes]) -> None:
        """Accept only clients with these public keys from now on."""
        authenticator().accept(self._pair.public, clients)

    @property
    def public(self) -> bytes:
        return self._pair.public

    def bind(self, socket: zmq.Socket[bytes], address: str) -> None:
        """Bind a socket. Raises zmq.ZMQError."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._pair.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, self._pair.public)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an authenticator ZeroMQ would accept every client
        authenticator().watch(socket)
        socket.bind(address)

    def exposed(self, addresses: Iterable[str]) -> list[str]:
        return []


class CurveClient:
    """Security of a router's sockets: they connect to a server with the secret key of a known public one."""

    def __init__(self, pair: KeyPair) -> None:
        self._pair = pair

    def to(self, key: bytes) -> Connect:
        def connect(socket: zmq.Socket[bytes], address: str) -> None:
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._pair.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._pair.secret)
            socket.setsockopt(zmq.CURVE_SERVERKEY, key)
            socket.connect(address)

        return connect
