"""The publisher and a follower over real sockets: late joins, gaps, restarts, full queues, readers that do not read."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from headwater.cluster import publisher as publishers
from headwater.cluster.messages import END, KV, SNAPSHOT, decode
from headwater.cluster.picture import Follower, Picture
from headwater.cluster.publisher import Publisher
from headwater.cluster.sockets import Sockets, opened
from tests.cache.toy import PAGE, Toy, words
from tests.cluster.rig import TIGHT, held, logged, stream_of

ANY = "tcp://127.0.0.1:*"
PATIENCE = 20.0  # seconds after which something that must happen has not


def bound(*addresses: str) -> Sockets:
    """Bind as soon as the addresses are free: ZeroMQ closes sockets a little later than it is asked to."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return Sockets(*addresses)
        except zmq.ZMQError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@contextmanager
def publishing(toy: Toy, addresses: tuple[str, str] = (ANY, ANY), lifetime: bytes = b"A" * 16) -> Iterator[Publisher]:
    sockets = bound(*addresses)
    publisher = Publisher(toy.cache, stream_of(toy, lifetime), sockets, "kv-events")
    publisher.addresses = sockets.addresses  # type: ignore[attr-defined]
    publisher.start()
    try:
        yield publisher
    finally:
        publisher.close()
        sockets.close()


def serve(toy: Toy, publisher: Publisher, seed: int, pages: int = 4) -> None:
    toy.serve(words(seed, pages * PAGE + 1))
    publisher.stepped()


def settled(publisher: Publisher) -> None:
    """Wait until all that is queued was sent."""
    deadline = time.monotonic() + PATIENCE
    while publisher._queue:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def lose_one(follower: Follower) -> None:
    """Take the next message from a follower."""
    assert follower._live.poll(int(PATIENCE * 1000))
    follower._live.recv_multipart()


def known(picture: Picture) -> dict[int, set[int]]:
    return {group: found for group, found in picture.held.items() if found}


def follow_until(follower: Follower, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < deadline, (follower.picture.next, known(follower.picture))
        follower.follow(0.02)


def caught_up(follower: Follower, toy: Toy) -> None:
    """Follow until the picture is the index."""
    expected = {group: found for group, found in held(toy.cache).items() if found}
    follow_until(follower, lambda: follower.picture.is_whole and known(follower.picture) == expected)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishers, "HEARTBEAT_SECONDS", 0.05)


@pytest.mark.usefixtures("quick")
def test_a_reader_that_joins_late_has_everything_and_follows() -> None:
    toy = logged(TIGHT)
    with publishing(toy) as publisher:
        serve(toy, publisher, 1)
        settled(publisher)
        with Follower(*publisher.addresses, "kv-events") as follower:
            caught_up(follower, toy)
            assert follower.snapshots == 1
            for seed in range(2, 12):
                serve(toy, publisher, seed)
            caught_up(follower, toy)
            assert (follower.snapshots, follower.picture.lifetime) == (1, b"A" * 16)
            assert time.monotonic() - follower.heard < 1.0


@pytest.mark.usefixtures("quick")
def test_short_gap_is_closed_by_replay_and_long_gap_by_snapshot() -> None:
    toy = logged(TIGHT)
    with publishing(toy) as publisher, Follower(*publisher.addresses, "kv-events") as follower:
        caught_up(follower, toy)
        before = follower.snapshots
        for seed in (1, 2):
            serve(toy, publisher, seed)
            lose_one(follower)
            caught_up(follower, toy)
        assert (follower.replays, follower.snapshots) == (2, before)
        serve(toy, publisher, 3)
        lose_one(follower)
        publisher._stream._kept.clear()
        caught_up(follower, toy)
        assert (follower.replays, follower.snapshots) == (3, before + 1)


@pytest.mark.usefixtures("quick")
def test_a_restarted_publisher_is_followed() -> None:
    toy = logged()
    with publishing(toy) as publisher:
        addresses = publisher.addresses
        serve(toy, publisher, 1)
        with Follower(*addresses, "kv-events") as follower:
            caught_up(follower, toy)
            publisher.close()
            after = logged()
            with publishing(after, addresses, b"B" * 16) as second:
                serve(after, second, 2)
                follow_until(follower, lambda: follower.picture.lifetime == b"B" * 16)
                caught_up(follower, after)
        expected = {group: found for group, found in held(after.cache).items() if found}
        assert (
            known(follower.picture) == expected != {group: found for group, found in held(toy.cache).items() if found}
        )


@pytest.mark.usefixtures("quick")
def test_a_full_queue_delays_no_step_and_all_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = logged(TIGHT)
    monkeypatch.setattr(publishers, "MAX_QUEUED_STEPS", 2)
    with publishing(toy) as publisher, Follower(*publisher.addresses, "kv-events") as follower:
        caught_up(follower, toy)
        free = threading.Event()
        send = publisher._send_queued
        monkeypatch.setattr(publisher, "_send_queued", lambda: free.wait(PATIENCE) and send())
        for seed in range(1, 8):
            begun = time.monotonic()
            serve(toy, publisher, seed)
            assert time.monotonic() - begun < 1.0
        assert len(publisher._queue) <= 3
        assert publisher._behind
        free.set()
        settled(publisher)
        follow_until(follower, lambda: follower.picture.is_whole and not known(follower.picture))
        serve(toy, publisher, 9)
        assert not publisher._behind
        caught_up(follower, toy)


def test_a_subscriber_that_does_not_read_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the publisher's own thread sends, so that no step waits for a socket."""
    toy, whole, senders = logged(TIGHT), zmq.Socket.send_multipart, set[str]()

    def send(sent: zmq.Socket, *given: Any, **more: Any) -> Any:
        if sent.socket_type in (zmq.PUB, zmq.ROUTER):
            senders.add(threading.current_thread().name)
        return whole(sent, *given, **more)

    monkeypatch.setattr(zmq.Socket, "send_multipart", send)
    with publishing(toy) as publisher:
        deaf = opened(zmq.SUB, receives=1)
        deaf.subscribe("")
        deaf.connect(publisher.addresses[0])
        asking = opened(zmq.DEALER, receives=1)
        asking.connect(publisher.addresses[1])
        for seed in range(300):
            serve(toy, publisher, seed)
            asking.send_multipart((b"", (0).to_bytes(8, "big")))
        with Follower(*publisher.addresses, "kv-events") as follower:
            caught_up(follower, toy)
        assert senders == {"headwater-events"}
        deaf.close()
        asking.close()


def test_idle_publishers_send_numbered_heartbeats_that_hold_no_blocks(quick: None) -> None:
    with publishing(logged()) as publisher:
        settled(publisher)
        live = opened(zmq.SUB)
        live.subscribe("kv-events")
        live.connect(publisher.addresses[0])
        seen = []
        while len(seen) < 3:
            assert live.poll(int(PATIENCE * 1000))
            topic, number, payload = live.recv_multipart()
            assert topic == b"kv-events"
            seen.append(int.from_bytes(number, "big"))
            (event,) = decode(payload)
            assert (event.block_hashes, event.group_idx, event.lifetime) == ([], KV, b"A" * 16)
        assert seen == list(range(seen[0], seen[0] + 3))
        live.close()


def answer(publisher: Publisher, *request: bytes) -> list[tuple[int, bytes]]:
    asking = opened(zmq.DEALER)
    asking.connect(publisher.addresses[1])
    asking.send_multipart(request)
    found = []
    while True:
        assert asking.poll(int(PATIENCE * 1000)), "no answer"
        empty, number, payload = asking.recv_multipart()
        assert empty == b""
        if number == END:
            assert payload == b""
            asking.close()
            return found
        found.append((int.from_bytes(number, "big"), payload))


def test_requests_in_vllms_form_are_answered_and_others_are_not_fatal() -> None:
    toy = logged()
    with publishing(toy) as publisher:
        for seed in (1, 2, 3):
            serve(toy, publisher, seed)
        strange = opened(zmq.DEALER)
        strange.connect(publisher.addresses[1])
        strange.send_multipart((b"no delimiter",))
        settled(publisher)
        assert answer(publisher, b"", b"what?") == []
        replayed = answer(publisher, b"", (2).to_bytes(8, "big"))
        assert [number for number, _ in replayed][:2] == [2, 3]
        (number, payload), *_ = answer(publisher, b"", SNAPSHOT)
        assert number == replayed[-1][0] + 1
        assert msgspec.msgpack.decode(payload)[1][0]["type"] == "AllBlocksCleared"
        strange.close()


def test_a_worker_that_does_not_answer_leaves_the_picture_empty() -> None:
    toy = logged()
    with publishing(toy) as publisher:
        serve(toy, publisher, 1)
        settled(publisher)
        with Follower(publisher.addresses[0], "tcp://127.0.0.1:9", "kv-events", answer_time=0.1) as follower:
            follower.follow(1.5)
            assert follower.snapshots > 0
            assert not follower.picture.is_whole
