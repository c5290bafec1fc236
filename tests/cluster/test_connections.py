"""Connections of routers and workers that break: no request runs for a router that is gone, and no token is lost."""

import math
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import pytest

from headwater.cluster.links import Link
from headwater.cluster.peer_channel import Channel, PeerFailed, Ready
from headwater.cluster.picture import Follower
from headwater.cluster.sockets import Connect, Contact
from headwater.cluster.wire import Peer, Ping, Submit, encode
from headwater.schedule.sequence import key_of
from tests.cluster.fake import (
    LONG,
    MODEL,
    PATIENCE,
    FakeWorker,
    FormulaEngine,
    Received,
    Router,
    asking,
    formula,
    until,
)

ROUTER = """
import sys, zmq

link = zmq.Context().socket(zmq.DEALER)
link.connect(sys.argv[1])
for message in sys.argv[2:]:
    link.send(bytes.fromhex(message))
while True:
    link.recv()
"""


class Relay:
    """Passes on what a router and a worker send, until it loses it."""

    def __init__(self, address: str) -> None:
        self._to = address.removeprefix("tcp://").rsplit(":", 1)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self._routers: list[socket.socket] = []
        self._losing: set[socket.socket] = set()
        self.lost = 0  # bytes, of the longest loss of the router's
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                router = self._listening.accept()[0]
                worker = socket.create_connection((self._to[0], int(self._to[1])))
                self._routers.append(router)
                for ends in ((router, worker), (worker, router)):
                    threading.Thread(target=self._pass, args=(router, *ends), daemon=True).start()

    def _pass(self, router: socket.socket, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while payload := source.recv(65536):
                if router not in self._losing:
                    target.sendall(payload)
                elif source is router:
                    self.lost = max(self.lost, len(payload))

    def lose(self) -> None:
        """Lose what both ends send from now on, over this connection."""
        self._losing.add(self._routers[-1])

    def close_at_the_router(self) -> None:
        """Let the router make another connection; the worker does not learn that this one is lost."""
        self._routers[-1].shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listening.close()


@pytest.fixture
def worker() -> Iterator[FakeWorker]:
    """Yield a worker that takes no router for silent."""
    worker = FakeWorker(FormulaEngine(), router_timeout=math.inf)
    yield worker
    worker.worker.close()
    worker.engine.close()


@pytest.fixture
def relay(worker: FakeWorker) -> Iterator[Relay]:
    relay = Relay(worker.worker.contact.address)
    yield relay
    relay.close()


@pytest.fixture
def router(relay: Relay) -> Iterator[Router]:
    """Yield a router that takes no worker for silent, behind the relay."""
    router = Router(MODEL, b"k" * 32, heartbeat_timeout=LONG)
    router.start()
    router.join("a", Contact(relay.address, b""))
    until(lambda: router.serves("a"))
    yield router
    router.stop()


def test_requests_of_a_killed_router_are_cancelled_before_its_timeout(worker: FakeWorker) -> None:
    submit = Submit(1, 1, asking([], 100_000), key_of((1,)))
    messages = (encode(message).hex() for message in (Ping(is_first=True), submit))
    process = subprocess.Popen((sys.executable, "-c", ROUTER, worker.worker.contact.address, *messages))
    until(lambda: worker.engine.seen)
    process.kill()
    until(lambda: worker.engine.cancelled)
    assert worker.worker.open_requests == 0
    process.wait()


def test_answer_is_complete_after_tokens_are_lost_with_a_connection(
    router: Router, relay: Relay, worker: FakeWorker
) -> None:
    received = Received()
    router.submit(asking([1], 1000), received.on_event)
    received.wait_for(5)
    relay.lose()
    (running,) = worker.engine._open.values()
    until(lambda: len(running.output) > len(received.tokens) + 50)
    relay.close_at_the_router()
    assert received.wait().tokens == formula([1], 1000)
    assert router.counts["resumed"] == 1


def test_a_request_that_was_lost_with_a_connection_is_answered(
    router: Router, relay: Relay, worker: FakeWorker
) -> None:
    relay.lose()
    received = Received()
    router.submit(asking([1], 20), received.on_event)
    until(lambda: relay.lost > len(encode(Ping())) + 100)  # the request, which is sent again otherwise
    relay.close_at_the_router()
    assert received.wait().tokens == formula([1], 20)
    assert len(worker.engine.seen) == 1
    assert router.counts["moved"] == 1


class Unconnected:
    """Sockets whose connections ZeroMQ has given up: what one end encrypts and the other does not."""

    def to(self, key: bytes) -> Connect:
        return lambda socket, address: None


def test_missing_connection_blocks_no_thread() -> None:
    contact, client = Contact("tcp://127.0.0.1:9", b""), Unconnected()
    link, channel = Link("a", contact, b"router", client), Channel(Peer(b"b", contact), client)
    follower = Follower(contact.address, contact.address, "kv-events", connect=client.to(b""))
    told: list[str] = []

    def tried(call: Callable[[], object]) -> None:
        try:
            told.append(f"returned {call()}")
        except (PeerFailed, TimeoutError) as error:
            told.append(str(error))

    calls = (
        partial(link.send, Ping()),
        partial(channel.ask, Ready(b"b", b""), 1.0),
        lambda: list(follower._asked(b"")),
    )
    for call in calls:
        thread = threading.Thread(target=tried, args=(call,), daemon=True)
        thread.start()
        thread.join(PATIENCE)
    assert told == ["returned None", "has no connection", "no connection to tcp://127.0.0.1:9"]
    link.close()
    channel.close()
    follower.close()
