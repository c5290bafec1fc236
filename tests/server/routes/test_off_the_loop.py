"""Slow work is done on other threads: one large request must not delay the tokens of others."""

import threading

import pytest

from headwater.server.answer.dialect import Dialect
from headwater.server.prompt.chat import ChatPrompter
from headwater.server.requests import body, chat
from headwater.server.routes import tokens
from headwater.server.routes.service import Service
from tests.server.client import error, send

HELLO = [{"role": "user", "content": "hello"}]


def watched(monkeypatch, owner, name):
    """Return a list to which each call of the function adds its thread."""
    threads, call = [], getattr(owner, name)

    def noting(*args, **named):
        threads.append(threading.current_thread())
        return call(*args, **named)

    monkeypatch.setattr(owner, name, noting)
    return threads


@pytest.mark.parametrize(("owner", "name"), [(ChatPrompter, "prepare"), (Dialect, "shaped")])
def test_prompts_and_grammars_are_made_on_another_thread(engine, monkeypatch, owner, name):
    threads = watched(monkeypatch, owner, name)
    assert send(engine, "POST", "/v1/chat/completions", json={"messages": HELLO}).status_code == 200
    assert threads
    assert threading.main_thread() not in threads


@pytest.mark.parametrize(("owner", "path"), [(tokens, "/tokenize"), (chat, "/v1/chat/completions")])
def test_conversations_are_shaped_on_another_thread(engine, monkeypatch, owner, path):
    threads = watched(monkeypatch, owner, "conversation_of")
    assert send(engine, "POST", path, json={"messages": HELLO}).status_code == 200
    assert threads
    assert threading.main_thread() not in threads


@pytest.mark.parametrize("size", [10, body.MAX_LOOP_BYTES + 1])
def test_large_bodies_are_parsed_on_another_thread(engine, monkeypatch, size):
    threads = watched(monkeypatch, body, "parse")
    send(engine, "POST", "/tokenize", json={"prompt": "x" * size})
    assert (threading.main_thread() in threads) == (size < body.MAX_LOOP_BYTES)


def test_too_many_prompts_are_refused_before_they_are_tokenised(engine, monkeypatch):
    threads = watched(monkeypatch, Service, "completion")
    told = error(send(engine, "POST", "/v1/completions", json={"prompt": ["a"] * 10_000}))
    assert told["param"] == "n"
    assert "10,000 answers" in told["message"]
    assert not threads
