"""Tokens of texts and conversations, as in the endpoints that generate, and back."""

from __future__ import annotations

from headwater.server.prompt.encoding import PromptEncoder
from tests.server.client import error, send

HELLO = [{"role": "user", "content": "hello"}]


def tokenize(engine, **body):
    return send(engine, "POST", "/tokenize", json=body).json()


def test_a_text_comes_back_from_its_tokens(engine):
    answer = tokenize(engine, prompt="naïve 🙂")
    assert answer["count"] == len(answer["tokens"]) == len("naïve 🙂".encode())
    assert answer["max_model_len"] == 4096
    assert send(engine, "POST", "/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "naïve 🙂"}


def test_a_conversation_has_the_tokens_that_its_chat_completion_has(engine):
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    answer = tokenize(engine, messages=HELLO, tools=tools, chat_template_kwargs={"enable_thinking": False})
    body = {"messages": HELLO, "tools": tools, "chat_template_kwargs": {"enable_thinking": False}}
    send(engine, "POST", "/v1/chat/completions", json=body)
    assert tuple(answer["tokens"]) == engine.seen[0].prompt


def test_special_tokens_come_back_and_nothing_is_nothing(engine):
    tokens = tokenize(engine, prompt="<|im_start|>a")["tokens"]
    assert len(tokens) == 2
    assert send(engine, "POST", "/detokenize", json={"tokens": tokens}).json() == {"prompt": "<|im_start|>a"}
    assert send(engine, "POST", "/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    assert tokenize(engine, prompt="")["count"] == 0


def test_tokens_can_be_named(engine):
    assert tokenize(engine, prompt="ab", return_token_strs=True)["token_strs"] == ["a", "b"]


def test_a_model_is_found_by_its_name_even_with_slashes(engine):
    engine.model_name = "org/model"
    assert send(engine, "GET", "/v1/models/org/model").json()["id"] == "org/model"
    assert "'org/model'" in error(send(engine, "GET", "/v1/models/gpt"), 404)["message"]


def test_what_is_tokenised_is_kept_for_its_namespace_alone(engine, monkeypatch):
    seen = []
    encode = PromptEncoder.encode

    def watched(self, text, namespace=""):
        seen.append(namespace)
        return encode(self, text, namespace)

    monkeypatch.setattr(PromptEncoder, "encode", watched)
    tokenize(engine, messages=HELLO, cache_salt="tenant")
    tokenize(engine, messages=HELLO)
    assert seen == ["tenant", ""]
