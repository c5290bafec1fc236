"""Loss of Ray's head, as the process of `headwater cluster up` notices it, without Ray."""

import errno
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from headwater.cluster import ray_cluster
from headwater.cluster.ray_cluster import wait_for_loss
from tests.cluster.fake import PATIENCE


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "WATCH_SECONDS", 0.02)
    monkeypatch.setenv(ray_cluster.RECONNECT_VARIABLE, f"{ray_cluster.ORDERLY_END_SECONDS + 0.3}")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as one:
        yield one


def waiting(pool: ThreadPoolExecutor, head: socket.socket, ended: threading.Event) -> Future[bool]:
    host, port = head.getsockname()
    return pool.submit(wait_for_loss, f"{host}:{port}", ended)


def test_a_head_that_is_started_again_in_time_is_not_lost(pool: ThreadPoolExecutor) -> None:
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = head.getsockname()
        lost = waiting(pool, head, ended)
        with pytest.raises(TimeoutError):
            lost.result(0.5)
    with socket.create_server(address), pytest.raises(TimeoutError):
        lost.result(0.5)
    ended.set()
    assert not lost.result(PATIENCE)


def test_a_head_that_is_away_for_long_is_lost(pool: ThreadPoolExecutor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        lost = waiting(pool, head, threading.Event())
    assert lost.result(PATIENCE)


def test_a_process_without_free_files_has_not_lost_its_head(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "too many open files")

    ended = threading.Event()
    monkeypatch.setattr(ray_cluster.socket, "create_connection", fail)
    lost = pool.submit(wait_for_loss, "127.0.0.1:1", ended)
    with pytest.raises(TimeoutError):
        lost.result(0.6)
    ended.set()
    assert not lost.result(PATIENCE)
