"""Errors of /v1/messages and /v1/messages/count_tokens, the key in either header, and HEAD."""

from __future__ import annotations

import pytest

from headwater.config import ServeConfig
from headwater.errors import EngineStopped, QueueFull
from tests.server.client import send, send_all
from tests.server.routes.test_anthropic import COUNT, HELLO, MARK, MESSAGES, ask, events_of


def error_of(response, status=400):
    """Return the error, which must be in Anthropic's form."""
    assert response.status_code == status, response.text[:2000]
    body = response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert {"type", "message", "param"} <= set(body["error"])
    return body["error"]


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", ["at least 1"]),
        ({"messages": [{"role": "alien", "content": "x"}]}, "messages.0.role", ["'alien'", "'assistant'"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages",
            ["'image'", "'text'"],
        ),
        ({"system": [{"type": "text", "text": "a", **MARK}] * 5}, "messages", ["5", "4"]),
        ({"tools": [{"name": "a"}]}, "tools.0", ["input_schema"]),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name", ["a b"]),
        ({"temperature": 3}, "temperature", ["3", "2"]),
    ],
)
def test_invalid_request_is_refused_in_anthropics_form(engine, path, fields, param, words):
    refused = error_of(send(engine, "POST", path, json={"messages": HELLO, "max_tokens": 9, **fields}))
    assert (refused["type"], refused["param"]) == ("invalid_request_error", param)
    assert all(word in refused["message"] for word in words), refused["message"]


def test_prompt_too_long_error_has_the_wording_clients_parse(engine):
    engine.max_model_len = 64
    refused = error_of(ask(engine, system="word " * 100))
    assert refused["message"].startswith("prompt is too long: prompt has ")
    assert refused["details"] == {"error_code": "context_length_exceeded"}


def test_two_constraints_are_refused_by_the_names_that_the_client_wrote(engine):
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    refused = error_of(ask(engine, output_config={"format": schema}, guided_regex="a"))
    assert refused["param"] == "output_config.format"
    assert "guided_regex" in refused["message"]


def test_without_its_greatest_length_a_message_is_refused(engine):
    refused = error_of(send(engine, "POST", MESSAGES, json={"messages": HELLO}))
    assert refused["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("method", "path", "kwargs", "status", "kind"),
    [
        ("POST", MESSAGES, {"content": b"{oops"}, 400, "invalid_request_error"),
        ("POST", MESSAGES, {"content": b"{}", "headers": {"content-type": "text/plain"}}, 415, "invalid_request_error"),
        ("GET", MESSAGES, {}, 405, "invalid_request_error"),
        ("POST", f"{MESSAGES}/batches", {"json": {}}, 404, "not_found_error"),
        ("GET", f"{MESSAGES}/nowhere", {}, 404, "not_found_error"),
    ],
)
def test_errors_of_http_have_anthropics_types(engine, method, path, kwargs, status, kind):
    assert error_of(send(engine, method, path, **kwargs), status)["type"] == kind


@pytest.mark.parametrize("stream", [False, True])
def test_full_queue_is_an_overload(engine, stream):
    engine.fail = QueueFull(100, 100, 3)
    response = ask(engine, stream=stream)
    refused = error_of(response, 503)
    assert (refused["type"], refused["details"]) == ("overloaded_error", {"error_code": "queue_full"})
    assert response.headers["retry-after"] == "3"


def test_failure_in_a_stream_is_its_last_event(engine):
    engine.fail, engine.fail_after = EngineStopped("the engine has stopped"), 1
    last = events_of(ask(engine, stream=True))[-1]
    assert last["type"] == "error"
    assert (last["error"]["type"], last["error"]["message"]) == ("overloaded_error", "the engine has stopped")


@pytest.mark.parametrize("headers", [{"x-api-key": "key"}, {"authorization": "Bearer key"}])
def test_key_comes_in_either_header(engine, headers):
    config = ServeConfig(api_key="key")
    sent = {"messages": HELLO, "max_tokens": 3}
    assert send(engine, "POST", MESSAGES, config, json=sent, headers=headers).status_code == 200
    wrong = {name: value + "s" for name, value in headers.items()}
    for refused in ({}, wrong):
        response = send(engine, "POST", MESSAGES, config, json=sent, headers=refused)
        assert error_of(response, 401)["type"] == "authentication_error"


@pytest.mark.parametrize("path", ["/", "/metrics", "/health"])
def test_head_and_get_are_answered_alike_and_only_health_without_a_key(engine, path):
    key = {"x-api-key": "key"}
    tried = [(method, path, {"headers": headers}) for method in ("GET", "HEAD") for headers in (key, {})]
    get, get_without, head, head_without = send_all(engine, tried, ServeConfig(api_key="key"))
    assert (get.status_code, head.status_code) == (200, 200)
    assert head.headers["content-type"] == get.headers["content-type"]
    without = 200 if path == "/health" else 401
    assert (get_without.status_code, head_without.status_code) == (without, without)
