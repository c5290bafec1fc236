"""Routers in processes: what workers do concerns all of them; one that ends is started again, and told everything."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from headwater.cluster.router_processes import Given, RouterProcesses
from headwater.config import ServeConfig
from tests.cluster.fake import PATIENCE, until


def pretending(given: Given, pipe: Connection) -> None:
    """Say what a router would that is asked for one request each time that a worker joins."""
    port = socket.socket(fileno=given.listening).getsockname()[1]
    workers, routed = dict[str, str](), 0
    signal.signal(signal.SIGHUP, lambda *_: pipe.send(("lost", "read again")))
    while True:
        command, name, *_ = pipe.recv()
        if command == "leave":
            del workers[name]
            pipe.send(("lost", name))
        else:
            routed += command == "join"
            workers[name] = "draining" if command == "drain" else "up"
        shown = [
            {"name": name, "state": state, "drained": state == "draining", "open": 0, "answered": 2, "running": 1}
            for name, state in workers.items()
        ]
        pipe.send(("health", {"workers": shown, "requests": {"routed": routed}, "port": port, "rule": given.rule}))


def states(health: dict) -> dict[str, str]:
    return {one["name"]: one["state"] for one in health.get("workers", ())}


@pytest.fixture
def routers() -> Iterator[RouterProcesses]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        found = RouterProcesses(pretending, 2, sock, ServeConfig(), bytes(32), "round_robin")
        found.start()
        yield found
        found.stop(0.0)
        assert not any(child.process.is_alive() for child in found._children)


def test_all_routers_get_the_members_and_their_counts_are_added(routers: RouterProcesses) -> None:
    lost = []
    routers.lost = lost.append
    routers.join("a", "there")
    assert routers.wait_for(1, PATIENCE)
    state = routers.state()
    assert [one["name"] for one in state["workers"]] == ["a"]
    assert state["requests"] == {"routed": 2}
    assert state["workers"][0]["answered"] == 4
    assert (routers.health()["port"], routers.health()["rule"]) == (routers._sock.getsockname()[1], "round_robin")
    assert not routers.is_idle("a")
    routers.drain("a")
    until(lambda: routers.is_idle("a"))
    routers.leave("a")
    until(lambda: lost == ["a", "a"])
    assert not routers.wait_for(1, 0.2)


def test_hang_up_reaches_every_router(routers: RouterProcesses) -> None:
    lost = []
    routers.lost = lost.append
    routers.join("a", "there")
    assert routers.wait_for(1, PATIENCE)
    routers.renew()
    until(lambda: lost == ["read again"] * 2)


def test_workers_do_not_change_while_a_router_is_started(routers: RouterProcesses) -> None:
    for change in (routers.join, routers.drain, routers.leave):
        thread = threading.Thread(target=change, args=("a", "there")[: 1 + (change == routers.join)])
        with routers._lock:
            before = dict(routers._contacts), set(routers._draining)
            thread.start()
            thread.join(0.05)
            assert (routers._contacts, routers._draining) == before
        thread.join(PATIENCE)
        assert (routers._contacts, routers._draining) != before


def test_ended_router_is_restarted_with_all_members(routers: RouterProcesses) -> None:
    routers.join("a", "there")
    routers.join("b", "elsewhere")
    routers.drain("b")
    assert routers.wait_for(2, PATIENCE)
    killed, other = routers.state()["routers"]
    os.kill(killed, signal.SIGKILL)
    until(lambda: killed not in routers.state()["routers"])
    assert other in routers.state()["routers"]
    expected = {"a": "up", "b": "draining"}
    until(lambda: states(routers._children[0].health) == expected)
    time.sleep(0.2)
    assert len(set(routers.state()["routers"])) == 2
