"""Messages to a service manager over its datagram socket."""

import os
import socket
from contextlib import contextmanager

import pytest

from headwater.server.http.service_manager import ServiceManager


@contextmanager
def listened(address):
    """Bind a manager's socket; yield a function that returns its next message, None if there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(address)
        sock.setblocking(False)

        def message():
            try:
                return sock.recv(10_000).decode()
            except BlockingIOError:
                return None

        yield message


@pytest.mark.parametrize("prefix", ["", "@"])
def test_states_reach_the_socket_of_the_manager(prefix, tmp_path):
    path = f"headwater-test-{os.getpid()}" if prefix else str(tmp_path / "notify")
    with listened(f"\0{path}" if prefix else path) as message:
        manager = ServiceManager({"NOTIFY_SOCKET": f"{prefix}{path}"})
        manager.status("loading")
        manager.ready(lambda: 0.0, "serves small")
        manager.ping()  # no watchdog
        manager.stopping("draining")
        assert [message() for _ in range(4)] == [
            "STATUS=loading",
            "READY=1\nSTATUS=serves small",
            "STOPPING=1\nSTATUS=draining",
            None,
        ]


def test_watchdog_is_pinged_while_steps_end_and_not_after(tmp_path):
    state = {"now": 0.0, "turn": 0.0}
    environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "8000000"}
    with listened(str(tmp_path / "notify")) as message:
        manager = ServiceManager(environment, clock=lambda: state["now"])
        manager.ping()
        assert message() is None  # not ready yet
        manager.ready(lambda: state["turn"], "ready")
        message()
        pings = []
        for now, turn in ((1.0, 0.0), (2.0, 0.0), (3.0, 3.9), (5.0, 4.0), (6.0, float("inf")), (7.0, 0.0)):
            state.update(now=now, turn=turn)
            manager.ping()
            if message() == "WATCHDOG=1":
                pings.append(now)
        assert pings == [1.0, 3.0, 7.0]
        manager.stopping("stopping")
        message()
        state["now"] = 20.0
        manager.ping()
        assert message() is None


def test_watchdog_of_another_process_is_not_pinged(tmp_path):
    environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"}
    with listened(str(tmp_path / "notify")) as message:
        manager = ServiceManager(environment)
        manager.ready(lambda: 0.0, "ready")
        manager.ping()
        assert [message(), message()] == ["READY=1\nSTATUS=ready", None]


def test_absent_manager_is_a_warning_and_no_error(tmp_path, caplog):
    ServiceManager({}).status("loading")
    assert not caplog.records
    ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "none")}).status("loading")
    assert "No such file" in caplog.text
