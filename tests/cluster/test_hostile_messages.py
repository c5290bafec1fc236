"""Random and hostile messages to every ZeroMQ socket: each costs at most its own answer, and no thread ends."""

import random
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from headwater import threads
from headwater.cluster.ledger import EventStream
from headwater.cluster.messages import END, NUMBER_BYTES, SNAPSHOT, AllBlocksCleared, BlockStored
from headwater.cluster.messages import encode as encode_events
from headwater.cluster.peer_channel import GetSegment, Missing, answer
from headwater.cluster.peer_channel import encode as encode_question
from headwater.cluster.picture import Follower
from headwater.cluster.pulling import PartServer
from headwater.cluster.sockets import MAX_REQUEST_BYTES, PLAIN, bound, opened
from headwater.cluster.wire import Batch, Cancel, FailedMessage, Ping, WorkerInfo, encode
from headwater.threads import restarts, run_again
from tests.cluster.fake import FakeWorker, FormulaEngine, Received, asking, cluster, formula, until
from tests.cluster.rig import logged
from tests.cluster.test_publisher import caught_up, publishing, serve
from tests.cluster.test_shared_buffers import HOLDER, SameParts

PATIENCE_MS = 10_000
TAGS = [kind.__name__ for kind in (Ping, Cancel, GetSegment, WorkerInfo, FailedMessage, Batch, BlockStored)]


def hostile() -> Iterator[list[bytes]]:
    """Yield frames: numbers at the ends of their ranges, values of wrong types, random bytes, too few and too many."""
    dice = random.Random(5)
    yield from ([number.to_bytes(NUMBER_BYTES, "big")] for number in (0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1))
    for tag in TAGS:
        for value in (-1, 2**63, 1e308, None, "\udcff".encode(errors="surrogateescape"), {}, [[]] * 9):
            yield [msgspec.msgpack.encode([tag, *[value] * dice.randrange(6)])]
    for _ in range(40):
        yield [dice.randbytes(dice.randrange(60)) for _ in range(dice.randrange(1, 4))]
    yield [msgspec.msgpack.encode({"a": 1}), b""]
    yield [b"\xdd\xff\xff\xff\xff"]  # an array of 2^32 - 1 values


@pytest.fixture(autouse=True)
def _no_thread_fails() -> Iterator[None]:
    before = restarts.total()
    yield
    assert restarts.total() == before


def asked(socket: zmq.Socket, *frames: bytes) -> list[bytes]:
    socket.send_multipart(frames)
    assert socket.poll(PATIENCE_MS), "no answer"
    return socket.recv_multipart()


def test_replay_socket_answers_after_every_hostile_request() -> None:
    with publishing(logged()) as publisher:
        for frames in hostile():
            socket = opened(zmq.DEALER)
            socket.connect(publisher.addresses[1])
            socket.send_multipart([b"", *frames])
            if len(frames) == 1:
                assert socket.poll(PATIENCE_MS), frames
            socket.close()
        socket = opened(zmq.DEALER)
        socket.connect(publisher.addresses[1])
        assert asked(socket, b"", SNAPSHOT)[1:] != [END, b""]
        socket.close()
        with opened(zmq.DEALER) as large:
            large.connect(publisher.addresses[1])
            large.send_multipart([b"", bytes(MAX_REQUEST_BYTES + 1)])
            assert not large.poll(100)


def test_replay_request_that_fails_is_answered_with_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with publishing(logged()) as publisher, opened(zmq.DEALER) as socket:
        monkeypatch.setattr(EventStream, "replay", lambda stream, number: 1 // 0)
        socket.connect(publisher.addresses[1])
        assert asked(socket, b"", bytes(8)) == [b"", END, b""]


def test_worker_serves_routers_after_hostile_messages() -> None:
    with cluster(w0=(worker := FakeWorker(FormulaEngine()))) as router, opened(zmq.DEALER) as socket:
        socket.connect(worker.worker.contact.address)
        for frames in hostile():
            socket.send_multipart(frames)
        asked(socket, encode(Ping(is_first=True)))
        router.submit(asking([1, 2, 3], 4), (received := Received()).on_event)
        assert received.wait().tokens == formula([1, 2, 3], 4)


def test_part_server_answers_after_hostile_questions() -> None:
    server = PartServer(SameParts(), HOLDER, "tcp://127.0.0.1:*", PLAIN)
    server.start()
    with opened(zmq.DEALER) as socket:
        socket.connect(server.contact.address)
        for frames in hostile():
            socket.send_multipart(frames)
        socket.send(encode_question(GetSegment(b"other", b"key")))
        until(lambda: socket.poll(PATIENCE_MS) and answer_or_none(socket.recv_multipart()[0]) == Missing())
    server.close()


def answer_or_none(payload: bytes) -> object:
    try:
        return answer(payload)
    except Exception:
        return None


class Liar:
    """Worker that answers a router's first ping with what it is given."""

    def __init__(self) -> None:
        self.socket, self.contact = bound(PLAIN, "tcp://127.0.0.1:*")

    def tell(self, *messages: bytes) -> None:
        assert self.socket.poll(PATIENCE_MS)
        router, _ = self.socket.recv_multipart()
        for message in messages:
            self.socket.send_multipart([router, message])


def test_router_drops_a_lying_worker_and_serves_on_others() -> None:
    liar = Liar()
    info = WorkerInfo("one", 1, "formula", 100_000, 4, 0, "nowhere", "", {})
    with cluster(w0=FakeWorker(FormulaEngine())) as router:
        router.join("liar", liar.contact)
        liar.tell(*(frame for frames in hostile() for frame in frames), encode(Batch(b"i" * 16, [info])))
        until(lambda: "liar" not in router.links)
        router.submit(asking([1, 2, 3], 4), (received := Received()).on_event)
        assert received.wait().tokens == formula([1, 2, 3], 4)
    liar.socket.close()


def test_failed_message_with_unknown_fields_is_an_error_with_its_text() -> None:
    assert str(FailedMessage(1, 1, "OutOfPages", "no room", {"x": 1}).error) == "no room"


def test_follower_of_hostile_events_drops_its_picture_and_recovers() -> None:
    live, replay = opened(zmq.PUB), opened(zmq.ROUTER)
    addresses = []
    for socket in (live, replay):
        socket.bind("tcp://127.0.0.1:*")
        addresses.append(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    with Follower(addresses[0], addresses[1], answer_time=0.01) as follower:
        time.sleep(0.1)  # its subscription
        lied = encode_events(0.0, [BlockStored([1], None, [], 0, lifetime=b"A" * 16)])
        frames = [*hostile(), [(2**64 - 1).to_bytes(8, "big"), lied], [bytes(8), lied], [bytes(9), lied]]
        for one in frames:
            live.send_multipart([b"", *one])
        follower.follow(0.3)
        cleared = encode_events(0.0, [AllBlocksCleared(block_size=8, groups={}, lifetime=b"B" * 16)])
        live.send_multipart([b"", bytes(8), cleared])
        follower.follow(0.2)
        assert (follower.picture.next, follower.picture.lifetime) == (1, b"B" * 16)
    live.close()
    replay.close()


def test_thread_work_is_called_again_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "RESTART_SECONDS", 0.0)
    errors = [ValueError("one"), OSError("two")]

    def work() -> None:
        if errors:
            raise errors.pop()

    monkeypatch.setattr(threads, "restarts", type(restarts)())
    run_again(work, lambda: False)
    assert dict(threads.restarts) == {threading.current_thread().name: 2}
    errors.append(ValueError("last"))
    run_again(work, lambda: True)
    assert threads.restarts.total() == 3


def test_publisher_that_failed_sends_everything_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "RESTART_SECONDS", 0.0)
    toy = logged()
    with publishing(toy) as publisher, Follower(*publisher.addresses, "kv-events") as follower:
        step = EventStream.step
        monkeypatch.setattr(EventStream, "step", lambda stream, changes: 1 // 0)
        serve(toy, publisher, 1)
        until(lambda: restarts["headwater-events"])
        monkeypatch.setattr(EventStream, "step", step)
        serve(toy, publisher, 2)
        caught_up(follower, toy)
    restarts.clear()
