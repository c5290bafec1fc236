"""Texts that are stored as segments before a prompt holds them."""

import pytest

from headwater.config import ServeConfig
from headwater.errors import EngineStopped, QueueFull
from tests.server.client import error, send, send_all
from tests.server.prompt.segmented import SEP, TOKENIZERS, user

PATH, DOCUMENT = "/cache/segments", "a document of some length"


def test_each_text_is_stored_once(engine):
    body = {"texts": [DOCUMENT, "short", DOCUMENT]}
    told = send(engine, "POST", PATH, json=body).json()
    outcomes = [(one["index"], one["tokens"], one["outcome"]) for one in told["data"]]
    assert outcomes == [(0, len(DOCUMENT), "stored"), (1, 5, "too_short"), (2, len(DOCUMENT), "held")]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": f"sys{SEP}{DOCUMENT}{SEP}ask"}),
        ("/v1/completions", {"prompt": f"{SEP}{DOCUMENT}{SEP}"}),  # a way to store it without this route
        ("/v1/chat/completions", {"messages": [user([{"type": "text", "text": DOCUMENT, "segment": True}])]}),
    ],
)
def test_stored_segments_have_the_tokens_that_prompts_have(engine, tokenizer, path, body):
    engine.tokenizer = tokenizer()
    send_all(engine, [("POST", PATH, {"json": {"texts": [DOCUMENT]}}), ("POST", path, {"json": body})])
    ((_, stored),) = engine.segments
    (span,) = engine.seen[0].segments
    assert engine.seen[0].prompt[span.start : span.end] == stored


def test_text_that_holds_the_separator_is_one_segment(engine):
    engine.tokenizer = TOKENIZERS[1]()
    told = send(engine, "POST", PATH, json={"texts": [f"{DOCUMENT}{SEP}{DOCUMENT}"]}).json()
    ((_, stored),) = engine.segments
    assert stored.count(engine.tokenizer.token_to_id(SEP)) == 1
    assert told["data"][0]["tokens"] == 1 + 2 * len(DOCUMENT) + len(SEP)


def test_namespaces_store_for_themselves(engine):
    bodies = [{"texts": [DOCUMENT], "cache_salt": salt} for salt in ("mine", "theirs", None)]
    answers = send_all(engine, [("POST", PATH, {"json": body}) for body in bodies])
    assert {answer.json()["data"][0]["outcome"] for answer in answers} == {"stored"}
    assert [namespace for namespace, _ in engine.segments] == ["mine", "theirs", ""]


class WithoutSegments:
    """Engine that has only the methods that every server needs."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        if name == "warm_segments":
            raise AttributeError(name)
        return getattr(self._engine, name)


def test_warming_without_segment_storage_returns_501(engine):
    answer = send(WithoutSegments(engine), "POST", PATH, json={"texts": ["a"]})
    assert "stores no segments" in error(answer, 501)["message"]


def test_key_is_needed(engine):
    config = ServeConfig(api_key="klüch-7")
    assert error(send(engine, "POST", PATH, config, json={"texts": [DOCUMENT]}), 401)["code"] == "invalid_api_key"
    assert engine.segments == {}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "texts"),
        ({"texts": []}, "at least 1"),
        ({"texts": [""]}, "texts.0"),
        ({"texts": ["a"] * 1025}, "1024"),
        ({"texts": "a"}, "texts"),
        ({"texts": [1]}, "texts.0"),
        ({"texts": ["a", "b" * 5000]}, "text 1 has 5,000 tokens, the server takes 4,096"),
        ({"texts": ["a"], "cache_salt": "s" * 1025}, "cache_salt"),
    ],
)
def test_bad_requests_are_refused(engine, body, said):
    assert said in error(send(engine, "POST", PATH, json=body))["message"]
    assert engine.segments == {}


@pytest.mark.parametrize("raised", [QueueFull(4, 4, 3), EngineStopped("the engine has stopped")])
def test_warming_refused_by_the_engine_returns_503_with_retry_after(engine, monkeypatch, raised):
    def refuse(self, segments, namespace):
        raise raised

    monkeypatch.setattr(type(engine), "warm_segments", refuse)
    response = send(engine, "POST", PATH, json={"texts": [DOCUMENT]})
    error(response, 503)
    assert "retry-after" in response.headers
