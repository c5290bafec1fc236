"""Several models in one process: a request's `model` chooses the engine that answers."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headwater.config import ServeConfig
from headwater.server.app import create_app
from tests.server.client import error, send_to
from tests.server.fake_engine import FakeEngine

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def engines():
    found = [FakeEngine(script=f"I am {name}.", model_name=name, max_model_len=n) for name, n in (("a", 999), ("b", 1))]
    found[1].max_model_len = 2_000
    for engine in found:
        engine.start()
    yield found
    for engine in found:
        engine.stop()


@pytest.fixture
def app(engines):
    config = ServeConfig()
    return create_app(engines[0], config, (engines[1], config))


def chat(model=None, path=CHAT, **more):
    named = {} if model is None else {"model": model}
    return ("POST", path, {"json": {**named, "messages": USER, **more}})


def test_model_of_a_request_chooses_the_engine(app, engines):
    answers = send_to(app, [chat("a"), chat("b"), chat(), chat("b:latest")])
    assert [one.json()["model"] for one in answers] == ["a", "b", "a", "b"]
    texts = [one.json()["choices"][0]["message"]["content"] for one in answers]
    assert texts == ["I am a.", "I am b.", "I am a.", "I am b."]
    assert [len(engine.seen) for engine in engines] == [2, 2]


@pytest.mark.parametrize(
    ("path", "more", "shown"),
    [
        ("/v1/completions", {"prompt": "Hello"}, "I am b."),
        ("/v1/responses", {"input": "Hello"}, "I am b."),
        ("/v1/messages", {"messages": USER, "max_tokens": 99}, "I am b."),
        ("/api/chat", {"messages": USER, "stream": False}, "I am b."),
        ("/api/generate", {"prompt": "Hello", "stream": False}, "I am b."),
        ("/api/show", {}, "FROM b"),
        ("/tokenize", {"prompt": "Hello"}, '"max_model_len":2000'),
        ("/v1/messages/count_tokens", {"messages": USER}, "input_tokens"),
    ],
)
def test_every_api_finds_the_model_and_refuses_an_unknown_one(app, path, more, shown):
    known, unknown = send_to(app, [("POST", path, {"json": {"model": name, **more}}) for name in ("b", "c")])
    assert known.status_code == 200
    assert shown in known.text
    assert unknown.status_code == 404
    assert "model 'c' is not served here; the models are 'a', 'b'" in unknown.text


def test_unknown_model_is_an_error_in_the_form_of_openai(app):
    refused = error(send_to(app, [chat("c")])[0], 404)
    assert (refused["type"], refused["param"], refused["code"]) == ("invalid_request_error", "model", "model_not_found")


def test_lists_have_every_model(app):
    listed, tags, running, one, absent = send_to(
        app, [("GET", path, {}) for path in ("/v1/models", "/api/tags", "/api/ps", "/v1/models/b", "/v1/models/c")]
    )
    assert [(one["id"], one["max_model_len"]) for one in listed.json()["data"]] == [("a", 999), ("b", 2_000)]
    assert [one["name"] for one in tags.json()["models"]] == ["a", "b"]
    assert [one["context_length"] for one in running.json()["models"]] == [999, 2_000]
    assert one.json()["id"] == "b"
    assert error(absent, 404)["code"] == "model_not_found"


def test_metrics_cache_and_logs_tell_models_apart(app, caplog):
    caplog.set_level("INFO", "headwater.request")
    *_, metrics, first, second = send_to(
        app,
        [chat("b"), chat("b"), chat("a"), *(("GET", path, {}) for path in ("/metrics", "/cache", "/cache?model=b"))],
    )
    samples = {}
    for family in text_string_to_metric_families(metrics.text):
        samples |= {
            (one.name, one.labels.get("model"), one.labels.get("endpoint")): one.value for one in family.samples
        }
    assert samples["headwater_prompt_length_tokens_count", "a", None] == 1
    assert samples["headwater_prompt_length_tokens_count", "b", None] == 2
    assert samples["process_open_fds", None, None] > 0
    assert [one.json()["since_start"]["prompts"] for one in (first, second)] == [1, 2]
    assert "model=b" in caplog.text


def test_health_is_that_of_all_models(app, engines):
    engines[1].refuse_new()
    whole, ready, live = send_to(app, [("GET", f"/health{path}", {}) for path in ("", "/ready", "/live")])
    assert (whole.status_code, ready.status_code, live.status_code) == (503, 503, 200)
    assert whole.json()["models"] == {"a": "ok", "b": "draining"}


def test_one_model_answers_any_name():
    engine = FakeEngine()
    engine.start()
    (answer,) = send_to(create_app(engine, ServeConfig()), [chat("anything")])
    engine.stop()
    assert answer.json()["model"] == "fake"


def test_lists_have_states_of_weights_and_bytes_of_caches(app, engines, monkeypatch):
    health = engines[1].health() | {"loaded": False, "unloads_at": None}
    monkeypatch.setattr(engines[1], "health", lambda: health)
    *_, listed, running = send_to(
        app,
        [
            chat("b", messages=[{"role": "user", "content": "word " * 64}]),
            ("GET", "/v1/models", {}),
            ("GET", "/api/ps", {}),
        ],
    )
    for models in (listed.json()["data"], running.json()["models"]):
        assert [one["state"] for one in models] == ["loaded", "unloaded"]
        assert [one["cache_bytes"] for one in models] == [0, 5 * 1024]
    assert [one["size"] for one in running.json()["models"]] == [2_400_000, 0]
