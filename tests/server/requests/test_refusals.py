"""Invalid requests: each is refused in OpenAI's form, and none gives a 500 or ends the server."""

from __future__ import annotations

import asyncio
import json

import pytest

from headwater.config import ServeConfig
from headwater.errors import (
    ConstraintError,
    DeadlineExceeded,
    EngineStopped,
    InvalidLogits,
    OutOfPages,
    QueueFull,
)
from headwater.server.app import create_app
from headwater.server.requests.body import MAX_BYTES, MAX_DEPTH
from tests.server.client import error, send, send_all

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
HUGE = 10**300


def completion(**fields):
    return json.dumps({"prompt": "abc", **fields}).encode()


def chat(**fields):
    return json.dumps({"messages": HELLO, **fields}).encode()


RAW = [  # a path, a body as it is sent, and what its refusal says
    (COMPLETIONS, b"", ["body"]),
    (COMPLETIONS, b"{oops", ["not JSON"]),
    (COMPLETIONS, b"[]", ["dictionary"]),
    (COMPLETIONS, b'"abc"', ["dictionary"]),
    (COMPLETIONS, b"null", ["body"]),
    (COMPLETIONS, b'{"prompt": "\xff\xfe"}', ["not JSON"]),
    (COMPLETIONS, '{"prompt": "abc"}'.encode("utf-16"), ["not JSON", "utf-8"]),
    ("/v1/responses", b'{"input": "abc", "metadata": {"a": "\xed\xa0\x80"}}', ["not JSON", "utf-8"]),  # half a pair
    (COMPLETIONS, b'{"prompt": "abc", "temperature": NaN}', ["NaN"]),
    (COMPLETIONS, b'{"prompt": "abc", "temperature": -Infinity}', ["-Infinity"]),
    (COMPLETIONS, b'{"prompt": "abc", "temperature": 1e999}', ["temperature"]),
    (COMPLETIONS, b'{"prompt": "abc", "max_tokens": ' + b"9" * 5000 + b"}", ["not JSON"]),
    (COMPLETIONS, b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ["deep", str(MAX_DEPTH)]),
    (COMPLETIONS, b'{"prompt": "abc", "x": ' + b"[" * 100 + b"]" * 100 + b"}", ["deep", str(MAX_DEPTH)]),
    (COMPLETIONS, b'{"a":' * 100_000 + b"1" + b"}" * 100_000, ["deep", str(MAX_DEPTH)]),
    (CHAT, b'{"messages": ' + b"[" * 500 + b"]" * 500 + b"}", ["deep", str(MAX_DEPTH)]),
    (COMPLETIONS, completion(prompt=None), ["prompt"]),
    (COMPLETIONS, completion(prompt=""), ["0", "1"]),
    (COMPLETIONS, completion(prompt=[""]), ["0", "1"]),
    (COMPLETIONS, completion(prompt=["a", 1]), ["prompt"]),
    (COMPLETIONS, completion(prompt=[[]]), ["prompt"]),
    (COMPLETIONS, completion(prompt=[True]), ["prompt"]),
    (COMPLETIONS, completion(prompt=[-1]), ["prompt"]),
    (COMPLETIONS, completion(prompt=[258]), ["258"]),
    (COMPLETIONS, completion(prompt=[HUGE]), ["258"]),
    (COMPLETIONS, completion(prompt=[1.5] * 100_000), ["prompt"]),
    (COMPLETIONS, completion(prompt="x" * 5000), ["5,000", "4,096"]),
    (COMPLETIONS, completion(prompt=[1] * 5000), ["5,000", "4,096"]),
    (COMPLETIONS, completion(prompt=["a"] * 300), ["300", "272"]),
    (COMPLETIONS, completion(prompt=["a"] * 3, n=100), ["300", "272"]),
    (COMPLETIONS, completion(n=129), ["129", "128"]),
    (COMPLETIONS, completion(n=0), ["0", "1"]),
    (COMPLETIONS, completion(n=2, best_of=3), ["2", "3"]),
    (COMPLETIONS, completion(best_of=5), ["5", "1"]),
    (COMPLETIONS, completion(max_tokens=0), ["0", "1"]),
    (COMPLETIONS, completion(max_tokens=10**9), ["1,000,000,000", "4,096"]),
    (COMPLETIONS, completion(max_tokens=HUGE), ["max_tokens", "2147483647"]),
    (COMPLETIONS, completion(max_tokens="5"), ["max_tokens", "'5'"]),
    (COMPLETIONS, completion(max_tokens=True), ["max_tokens", "True"]),
    (COMPLETIONS, completion(max_tokens=1.5), ["max_tokens", "1.5"]),
    (COMPLETIONS, completion(temperature=HUGE), ["temperature", "2"]),
    (COMPLETIONS, completion(temperature="hot"), ["temperature", "hot"]),
    (COMPLETIONS, completion(presence_penalty=-2.5), ["-2.5", "-2"]),
    (COMPLETIONS, completion(frequency_penalty=3), ["3", "2"]),
    (COMPLETIONS, completion(repetition_penalty=0), ["0"]),
    (COMPLETIONS, completion(repetition_penalty=1e-38), ["1e-38", "0.01"]),
    (COMPLETIONS, completion(repetition_penalty=1e-45), ["1e-45", "0.01"]),
    (COMPLETIONS, completion(repetition_penalty=2.5), ["2.5", "2"]),
    (COMPLETIONS, completion(logit_bias={"1": 101}), ["101", "100"]),
    (COMPLETIONS, completion(logit_bias={"258": 1}), ["258"]),
    (COMPLETIONS, completion(logit_bias={"-1": 1}), ["-1", "token ids"]),
    (COMPLETIONS, completion(logit_bias={"²": 1}), ["token ids"]),
    (COMPLETIONS, completion(logit_bias={"9" * 400: 1}), ["token ids"]),
    (COMPLETIONS, completion(logit_bias={"cat": 1}), ["cat"]),
    (COMPLETIONS, completion(logit_bias={"1": "x"}), ["logit_bias"]),
    (COMPLETIONS, completion(logit_bias={"long" * 1000: "x"}), ["logit_bias.longlong"]),
    (COMPLETIONS, completion(logit_bias=[1]), ["logit_bias"]),
    (COMPLETIONS, completion(logit_bias={str(i): 1 for i in range(5000)}), ["5,000", "1,024"]),
    (COMPLETIONS, completion(stop=["x"] * 1000), ["64", "1000"]),
    (COMPLETIONS, completion(stop="x" * 1_000_000), ["1,000,000", "8,192"]),
    (COMPLETIONS, completion(stop=["x" * 9_000, "y"]), ["9,001", "8,192"]),
    (COMPLETIONS, completion(stop={"a": 1}), ["stop"]),
    (COMPLETIONS, completion(stop_token_ids=[258]), ["258"]),
    (COMPLETIONS, completion(stop_token_ids=[-1]), ["stop_token_ids", "-1", "0"]),
    (COMPLETIONS, completion(stop_token_ids=[1] * 100), ["64", "100"]),
    (COMPLETIONS, completion(seed=2**63), [str(2**63)]),
    (COMPLETIONS, completion(timeout=0), ["timeout", "0"]),
    (COMPLETIONS, completion(cache_salt="x" * 2000), ["cache_salt", "1024"]),
    (COMPLETIONS, completion(cache_salt=7), ["cache_salt", "7"]),
    (COMPLETIONS, completion(stream="yes"), ["stream", "yes"]),
    (COMPLETIONS, completion(stream_options=3), ["stream_options"]),
    (COMPLETIONS, completion(echo=True, max_tokens=0), ["0", "1", "logprobs"]),
    (COMPLETIONS, completion(logprobs=1, max_tokens=0), ["0", "1", "echo"]),
    (COMPLETIONS, completion(response_format={"type": "json_object"}), ["response_format", "json_object"]),
    (COMPLETIONS, completion(suffix="end"), ["suffix", "end"]),
    (COMPLETIONS, completion(prompt_logprobs=21), ["prompt_logprobs", "21", "20"]),
    (COMPLETIONS, completion(use_beam_search=True), ["use_beam_search", "True", "False"]),
    (COMPLETIONS, completion(guided_regex="a+", grammar="b"), ["guided_regex", "grammar"]),
    (COMPLETIONS, completion(grammar="b"), ["GBNF"]),
    (CHAT, chat(messages=[]), ["messages", "1"]),
    (CHAT, chat(messages="hello"), ["messages"]),
    (CHAT, chat(messages=[3] * 100_000), ["messages"]),
    (CHAT, chat(messages=[{"role": "user", "content": 5}]), ["content"]),
    (CHAT, chat(messages=[{"role": "user", "content": [5]}]), ["content"]),
    (CHAT, chat(messages=[{"role": "user", "content": "x" * 5000}]), ["4,096"]),
    (CHAT, chat(messages=[{"role": "alien", "content": "x"}]), ["messages.0.role", "alien", "'assistant'"]),
    (CHAT, chat(max_completion_tokens=-2), ["-2", "-1"]),
    (CHAT, chat(max_completion_tokens=10**9), ["1,000,000,000", "4,096"]),
    (CHAT, chat(audio={"voice": "x"}), ["audio"]),
    (CHAT, chat(functions=[{"name": "f"}]), ["functions"]),
    (CHAT, chat(modalities=["audio"]), ["modalities"]),
    (CHAT, chat(chat_template_kwargs=[1]), ["chat_template_kwargs"]),
    ("/tokenize", b"{}", ["prompt", "messages"]),
    ("/tokenize", b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}', ["prompt", "both given"]),
    ("/tokenize", b'{"messages": [{"content": "a"}]}', ["messages.0.role"]),
    ("/tokenize", b'{"prompt": 5}', ["prompt"]),
    ("/tokenize", b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', ["image_url"]),
    ("/detokenize", b"{}", ["tokens"]),
    ("/detokenize", b'{"tokens": [258]}', ["258"]),
    ("/detokenize", b'{"tokens": [-1]}', ["tokens", "-1", "0"]),
    ("/detokenize", b'{"tokens": ["1"]}', ["tokens"]),
]


OF_THE_BODY = ("body", "not JSON", "dictionary", "NaN", "-Infinity", "deep")


@pytest.mark.parametrize(("path", "content", "words"), RAW, ids=lambda value: str(value)[:60])
def test_malformed_body_returns_400_and_server_keeps_serving(engine, path, content, words):
    bad = ("POST", path, {"content": content, "headers": {"content-type": "application/json"}})
    ordinary = ("POST", COMPLETIONS, {"json": {"prompt": "abc", "max_tokens": 100}})
    refused, answered = send_all(engine, [bad, ordinary])
    told = error(refused)
    assert told["type"] == "invalid_request_error"
    assert (told["param"] is None) == (words[0] in OF_THE_BODY)  # every other refusal names its field
    assert all(word in told["message"] for word in words), told["message"]
    assert len(told["message"]) < 1000
    assert refused.headers["x-request-id"]
    assert answered.json()["choices"][0]["text"] == engine.script
    assert len(engine.seen) == 1  # no refused request reached the engine


def test_byte_order_mark_before_a_body_is_ignored(engine):
    content = b"\xef\xbb\xbf" + completion(max_tokens=2)
    assert send(engine, "POST", COMPLETIONS, content=content).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_body_that_does_not_say_it_is_json_is_refused(engine, kind):
    refused = send(engine, "POST", COMPLETIONS, content=completion(), headers={"content-type": kind})
    assert "application/json" in error(refused, 415)["message"]


@pytest.mark.parametrize(
    "kind", [None, "application/json; charset=utf-8", "application/vnd.api+json", "Application/JSON"]
)
def test_body_is_read_if_content_type_is_json_or_absent(engine, kind):
    headers = {} if kind is None else {"content-type": kind}
    assert send(engine, "POST", COMPLETIONS, content=completion(), headers=headers).status_code == 200


def test_body_with_excessive_content_length_is_refused_unread(engine):
    asked = []

    async def receive():
        asked.append(True)
        return {"type": "http.request", "body": b"x", "more_body": True}

    status, body = asyncio.run(raw_post(engine, receive, [(b"content-length", str(MAX_BYTES + 1).encode())]))
    assert status == 413
    assert f"{MAX_BYTES + 1:,}" in body
    assert f"{MAX_BYTES:,}" in body
    assert not asked


def test_body_without_content_length_is_refused_while_it_is_read(engine, monkeypatch):
    monkeypatch.setattr("headwater.server.requests.body.MAX_BYTES", 1000)
    asked = []

    async def receive():
        asked.append(True)
        return {"type": "http.request", "body": b"x" * 300, "more_body": True}

    status, body = asyncio.run(raw_post(engine, receive, []))
    assert status == 413
    assert "1,200" in body
    assert "1,000" in body
    assert len(asked) == 4


async def raw_post(engine, receive, headers):
    """Return status and body of the answer to a POST whose body comes from `receive`."""
    sent = []

    async def send_message(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": COMPLETIONS,
        "raw_path": COMPLETIONS.encode(),
        "query_string": b"",
    }
    scope |= {"headers": headers, "http_version": "1.1", "scheme": "http", "server": ("test", 80), "client": None}
    await create_app(engine, ServeConfig())(scope, receive, send_message)
    assert (b"connection", b"close") in sent[0]["headers"]
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:]).decode()


@pytest.mark.parametrize(
    ("failure", "status", "code", "headers"),
    [
        (QueueFull(300, 256, 7), 503, "queue_full", {"retry-after": "7"}),
        (EngineStopped("stopping"), 503, "engine_stopped", {"retry-after": "5"}),
        (OutOfPages(9, 1, 2), 503, "out_of_memory", {"retry-after": "5"}),
        (DeadlineExceeded(1.5, 20), 504, "deadline_exceeded", {"x-should-retry": "false"}),
        (ConstraintError("no such type"), 400, "invalid_constraint", {}),
        (InvalidLogits("NaN"), 500, "internal_error", {}),
        (ZeroDivisionError("secret"), 500, "internal_error", {}),
    ],
)
def test_engine_errors_map_to_their_status_and_retry_after(engine, failure, status, code, headers):
    engine.fail = failure
    response = send(engine, "POST", COMPLETIONS, json={"prompt": "abc"})
    assert error(response, status)["code"] == code
    assert headers.items() <= response.headers.items()


def test_server_error_tells_the_requests_id_and_logs_it(engine, caplog):
    engine.fail = ZeroDivisionError("secret")
    response = send(engine, "POST", COMPLETIONS, json={"prompt": "abc"}, headers={"x-request-id": "mine-1"})
    told = error(response, 500)["message"]
    assert response.headers["x-request-id"] == "mine-1"
    assert "mine-1" in told
    assert "secret" not in told
    assert any("mine-1" in record.getMessage() for record in caplog.records if record.levelname == "ERROR")


def test_failure_outside_the_engine_returns_500_with_request_id(engine):
    engine.submit = None
    response = send(engine, "POST", COMPLETIONS, json={"prompt": "abc"})
    assert response.headers["x-request-id"] in error(response, 500)["message"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/audio/speech", "/v1/images/generations", "/v1/moderations"])
def test_endpoints_of_other_servers_return_404_with_alternatives(engine, path):
    told = error(send(engine, "POST", path, json={"input": "abc", "model": "m"}), 404)["message"]
    assert "generates text" in told
    assert "/v1/chat/completions" in told
    assert path in told


def test_other_methods_and_paths_are_refused_in_the_same_form(engine):
    wrong = send(engine, "PUT", COMPLETIONS, json={})
    assert "PUT" in error(wrong, 405)["message"]
    assert wrong.headers["allow"] == "POST"
    assert "/nowhere" in error(send(engine, "GET", "/nowhere"), 404)["message"]
    assert send(engine, "HEAD", "/health").status_code == 200
    assert send(engine, "OPTIONS", COMPLETIONS).status_code == 405


def test_request_id_is_the_clients_if_sane_or_generated(engine):
    given = send(engine, "GET", "/v1/models", headers={"x-request-id": "abc-123"})
    assert given.headers["x-request-id"] == "abc-123"
    for insane in ("x" * 1000, "a b\tc", ""):
        made = send(engine, "GET", "/nowhere", headers={"x-request-id": insane}).headers["x-request-id"]
        assert made
        assert made != insane
