"""Keys of a cluster, and sockets with ZeroMQ's CURVE, which encrypts messages and lets both ends prove their keys.

Each worker makes a key pair of its own, and its public key is sent with its address. All routers of a cluster have one
pair, whose public key every worker is given. No secret key of a socket leaves its host.

ZeroMQ asks the authenticator about each new connection (ZAP, https://rfc.zeromq.org/spec/27), after the peer has proved
that it has the secret key. Peers that fail earlier, without CURVE or with another server's key, are events of their
sockets.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from itertools import count

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from headwater.cluster.sockets import Connect, Waker, opened
from headwater.errors import ConfigError

ADDRESS = "inproc://zeromq.zap.01"  # of ZeroMQ's questions, in each context
VERSION = b"1.0"
ACCEPTED, REFUSED = (b"200", b"OK"), (b"400", b"this key is not accepted")
DIGEST_KEY_BYTES = 32
REASONS: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "it has the public key of another server",
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "it does not encrypt",
}

log = logging.getLogger("headwater.cluster")


class Authenticator:
    """Thread that accepts or refuses the peers of all CURVE sockets in this process. It ends with the process."""

    def __init__(self) -> None:
        self._questions = opened(zmq.ROUTER)
        self._questions.bind(ADDRESS)
        self._accepted: dict[bytes, frozenset[bytes]] = {}  # public keys of clients, by the server's
        self._numbers = count()  # of monitors
        self._monitors: list[zmq.Socket[bytes]] = []
        self._added: deque[zmq.Socket[bytes]] = deque()  # monitors that the thread does not poll yet
        self._waker = Waker()
        threading.Thread(target=self._run, name="headwater-authenticator", daemon=True).start()

    def accept(self, server: bytes, clients: Iterable[bytes]) -> None:
        """Accept only clients with these public keys at sockets whose domain is the server's public key."""
        self._accepted[server] = frozenset(z85.decode(client) for client in clients)

    def watch(self, socket: zmq.Socket[bytes]) -> None:
        """Log the peers that a socket refuses, until it is closed."""
        address = f"inproc://headwater.refused.{next(self._numbers)}"
        socket.monitor(address, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_MONITOR_STOPPED)
        monitor = opened(zmq.PAIR)  # without a limit: ZeroMQ's I/O thread waits for a full one, or one that is closed
        monitor.connect(address)
        self._added.append(monitor)
        self._waker.wake()

    # -- on its own thread

    def _run(self) -> None:
        while True:
            try:
                self._poll()
            except zmq.ContextTerminated:
                return
            except Exception:  # a thread that ends would refuse the cluster's own routers, too
                log.exception("a peer was not authenticated")

    def _poll(self) -> None:
        poller = zmq.Poller()
        for one in (self._questions, self._waker, *self._monitors):
            poller.register(one, zmq.POLLIN)
        ready = dict(poller.poll())
        self._waker.clear()
        while self._added:
            self._monitors.append(self._added.popleft())
        if self._questions in ready:
            self._answer()
        for monitor in [one for one in self._monitors if one in ready]:
            self._report(monitor)

    def _answer(self) -> None:
        """Answer one question of ZeroMQ."""
        asking, _, _, number, domain, address, _, mechanism, *credentials = self._questions.recv_multipart()
        is_accepted = mechanism == b"CURVE" and credentials[0] in self._accepted.get(domain, ())
        answer = ACCEPTED if is_accepted else REFUSED
        self._questions.send_multipart((asking, b"", VERSION, number, *answer, b"", b""))
        if not is_accepted:
            log.warning("a peer at %s was refused: its key is not one of this cluster", address.decode())

    def _report(self, monitor: zmq.Socket[bytes]) -> None:
        """Log one event of a socket."""
        event = recv_monitor_message(monitor)
        if event["event"] == zmq.EVENT_MONITOR_STOPPED:
            self._monitors.remove(monitor)
            monitor.close()
            return
        why = REASONS.get(event["value"], "it breaks the protocol")
        log.warning("a peer of %s was refused: %s", event["endpoint"].decode(), why)


_starting = threading.Lock()


def authenticator() -> Authenticator:
    """Return the authenticator of this process; the first call starts it."""
    with _starting:
        return _started()


@cache
def _started() -> Authenticator:
    return Authenticator()


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
