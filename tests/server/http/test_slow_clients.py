"""Clients that send slowly, read slowly, or come in crowds. They hold no connection and no request for long."""

import json
import re
import resource
import signal
import socket
import threading
import time
from types import SimpleNamespace

import httpx
import pytest

from headwater.config import ServeConfig
from headwater.errors import ConfigError
from headwater.server.http import connection, process
from headwater.server.http.process import ListeningSocket, most_connections
from tests.forked import address, listening
from tests.server.http.test_draining import BODY, FOREVER, PATIENCE, started
from tests.test_serve import started as serve

POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
HEAD = POST + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
HALF_HEAD = POST + b"Content-Le"
HALF_BODY = HEAD % 1000 + b'{"prompt'
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def running(engine):
    """Return a function that starts a server with settings, which drains without a deadline."""
    with started(engine, engine.was_cancelled.set) as start:
        yield start


def connected(server, sent=b"", **options):
    client = socket.create_connection(server.sock.getsockname(), PATIENCE, **options)
    client.sendall(sent)
    return client


def until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def health_of(client):
    """Return the status line of the answer to HEALTH."""
    received = b""
    while not received.endswith(b"}}"):
        data = client.recv(65536)
        assert data, received
        received += data
    return received.partition(b"\r\n")[0]


def rest_of(client):
    """Return all that still comes until the server closes."""
    received = b""
    with client:
        while data := client.recv(65536):
            received += data
    return received


def closed_unanswered(client):
    """Return whether the server closes the connection and begins no further answer."""
    try:
        return b"HTTP/1.1" not in rest_of(client)
    except ConnectionResetError:
        return True


def refusal(raw, status, code):
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), raw
    error = json.loads(body)["error"]
    assert (set(error), error["code"]) == ({"message", "type", "param", "code"}, code)
    return error["message"], head


def whole_request(**fields):
    body = json.dumps({**BODY, **fields}).encode()
    return HEAD % len(body) + body


def test_half_requests_are_answered_408_and_closed(running, engine):
    server = running(head_timeout=0.3, body_timeout=0.5)
    halves = [("head", connected(server, HALF_HEAD)) for _ in range(20)]
    halves += [("body", connected(server, HALF_BODY)) for _ in range(20)]
    silent = [connected(server) for _ in range(5)]
    assert httpx.get(f"{server.url}/health").status_code == 200
    for part, client in halves:
        message, _ = refusal(rest_of(client), 408, "request_timeout")
        assert part in message
        assert f"{part}_timeout" in message
        assert {"head": "0.3 seconds", "body": "0.5 seconds"}[part] in message
    assert [rest_of(client) for client in silent] == [b""] * 5
    assert engine.seen == []


def test_second_head_of_a_connection_is_timed_from_its_first_byte(running):
    server = running(head_timeout=0.3, idle_timeout=FOREVER)
    client = connected(server, HEALTH)
    assert health_of(client) == b"HTTP/1.1 200 OK"
    time.sleep(0.5)  # idle for longer than a head may take
    client.sendall(HALF_HEAD)
    refusal(rest_of(client), 408, "request_timeout")


def test_idle_connection_is_closed(running):
    client = connected(running(idle_timeout=0.3), HEALTH)
    assert health_of(client) == b"HTTP/1.1 200 OK"
    assert rest_of(client) == b""


def test_answer_takes_as_long_as_it_takes(running, engine):
    """Neither the timeouts of a request's parts nor that of an idle connection end a request that is computed."""
    engine.hold_after = 3
    server = running(head_timeout=0.1, body_timeout=0.1, idle_timeout=0.1, send_timeout=0.1)
    whole, streamed = connected(server, whole_request(stream=False)), connected(server, whole_request())
    assert engine.held.wait(PATIENCE)
    time.sleep(0.5)
    engine.was_cancelled.set()  # the held request continues
    assert rest_of(whole).startswith(b"HTTP/1.1 200")
    assert b"data: [DONE]" in rest_of(streamed)


@pytest.fixture
def talkative(running, engine):
    """A server whose answers of 4,000 tokens fit in no buffer of the kernel, and are held shortly before their end."""
    engine.script = "y" * 4000
    engine.max_model_len = 5000

    def start(**settings):
        server = running(**settings)
        server.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(PATIENCE)
        client.connect(server.sock.getsockname())
        client.sendall(whole_request(max_tokens=4000, prompt="a"))
        return server, client

    return start


def test_client_that_reads_nothing_loses_its_request(talkative, engine):
    engine.hold_after = 3900
    _, client = talkative(send_timeout=0.4)
    with client:
        assert engine.was_cancelled.wait(PATIENCE)
    assert engine.cancelled == [0]


def test_client_that_reads_slowly_gets_its_whole_answer(talkative, engine):
    _, client = talkative(send_timeout=1.5)
    received = b""
    began = time.monotonic()
    with client:
        while b"[DONE]" not in received[-100:]:
            data = client.recv(50_000)
            assert data, received[-1000:]
            received += data
            time.sleep(0.02)
    assert time.monotonic() - began > 1.5
    assert received.count(b"data: ") > 3900
    assert engine.cancelled == []


def test_after_the_drain_a_client_that_reads_nothing_holds_nothing_up(talkative, engine):
    engine.hold_after = 3900
    server, client = talkative()
    with client:
        assert engine.held.wait(PATIENCE)
        server._drain = 0.0
        server.handle_exit(signal.SIGTERM, None)
        assert server.ended()


def test_half_requests_hold_up_no_drain(running):
    server = running()  # whose drain has no end
    clients = [connected(server, sent) for sent in (HALF_HEAD, HALF_BODY, b"") for _ in range(10)]
    until(lambda: len(server.server_state.connections) == len(clients))
    server.handle_exit(signal.SIGTERM, None)
    assert server.ended()
    for client in clients:
        client.close()


def test_client_that_waits_makes_room_for_a_new_one(running, monkeypatch):
    monkeypatch.setattr(connection, "IDLE_SECONDS", 0.0)
    server = running(max_connections=4)
    first = connected(server, HALF_BODY)
    until(lambda: server.server_state.tasks)  # its head has been read
    others = [connected(server, half) for half in (HALF_HEAD, b"", HALF_BODY)]
    until(lambda: len(server.server_state.connections) == 4)
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert closed_unanswered(first)
    for other in others:
        other.close()


def test_beyond_the_cap_a_new_client_is_refused_if_all_are_active(running, engine, monkeypatch):
    monkeypatch.setattr(connection, "IDLE_SECONDS", 0.0)
    engine.hold_after = 3
    server = running(max_connections=1, idle_timeout=0.2)
    busy = connected(server, whole_request())
    assert engine.held.wait(PATIENCE)
    message, head = refusal(rest_of(connected(server, HEALTH)), 503, "too_many_connections")
    assert "1 connections are open, at most 1" in message
    assert re.search(rb"^retry-after: \d+\r$", head, re.M)
    engine.was_cancelled.set()
    assert b"data: [DONE]" in rest_of(busy)
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_young_client_is_not_given_up_for_a_new_one(running, monkeypatch):
    monkeypatch.setattr(connection, "IDLE_SECONDS", FOREVER)
    server = running(max_connections=2)
    with connected(server, HALF_HEAD), connected(server, HALF_BODY):
        message, _ = refusal(rest_of(connected(server, HEALTH)), 503, "too_many_connections")
        assert "2 connections are open, at most 2 are accepted" in message


def test_each_address_has_a_cap_of_its_own(running, monkeypatch):
    monkeypatch.setattr(connection, "IDLE_SECONDS", FOREVER)
    server = running(max_connections_per_address=2)
    with connected(server), connected(server):
        message, _ = refusal(rest_of(connected(server, HEALTH)), 503, "too_many_connections")
        assert "from 127.0.0.1" in message
        try:
            other = connected(server, HEALTH, source_address=("127.0.0.2", 0))
        except OSError:
            pytest.skip("there is no second loopback address here")
        with other:
            assert health_of(other) == b"HTTP/1.1 200 OK"


def test_connections_at_the_limit_are_seen_a_bounded_number_of_times(monkeypatch):
    gate, seen, now = connection.Gate(ServeConfig(max_connections=500)), [], [0.0]

    class Client(SimpleNamespace):
        __hash__ = object.__hash__

        @property
        def waits_for_client(self):
            seen.append(self)
            return self.waits

        def drop(self):
            gate.leave(self)

    def arrive(waits):
        one = Client(address="a", waits=waits, heard=now[0], loop=SimpleNamespace(time=lambda: now[0]))
        return gate.enter(one)

    assert not any(arrive(waits=number >= 250) for number in range(500))
    now[0] = 2.0
    assert [arrive(waits=True) for _ in range(500)].count(None) == 250  # each in place of one that waited
    assert (len(seen), gate.count) == (500, 500)


def test_refused_clients_are_answered_in_limited_number(running, monkeypatch):
    monkeypatch.setattr(connection, "IDLE_SECONDS", FOREVER)
    monkeypatch.setattr(connection, "MAX_REFUSED", 0)
    server = running(max_connections=1)
    with connected(server):
        assert closed_unanswered(connected(server, HEALTH))


def test_client_that_disconnects_in_mid_body_logs_no_traceback(running, engine, caplog):
    caplog.set_level("INFO")
    server = running()
    for _ in range(3):
        connected(server, HALF_BODY).close()
    until(lambda: caplog.text.count("status=499") == 3)
    counted = 'headwater_requests_total{endpoint="completion",outcome="cancelled"} 3.0'
    until(lambda: counted in httpx.get(f"{server.url}/metrics").text)
    assert "Traceback" not in caplog.text
    assert engine.seen == []


CHUNKED = POST + b"Transfer-Encoding: chunked\r\n"


NO_BODY = b"Host: localhost\r\n\r\n"
MALFORMED = {
    "tls": b"\x16\x03\x01 no HTTP\r\n\r\n",
    "short chunk": CHUNKED + b"\r\n5\r\n{",
    "no chunk": CHUNKED + b"\r\nzz\r\n",
    "two lengths": CHUNKED + b"Content-Length: 5\r\n\r\n0\r\n\r\n" + HEALTH,
    "HTTP/9.9": b"GET /health HTTP/9.9\r\n" + NO_BODY,
    "many headers": b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 10_000 + NO_BODY,
}


@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED)
def test_malformed_http_is_answered_with_400_or_408(running, sent, caplog):
    server = running(body_timeout=0.3)
    refused = rest_of(connected(server, sent))
    assert refused.startswith((b"HTTP/1.1 400", b"HTTP/1.1 408")), refused
    assert refused.count(b"HTTP/1.1 ") == 1
    assert "Traceback" not in caplog.text


def test_broken_body_after_its_refusal_leaves_no_traceback(running, caplog):
    server = running()
    with connected(server, CHUNKED + b"Content-Type: text/plain\r\n\r\n1\r\n{\r\n") as client:
        assert client.recv(65536).startswith(b"HTTP/1.1 415")
        client.sendall(b"zz\r\nno chunk\r\n")
        assert closed_unanswered(client)
    assert not [record for record in caplog.records if record.exc_info]


def test_last_file_descriptors_are_not_for_connections(monkeypatch):
    with ListeningSocket() as listening, socket.socket() as client:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        monkeypatch.setattr(process, "descriptor_limit", lambda: client.fileno() + 1 + process.RESERVED_DESCRIPTORS)
        with client:
            client.connect(listening.getsockname())
            with pytest.raises(BlockingIOError, match="descriptors"):
                listening.accept()
            assert client.recv(1) == b""
            monkeypatch.setattr(process, "descriptor_limit", lambda: 10_000)
            with socket.create_connection(listening.getsockname()):
                accepted, _ = listening.accept()
                accepted.close()


def test_connection_limit_stays_below_the_file_descriptor_limit(monkeypatch, caplog):
    monkeypatch.setattr(process, "descriptor_limit", lambda: 10**6)
    assert most_connections(ServeConfig(max_connections=700)) == 700
    monkeypatch.setattr(process, "descriptor_limit", lambda: 400)
    assert (
        1
        <= most_connections(ServeConfig(max_connections=700))
        < 400 - connection.MAX_REFUSED - process.RESERVED_DESCRIPTORS
    )
    assert "max_connections is 700" in caplog.text
    assert "400 files" in caplog.text


@pytest.mark.parametrize("name", ["head_timeout", "body_timeout", "idle_timeout", "send_timeout"])
def test_timeouts_below_a_tenth_of_a_second_are_refused(name):
    with pytest.raises(ConfigError, match=rf"{name} is 0.0, must be at least 0.1"):
        ServeConfig(**{name: 0.0})


def crowd(port, size):
    """Connect clients that send half a request each; those that are refused are left out."""
    clients = []
    for number in range(size):
        client = socket.socket()
        client.settimeout(PATIENCE)
        try:
            client.connect(("127.0.0.1", port))
            client.sendall(HALF_BODY if number % 2 else HALF_HEAD)
        except OSError:
            client.close()
        else:
            clients.append(client)
    return clients


def alive(client):
    client.setblocking(False)
    try:
        while client.recv(65536):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def healthy(port):
    """Return whether a client is answered; a crowd that has just come may still have all places."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def descriptors(count):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))


@pytest.mark.full
@pytest.mark.parametrize("files", [256, 4096])
def test_two_thousand_slow_clients_hold_nothing_up(files):
    """The server answers others meanwhile, closes the crowd in time, and ends as soon as it is signalled."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors(files)  # which the server's process inherits
    try:
        with listening(serve("--port", "0", "--body-timeout", "12")) as (server, said):
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            log = []
            reader = threading.Thread(target=lambda: log.append(server.stderr.read()))
            reader.start()  # a full pipe would stop the server
            port = int(re.search(r":(\d+)/v1", address(said))[1])
            clients = crowd(port, 2000)
            until(lambda: healthy(port))
            until(lambda: not any(alive(client) for client in clients))
            clients = crowd(port, 200)
            server.send_signal(signal.SIGTERM)
            assert server.wait(timeout=10) == 0
            reader.join()
            assert "Traceback" not in log[0]
            assert len(log[0]) < 300_000  # a line for each request that began, none for each refused connection
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
