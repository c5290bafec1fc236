"""CURVE between routers and workers: strangers get nothing and disturb nothing, and no prompt is seen on the way."""

import pickle
import socket as tcp
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from headwater.cluster import encryption
from headwater.cluster import publisher as publishers
from headwater.cluster.encryption import ADDRESS, CurveClient, CurveServer, KeyPair, RouterKeys, authenticator
from headwater.cluster.messages import SNAPSHOT
from headwater.cluster.picture import Follower
from headwater.cluster.publisher import Publisher
from headwater.cluster.router_processes import Given, RouterProcesses
from headwater.cluster.sockets import PLAIN, Client, Contact, Server, Sockets, opened, queued
from headwater.cluster.wire import Ping, Submit, encode
from headwater.config import ServeConfig
from headwater.errors import ConfigError
from headwater.events import TokenEvent
from headwater.schedule.sequence import key_of
from tests.cache.toy import Toy
from tests.cluster.fake import PATIENCE, FakeWorker, FormulaEngine, Received, asking, cluster, formula, until
from tests.cluster.rig import TIGHT, logged, stream_of
from tests.cluster.test_publisher import ANY, caught_up, serve

ROUTER = KeyPair.new()
CLIENT = CurveClient(ROUTER)
PROMPT = range(100, 124)
KINDS = {"requests": zmq.DEALER, "live": zmq.SUB, "replay": zmq.DEALER}
REFUSED = "was refused"


def new_server() -> CurveServer:
    return CurveServer(KeyPair.new(), [ROUTER.public])


@dataclass
class Up:
    """A worker, the publisher of a cache, and a router that has answered; `at` are the addresses of their sockets."""

    router: object
    engine: FormulaEngine
    follower: Follower
    toy: Toy
    publisher: Publisher
    key: bytes
    at: dict[str, str]

    def works(self) -> None:
        """Check that a request is answered, and that an event arrives."""
        received = Received()
        self.router.submit(asking(PROMPT, 5), received.on_event)
        assert received.wait().tokens == formula(PROMPT, 5)
        serve(self.toy, self.publisher, len(self.engine.seen))
        caught_up(self.follower, self.toy)


@contextmanager
def up(server: Server, client: Client) -> Iterator[Up]:
    with ExitStack() as stack:
        engine, toy = FormulaEngine(), logged(TIGHT)
        worker = FakeWorker(engine, server=server)
        router = stack.enter_context(cluster(client=client, w=worker))
        sockets = Sockets(ANY, ANY, server)
        live, replay = sockets.addresses
        publisher = Publisher(toy.cache, stream_of(toy), sockets, "kv-events")
        publisher.start()
        stack.callback(publisher.close)
        follower = stack.enter_context(Follower(live, replay, connect=client.to(server.public)))
        at = {"requests": worker.worker.contact.address, "live": live, "replay": replay}
        one = Up(router, engine, follower, toy, publisher, server.public, at)
        one.works()
        yield one


@pytest.fixture
def secured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Up]:
    monkeypatch.setattr(publishers, "HEARTBEAT_SECONDS", 0.05)
    with up(new_server(), CLIENT) as one:
        yield one


@contextmanager
def stranger(one: Up, kind: str, client: Client, key: bytes) -> Iterator[zmq.Socket]:
    """Yield a socket that has asked for whatever there is at a socket of a worker."""
    with opened(KINDS[kind]) as socket:
        if kind == "live":
            socket.subscribe("")
        client.to(key)(socket, one.at[kind])
        if kind == "requests":
            for message in (Ping(is_first=True), Submit(1, 0, asking([], 1), key_of([9]))):
                queued(socket, encode(message))  # not, if it was refused before
        elif kind == "replay":
            queued(socket, b"", SNAPSHOT)
        yield socket


@pytest.mark.parametrize("kind", KINDS)
def test_with_the_routers_key_a_peer_is_answered(secured: Up, kind: str) -> None:
    """The control of the tests of strangers: they would find out."""
    with stranger(secured, kind, CLIENT, secured.key) as socket:
        assert socket.poll(int(PATIENCE * 1000))
    if kind == "requests":
        until(lambda: any(one.prompt == (9,) for one in secured.engine.seen))


STRANGERS = {
    "plain": (PLAIN, None, "it does not encrypt"),
    "another key": (CurveClient(KeyPair.new()), None, "its key is not one of this cluster"),
    "another server": (CLIENT, KeyPair.new().public, "it has the public key of another server"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("who", STRANGERS)
def test_a_stranger_gets_nothing_and_disturbs_nothing(
    secured: Up, kind: str, who: str, caplog: pytest.LogCaptureFixture
) -> None:
    client, key, why = STRANGERS[who]
    follower = secured.follower
    before = follower.replays, follower.snapshots
    with stranger(secured, kind, client, key or secured.key) as socket:
        until(lambda: any(REFUSED in line and why in line for line in caplog.messages))
        secured.works()
        assert not socket.poll(0)
    assert {one.prompt for one in secured.engine.seen} == {tuple(PROMPT)}
    assert (follower.replays, follower.snapshots) == before
    for pair in (ROUTER, *(one._pair for one, *_ in STRANGERS.values() if isinstance(one, CurveClient))):
        assert pair.secret.decode() not in caplog.text


@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "curve"])
def test_peer_of_an_old_protocol_is_answered_only_without_curve(is_plain: bool) -> None:
    """ZMTP 1.0 has no mechanisms: an identity comes first, then messages."""
    server, client = (PLAIN, PLAIN) if is_plain else (new_server(), CLIENT)
    message = encode(Submit(1, 0, asking([], 1), key_of([9])))
    with up(server, client) as one:
        host, port = one.at["requests"].removeprefix("tcp://").split(":")
        with tcp.create_connection((host, int(port)), PATIENCE) as connection:
            connection.sendall(b"\x01\x00" + b"\xff" + (len(message) + 1).to_bytes(8, "big") + b"\x00" + message)
            if is_plain:
                until(lambda: any(asked.prompt == (9,) for asked in one.engine.seen))
            else:
                with suppress(ConnectionResetError):
                    while connection.recv(1024):  # until the worker closes it
                        pass
        one.works()
        assert is_plain or {asked.prompt for asked in one.engine.seen} == {tuple(PROMPT)}


@contextmanager
def monitored(socket: zmq.Socket, events: int) -> Iterator[zmq.Socket]:
    """Yield a socket with events; an event without a reader would block ZeroMQ's I/O thread, so they end first."""
    with opened(zmq.PAIR) as monitor:
        name = f"inproc://{uuid.uuid4()}"
        socket.monitor(name, events)
        monitor.connect(name)
        try:
            yield monitor
        finally:
            socket.disable_monitor()


@pytest.mark.parametrize("impostor", [PLAIN, new_server()], ids=["plain", "another key"])
def test_a_router_sends_nothing_to_an_impostor(impostor: Server) -> None:
    """A socket at the address of a worker whose secret key it does not have."""
    ends = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED
    with opened(zmq.ROUTER) as socket, cluster(client=CLIENT) as router:
        impostor.bind(socket, ANY)
        with monitored(socket, ends) as monitor:
            router.join("w", Contact(socket.getsockopt_string(zmq.LAST_ENDPOINT), KeyPair.new().public))
            assert monitor.poll(int(PATIENCE * 1000))
        assert not socket.poll(0)


def test_a_router_sends_to_the_worker_whose_key_it_knows() -> None:
    """The control of the test of impostors."""
    server = new_server()
    with opened(zmq.ROUTER) as socket, cluster(client=CLIENT) as router:
        server.bind(socket, ANY)
        router.join("w", Contact(socket.getsockopt_string(zmq.LAST_ENDPOINT), server.public))
        assert socket.poll(int(PATIENCE * 1000))


def test_without_an_authenticator_no_client_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ itself accepts every client that knows the server's public key, if nothing answers its question."""
    absent = SimpleNamespace(accept=lambda *given: None, watch=lambda socket: None)
    monkeypatch.setattr(encryption, "authenticator", lambda: absent)
    server = new_server()
    ends = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_SUCCEEDED
    with zmq.Context() as context, opened(zmq.DEALER) as client:
        monkeypatch.setattr(zmq.Context, "instance", lambda: context)
        with opened(zmq.ROUTER) as socket, monitored(socket, ends) as monitor:
            server.bind(socket, ANY)
            CLIENT.to(server.public)(client, socket.getsockopt_string(zmq.LAST_ENDPOINT))
            client.send(b"a message")
            assert monitor.poll(int(PATIENCE * 1000))
            assert recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            assert not socket.poll(0)


def test_the_authenticator_lives_on_after_a_question_that_is_none(secured: Up) -> None:
    with opened(zmq.DEALER) as socket:
        socket.connect(ADDRESS)
        socket.send_multipart([b"", b"1.0"])
        with stranger(secured, "requests", CLIENT, secured.key) as peer:
            assert peer.poll(int(PATIENCE * 1000))


def test_a_closed_socket_is_watched_no_longer() -> None:
    until(lambda: not authenticator()._added)
    before = set(authenticator()._monitors)
    with opened(zmq.ROUTER) as socket:
        new_server().bind(socket, ANY)
        until(lambda: len(set(authenticator()._monitors) - before) == 1)
    until(lambda: not set(authenticator()._monitors) - before)
    assert set(authenticator()._monitors) <= before


# -- on the wire


@dataclass
class Relay:
    """Passes the bytes of TCP connections on, and keeps them, by direction."""

    to: tuple[str, int]
    listening: tcp.socket = field(default_factory=lambda: tcp.create_server(("127.0.0.1", 0)))
    passed: dict[str, bytearray] = field(default_factory=lambda: {"there": bytearray(), "back": bytearray()})

    def __post_init__(self) -> None:
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.listening.getsockname()[1]}"

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listening.accept()
            except OSError:
                return
            server = tcp.create_connection(self.to)
            for ends in ((client, server, "there"), (server, client, "back")):
                threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: tcp.socket, sink: tcp.socket, direction: str) -> None:
        with source:
            while data := source.recv(65536):
                self.passed[direction] += data
                sink.sendall(data)


@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "curve"])
def test_prompt_and_answer_are_readable_on_the_wire_only_without_curve(is_plain: bool) -> None:
    server, client = (PLAIN, PLAIN) if is_plain else (new_server(), CLIENT)
    worker = FakeWorker(FormulaEngine(), server=server)
    host, port = worker.worker.contact.address.removeprefix("tcp://").split(":")
    relay = Relay((host, int(port)))
    worker.worker.contact = replace(worker.worker.contact, address=relay.address)
    received = Received()
    with relay.listening, cluster(client=client, w=worker) as router:
        router.submit(asking(PROMPT, 5), received.on_event)
        received.wait()
        said = TokenEvent(received.tokens[-1], f"{received.tokens[-1]} ", -0.5)
        for direction, content in {"there": key_of(PROMPT), "back": said}.items():
            shown = msgspec.msgpack.encode(content)
            passed = relay.passed[direction]
            assert (b"NULL" if is_plain else b"CURVE") in passed, "the greeting says how messages are protected"
            assert (shown in passed) == is_plain


# -- keys


def telling(given: Given, pipe: Connection) -> None:
    """Say whether the secret key is here, and whether it is in the command or the environment."""
    secret = given.keys.pair.secret
    own = b"".join(Path(f"/proc/self/{name}").read_bytes() for name in ("cmdline", "environ"))
    shown = {"public": zmq.curve_public(secret), "is_shown": secret in own}
    while True:
        pipe.send(("health", {"workers": [], "requests": {}, **shown}))
        pipe.recv()


def test_a_routers_process_gets_the_keys_but_not_by_its_command() -> None:
    keys = RouterKeys.new()
    with tcp.create_server(("127.0.0.1", 0)) as sock:
        routers = RouterProcesses(telling, 1, sock, ServeConfig(), keys, "round_robin")
        routers.start()
        until(routers.health)
        assert routers.health()["public"] == keys.pair.public
        assert not routers.health()["is_shown"]
        routers.stop(0.0)


def test_workers_are_given_no_secret_of_a_socket() -> None:
    keys = RouterKeys.new()
    assert keys.pair.secret in pickle.dumps(keys)
    assert keys.pair.secret not in pickle.dumps(keys.for_workers)
    assert keys.pair.public in pickle.dumps(keys.for_workers)
    for shown in (repr(keys), repr(keys.for_workers)):
        assert keys.pair.secret.decode() not in shown
        assert repr(keys.digests) not in shown


def test_zeromq_without_curve_is_an_error_with_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda what: what != "curve")
    with pytest.raises(ConfigError, match=r"encrypted with CURVE, which the installed ZeroMQ .* pip install"):
        RouterKeys.new()
