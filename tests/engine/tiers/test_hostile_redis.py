"""A Redis that sends more, or more slowly, than was stored: a call ends soon, with little memory."""

import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from headwater.tiers import redis as stores
from headwater.tiers import replies
from headwater.tiers.redis import MAX_REPLY_BYTES, RedisStore
from headwater.tiers.store import StoreError

FLOODS = {
    "long text": b"$2000000000\r\n",
    "many texts": b"*2000000000\r\n",
    "endless line": b"+",
    "nested": b"*1\r\n" * 5000,
    "another type": b":5\r\n",
}
Send = Callable[[socket.socket], None]


def flood(head: bytes) -> Send:
    def send(client: socket.socket) -> None:
        client.sendall(head)
        while True:
            client.sendall((b"$1\r\nx\r\n" if head[:1] == b"*" else b"x" * 8) * 8192)

    return send


def drip(client: socket.socket) -> None:
    client.sendall(b"$1000\r\n")
    while True:
        client.sendall(b"x")
        time.sleep(0.02)


@pytest.fixture
def serve() -> Iterator[Callable[[Send], str]]:
    """Return a function that starts a server which answers any call in one way, and returns its URL."""
    listeners: list[socket.socket] = []

    def start(send: Send) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def answer(client: socket.socket) -> None:
            with client, suppress(OSError):
                client.recv(65536)
                send(client)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return f"redis://127.0.0.1:{listener.getsockname()[1]}/0"

    yield start
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize("head", FLOODS.values(), ids=FLOODS)
@pytest.mark.parametrize("call", [lambda store: store.get("sabc"), RedisStore.usage], ids=["get", "usage"])
def test_endless_reply_ends_a_call_after_the_bytes_of_a_part(
    serve: Callable[[Send], str], head: bytes, call: Callable[[RedisStore], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "MAX_REPLY_BYTES", MAX_REPLY_BYTES // 8)
    store, begun = RedisStore(serve(flood(head)), None), time.monotonic()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(StoreError):
        call(store)
    store.close()
    assert time.monotonic() - begun < 5.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_dripping_reply_ends_a_call_in_time(serve: Callable[[Send], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "READ_SECONDS", 0.2)
    store, begun = RedisStore(serve(drip), None), time.monotonic()
    with pytest.raises(StoreError):
        store.get("sabc")
    assert time.monotonic() - begun < 5.0


def test_limit_is_raised_for_a_block_on_its_thread_only() -> None:
    limit, seen = replies.ReplyLimit(10, 1.0), []
    with limit.of(20):
        thread = threading.Thread(target=lambda: seen.append(limit.bytes))
        thread.start()
        thread.join()
        assert (limit.bytes, seen) == (20, [10])
    assert limit.bytes == 10
