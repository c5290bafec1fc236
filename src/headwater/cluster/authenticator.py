"""Authenticator of a process: accepts peers of its CURVE sockets by their public keys, and logs those that it refuses.

ZeroMQ asks it about each new connection (ZAP, https://rfc.zeromq.org/spec/27), after the peer has proved that it has
the secret key. Peers that fail earlier, without CURVE or with another server's key, are events of their sockets.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable
from functools import cache
from itertools import count

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from headwater.cluster.sockets import Waker, opened

ADDRESS = "inproc://zeromq.zap.01"  # of ZeroMQ's questions, in each context
VERSION = b"1.0"
ACCEPTED, REFUSED = (b"200", b"OK"), (b"400", b"this key is not accepted")
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
