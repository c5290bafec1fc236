"""Draining over a fake engine; tests/test_serve.py tests it with signals and a process."""

import re
import signal
import socket
import threading
from contextlib import contextmanager

import httpx
import pytest

from headwater.config import ServeConfig
from headwater.server.app import create_app
from headwater.server.http.process import DrainingServer, protocol_settings
from headwater.server.http.service_manager import ServiceManager
from tests.server.fake_engine import FakeEngine

PATIENCE = 20  # seconds after which something that must happen has not
FOREVER = 1e9
BODY = {"prompt": "abc", "max_tokens": 50, "stream": True}


class Draining(DrainingServer):
    """Server on a thread and a port of its own, with an event that is set when it listens."""

    def __init__(self, engine, drain, manager=None, **settings):
        config = ServeConfig(cors=("*",), **settings)
        app = create_app(engine, config)
        super().__init__(
            protocol_settings(app, config), app.state.in_flight, engine, drain, manager, app.state.renewals
        )
        self.listening = threading.Event()
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.sock.getsockname()[1]}"
        self.thread = threading.Thread(target=self.run, args=([self.sock],), daemon=True)

    async def startup(self, sockets=None):
        await super().startup(sockets)
        self.listening.set()

    def ended(self):
        self.thread.join(PATIENCE)
        return not self.thread.is_alive()


@pytest.fixture
def engine():
    fake = FakeEngine(hold_after=3)
    fake.start()
    return fake


@contextmanager
def started(engine, let_go):
    """Yield a function that starts a server. At the end `let_go` ends the held requests, and all servers stop."""
    servers = []

    def start(drain=FOREVER, manager=None, **settings):
        server = Draining(engine, drain, manager, **settings)
        servers.append(server)
        server.thread.start()
        assert server.listening.wait(PATIENCE)
        return server

    yield start
    for server in servers:
        server.should_exit = True
        let_go()
        assert server.ended()
        server.sock.close()


@pytest.fixture
def draining(engine):
    with started(engine, engine.stop) as start:
        yield start


def test_running_request_ends_and_new_ones_are_refused(draining, engine):
    server = draining(FOREVER)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=BODY, timeout=PATIENCE) as stream:
        assert engine.held.wait(PATIENCE)
        server.handle_exit(signal.SIGTERM, None)
        while (health := httpx.get(f"{server.url}/health")).status_code == 200:
            pass  # until the server has looked
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        assert [httpx.get(f"{server.url}/health/{what}").status_code for what in ("live", "ready")] == [200, 503]
        refused = httpx.post(f"{server.url}/v1/completions", json=BODY, headers={"origin": "http://page"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert refused.json()["error"]["code"] == "engine_stopped"
        assert refused.headers["access-control-allow-origin"] == "*"
        assert httpx.get(f"{server.url}/v1/models").status_code == 200  # what computes nothing is still answered
        server.handle_exit(signal.SIGTERM, None)  # again: changes nothing
        engine.was_cancelled.set()  # the held request continues
        assert stream.read().endswith(b"data: [DONE]\n\n")
    assert server.ended()
    assert (len(engine.seen), engine.cancelled, server.interrupted) == (1, [], False)


def test_nothing_to_wait_for_ends_at_once(draining):
    server = draining(FOREVER)
    server.handle_exit(signal.SIGINT, None)
    assert server.ended()


def test_requests_left_after_the_drain_are_ended_by_the_engine(draining, engine):
    server = draining(0.0)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=BODY, timeout=PATIENCE) as stream:
        assert engine.held.wait(PATIENCE)
        server.handle_exit(signal.SIGTERM, None)
        assert stream.read().endswith(b"data: [DONE]\n\n")  # stopping the fake lets its request go
    assert server.ended()


def test_second_interrupt_ends_the_server_without_waiting(draining, engine):
    server = draining(FOREVER)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=BODY, timeout=PATIENCE) as stream:
        assert engine.held.wait(PATIENCE)
        server.handle_exit(signal.SIGINT, None)
        server.handle_exit(signal.SIGINT, None)
        stream.read()
    assert server.ended()
    assert server.interrupted


def lines_of(caplog):
    return [record.message for record in caplog.records if record.name == "headwater.server"]


def test_draining_logs_its_limit_and_its_end(draining, engine, caplog):
    caplog.set_level("INFO")
    server = draining(30.0)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=BODY, timeout=PATIENCE) as stream:
        assert engine.held.wait(PATIENCE)
        server.handle_exit(signal.SIGINT, None)
        while not lines_of(caplog):
            pass  # until the server has looked
        engine.was_cancelled.set()
        stream.read()
    assert server.ended()
    began, ended = lines_of(caplog)
    assert began == "draining: 1 request, at most 30 s, Ctrl-C again to stop at once"
    assert re.fullmatch(r"drained for \d+\.\d s: all requests have ended, the server stops", ended)


def test_interrupted_draining_logs_unfinished_requests(draining, engine, caplog):
    caplog.set_level("INFO")
    server = draining(FOREVER)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=BODY, timeout=PATIENCE) as stream:
        assert engine.held.wait(PATIENCE)
        server.handle_exit(signal.SIGINT, None)
        server.handle_exit(signal.SIGINT, None)
        stream.read()
    assert server.ended()
    assert re.search(r"1 request ended unfinished", lines_of(caplog)[-1])


def test_idle_server_notifies_the_service_manager_that_it_stops(draining, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(tmp_path / "notify"))
        told.settimeout(PATIENCE)
        server = draining(30.0, ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "notify")}))
        server.handle_exit(signal.SIGTERM, None)
        assert told.recv(1000) == b"STOPPING=1\nSTATUS=stopping: no request is running"
    assert server.ended()
