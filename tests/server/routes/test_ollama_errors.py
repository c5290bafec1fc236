"""Errors of Ollama's API in its form, and the endpoints that change models, which are refused."""

import logging

import pytest

from headwater.config import ServeConfig
from headwater.errors import ConstraintError, EngineStopped, QueueFull
from tests.server.client import send, send_all
from tests.server.http.test_access import hosted
from tests.server.routes.test_ollama import CHAT, GENERATE, HELLO, ask, error_of, objects


@pytest.mark.parametrize(
    ("method", "path", "kwargs", "status"),
    [
        ("POST", CHAT, {"content": b"{oops"}, 400),
        ("POST", CHAT, {"content": b"{}", "headers": {"content-type": "text/plain"}}, 415),
        ("GET", CHAT, {}, 405),
        ("GET", "/api/nowhere", {}, 404),
    ],
)
def test_errors_of_http_have_ollamas_form(engine, method, path, kwargs, status):
    error_of(send(engine, method, path, **kwargs), status)


def test_prompt_that_is_too_long_is_refused_with_its_numbers(engine):
    engine.max_model_len = 64
    assert "64" in error_of(ask(engine, messages=[{"role": "user", "content": "word " * 100}]))


def test_error_that_does_not_name_its_field_begins_with_it(engine):
    engine.fail = ConstraintError("no such type", "format")
    assert error_of(ask(engine)) == "format: no such type"


@pytest.mark.parametrize("stream", [False, True])
def test_full_queue_returns_503_with_retry_after(engine, stream):
    engine.fail = QueueFull(100, 100, 3)
    response = ask(engine, stream=stream)
    assert "100" in error_of(response, 503)
    assert response.headers["retry-after"] == "3"


def test_failure_in_a_stream_is_its_last_line(engine):
    engine.fail, engine.fail_after = EngineStopped("the engine has stopped"), 1
    assert objects(ask(engine, stream=True))[-1] == {"error": "the engine has stopped"}


@pytest.mark.parametrize(("method", "path"), [("POST", CHAT), ("GET", "/api/tags"), ("GET", "/api/version")])
def test_with_a_key_every_path_needs_it(engine, method, path):
    config = ServeConfig(api_key="key")
    body = {"json": {"messages": HELLO}} if method == "POST" else {}
    allowed = {"headers": {"authorization": "Bearer key"}}
    refused, taken = send_all(engine, [(method, path, body), (method, path, body | allowed)], config)
    assert "API key" in error_of(refused, 401)
    assert taken.status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "/api/embed", "no embeddings"),
        ("POST", "/api/embeddings", "no embeddings"),
        ("POST", "/api/pull", "headwater serve MODEL"),
        ("POST", "/api/push", "headwater serve MODEL"),
        ("POST", "/api/create", "headwater serve MODEL"),
        ("DELETE", "/api/delete", "headwater serve MODEL"),
        ("POST", "/api/copy", "headwater serve MODEL"),
        ("POST", "/api/blobs/sha256:0", "headwater serve MODEL"),
    ],
)
def test_absent_ollama_endpoint_returns_404_with_the_reason(engine, method, path, words):
    assert words in error_of(send(engine, method, path, json={"model": "x"}), 404)


def test_another_models_name_is_answered_and_logged_once(engine, caplog):
    with caplog.at_level(logging.WARNING, "headwater.server"):
        asked = [("POST", CHAT, {"json": {"model": "llama", "messages": HELLO}})] * 2
        asked += [("POST", "/api/show", {"json": {"model": "llama"}}), ("POST", GENERATE, {"json": {"model": "llama"}})]
        answers = send_all(engine, asked)
    assert {answer.status_code for answer in answers} == {200}
    assert [record.getMessage().count("llama") for record in caplog.records] == [1]


def test_page_of_another_name_is_refused_in_ollamas_form(engine):
    assert "allowed-hosts" in error_of(hosted(engine, "evil.example:11434", path="/api/tags"), 403)
    assert hosted(engine, "localhost:11434", path="/api/tags").status_code == 200


def test_requests_are_counted_by_their_endpoint(engine):
    asked = [("POST", path, {"json": {"messages": HELLO, "prompt": "hello"}}) for path in (CHAT, GENERATE, "/api/pull")]
    page = send_all(engine, [*asked, ("GET", "/metrics", {})])[-1].text
    for endpoint, outcome in (("ollama_chat", "ok"), ("ollama_generate", "ok"), ("other", "refused")):
        assert f'headwater_requests_total{{endpoint="{endpoint}",outcome="{outcome}"}} 1.0' in page
