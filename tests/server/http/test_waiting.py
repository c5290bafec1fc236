"""Streams while their clients wait: they begin in time, and are kept alive while nothing is written."""

from __future__ import annotations

import json
import re
import threading
from contextlib import contextmanager

import httpx
import pytest

from headwater.errors import ConstraintError, DeadlineExceeded
from tests.server import templates
from tests.server.fake_engine import FakeEngine
from tests.server.http.test_draining import FOREVER, PATIENCE, started

HELLO = [{"role": "user", "content": "hello"}]
COMMENT, PING = ": keep-alive\n\n", 'event: ping\ndata: {"type":"ping"}\n\n'
SOON = {"stream_start": 0.02, "keep_alive": 0.02}
BODIES = {
    "/v1/completions": {"prompt": "abc"},
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/messages": {"messages": HELLO, "max_tokens": 50},
    "/v1/responses": {"input": "hello"},
    "/api/chat": {"model": "m", "messages": HELLO},
    "/api/generate": {"model": "m", "prompt": "hello"},
}
TIMES = re.compile(r'(?<="created_at":")[^"]*')
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
FLAT = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL = 'Hm.\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'


def empty_piece(path):
    """Return the line by which Ollama's stream is kept alive, without its time."""
    fields = {"message": {"role": "assistant", "content": ""}} if path == "/api/chat" else {"response": ""}
    return json.dumps({"model": "fake", "created_at": "", **fields, "done": False}, separators=(",", ":")) + "\n"


def keep_alive(path):
    return PING if path == "/v1/messages" else empty_piece(path) if path.startswith("/api") else COMMENT


@pytest.fixture
def engine():
    """Return an engine whose prefills last until `was_cancelled` is set."""
    fake = FakeEngine(hold_after=0)
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture
def running(engine):
    with started(engine, engine.was_cancelled.set) as start:
        yield start


class Reader:
    """Reader of a stream's text."""

    def __init__(self, response):
        self._pieces, self.text = response.iter_text(), ""

    def until(self, enough):
        """Read until the text has `enough`, or until it satisfies it."""
        while not (enough(self.text) if callable(enough) else enough in self.text):
            self.text += TIMES.sub("", next(self._pieces))
        return self.text

    def rest(self):
        return self.text + TIMES.sub("", "".join(self._pieces))


@contextmanager
def streamed(server, path, **fields):
    body = {**BODIES[path], "stream": True, **fields}
    with httpx.stream("POST", f"{server.url}{path}", json=body, timeout=PATIENCE) as response:
        yield response, Reader(response)


def without(text, kept):
    """Return a stream's events without keep-alives, ids and times."""
    return re.sub(r'"[a-z_]*duration":\d+|[0-9a-f]{32}|"created(_at)?":\d+', "", text.replace(kept, ""))


@pytest.mark.parametrize("path", BODIES)
def test_waiting_stream_begins_and_is_kept_alive(running, engine, path):
    server, kept = running(**SOON), keep_alive(path)
    with streamed(server, path) as (response, stream):
        assert engine.held.wait(PATIENCE)
        assert response.status_code == 200
        assert (response.headers["cache-control"], response.headers["x-accel-buffering"]) == ("no-cache", "no")
        begun = stream.until(lambda text: text.count(kept) >= 3)
        assert begun.endswith(kept * 2)
        if path not in ("/v1/messages", "/v1/responses"):
            assert not begun.replace(kept, "")
        engine.was_cancelled.set()
        waited = stream.rest()
    engine.hold_after = None
    with streamed(server, path) as (_, stream):
        at_once = stream.rest()
    assert without(waited, kept) == without(at_once, kept)
    assert engine.cancelled == []


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_waiting_stream_of_typed_events_begins_with_its_first_event(running, path):
    with streamed(running(stream_start=0.02, keep_alive=FOREVER), path) as (_, stream):
        first = {"/v1/messages": "event: message_start\n", "/v1/responses": "event: response.created\n"}[path]
        assert stream.until("\n\n").startswith(first)


@pytest.mark.parametrize("path", BODIES)
def test_error_before_the_start_of_a_stream_has_its_status(running, engine, path):
    engine.hold_after, engine.fail = None, DeadlineExceeded(1.0, 0, "timeout")
    with streamed(running(stream_start=FOREVER), path) as (response, _):
        assert (response.status_code, response.headers["content-type"]) == (504, "application/json")


def last_error(path, text):
    """Return the message of the error that ends a stream, which must be an event of this API."""
    if path.startswith("/api"):
        return json.loads(text.splitlines()[-1])["error"]
    *_, last, end = [event for event in text.split("\n\n") if event and event != COMMENT.strip()]
    if path in ("/v1/completions", "/v1/chat/completions"):
        assert end == "data: [DONE]"
        return json.loads(last.removeprefix("data: "))["error"]["message"]
    name, data = end.split("\n")
    assert name == "event: error"
    body = json.loads(data.removeprefix("data: "))
    assert body["type"] == "error"
    return body["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
def test_error_after_the_start_of_a_stream_is_an_event(running, engine, path):
    engine.fail = DeadlineExceeded(1.0, 0, "timeout")
    with streamed(running(**SOON), path) as (response, stream):
        stream.until(keep_alive(path))
        engine.was_cancelled.set()
        assert last_error(path, stream.rest()) == str(engine.fail)
    assert response.status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"])
def test_stream_is_kept_alive_while_a_call_is_held_back(running, engine, path):
    engine.script, engine.chat_template, engine.hold_after = CALL, templates.HERMES, CALL.index("Bonn")
    tools = {"/v1/messages": [{"name": "weather", "input_schema": {}}], "/v1/responses": [FLAT]}.get(path, [WEATHER])
    more = {"max_tokens": 200} if path == "/v1/messages" else {}
    with streamed(running(stream_start=FOREVER, keep_alive=0.02), path, tools=tools, **more) as (_, stream):
        assert engine.held.wait(PATIENCE)
        held = stream.until(lambda text: text.endswith(keep_alive(path) * 3))
        engine.was_cancelled.set()
        text = stream.rest()
    assert ("weather" in held) == (path != "/api/chat")  # whose arguments are an object
    assert "weather" in text


@pytest.mark.parametrize("path", BODIES)
def test_progress_is_sent_only_if_requested(running, engine, path):
    engine.computed = 2
    with streamed(running(**SOON), path, stream_options={"include_progress": True}) as (_, stream):
        assert engine.held.wait(PATIENCE)
        progress = f": progress 2/{len(engine.seen[0].prompt)}\n\n"
        ends = {"/v1/messages": progress + PING, "/api/chat": empty_piece(path), "/api/generate": empty_piece(path)}
        stream.until(lambda text: text.endswith(ends.get(path, progress) * 2))
        engine.computed = None
        stream.until(lambda text: text.endswith(keep_alive(path)))


@pytest.mark.parametrize("path", BODIES)
def test_client_that_leaves_a_waiting_stream_cancels_its_request(running, engine, path):
    with streamed(running(**SOON), path) as (_, stream):
        stream.until(keep_alive(path))
    assert engine.was_cancelled.wait(PATIENCE)
    assert engine.cancelled == [0]


class SlowSubmission(FakeEngine):
    """Engine that refuses a constraint after `compiled` is set."""

    def __init__(self):
        super().__init__()
        self.compiled = threading.Event()

    def submit(self, generation, on_event):
        assert self.compiled.wait(PATIENCE)
        raise ConstraintError("too large")


def test_constraint_refused_after_the_start_is_an_event_and_counted():
    engine = SlowSubmission()
    engine.start()
    with started(engine, engine.stop) as start:
        server = start(**SOON)
        with streamed(server, "/v1/completions", guided_regex="a") as (_, stream):
            stream.until(COMMENT)
            engine.compiled.set()
            assert last_error("/v1/completions", stream.rest()) == "too large"
        counted = httpx.get(f"{server.url}/metrics").text
    assert 'headwater_requests_total{endpoint="completion",outcome="failed"} 1.0' in counted


def test_long_prefills_are_listed_for_the_live_page(running, engine):
    engine.computed = 2
    server = running(**SOON)
    with streamed(server, "/v1/chat/completions") as (response, stream):
        stream.until(COMMENT)
        (prefill,) = httpx.get(f"{server.url}/cache").json()["prefills"]
        assert prefill.pop("total_seconds") >= 0.02
        prompt = len(engine.seen[0].prompt)
        request = {"request_id": response.headers["x-request-id"], "endpoint": "chat"}
        assert prefill == {**request, "computed_tokens": 2, "prompt_tokens": prompt}
        engine.computed = prompt
        assert httpx.get(f"{server.url}/cache").json()["prefills"] == []
        engine.computed = 2
        engine.was_cancelled.set()
        stream.rest()
    assert httpx.get(f"{server.url}/cache").json()["prefills"] == []
