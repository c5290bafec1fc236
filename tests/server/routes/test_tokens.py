"""Tokens of texts and conversations, as in the endpoints that generate, and back."""

from headwater.server.prompt.encoding import PromptEncoder
from headwater.server.routes import service
from tests.server.client import error, send, send_all

HELLO = [{"role": "user", "content": "hello"}]


def tokenize(engine, **body):
    return send(engine, "POST", "/tokenize", json=body).json()


def test_text_comes_back_from_its_tokens(engine):
    answer = tokenize(engine, prompt="naïve 🙂")
    assert answer["count"] == len(answer["tokens"]) == len("naïve 🙂".encode())
    assert answer["max_model_len"] == 4096
    assert send(engine, "POST", "/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "naïve 🙂"}


def test_conversation_has_the_tokens_that_its_chat_completion_has(engine):
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


def test_tokenizer_is_described_as_clients_of_vllm_expect(engine):
    told = send(engine, "GET", "/tokenizer_info").json()
    assert (told["eos_token"], told["bos_token"], told["chat_template"]) == ("<|im_end|>", None, engine.chat_template)
    assert (told["model_max_length"], told["vocab_size"]) == (4096, 258)
    assert told["added_tokens_decoder"]["256"]["content"] == "<|im_start|>"
    assert told["added_tokens_decoder"]["256"]["special"] is True
    assert told["tokenizer_class"]


def test_any_model_name_is_answered_and_logged_once(engine, caplog):
    bodies = [{"prompt": "a", "model": name} for name in ("gpt-4o", "gpt-4o", "fake", None, "other\n")]
    send_all(engine, [("POST", "/v1/completions", {"json": body}) for body in bodies])
    warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and "named model" in r.getMessage()]
    assert [name for name in ("'gpt-4o'", "'other\\n'") if name in " ".join(warned)] == ["'gpt-4o'", "'other\\n'"]
    assert len(warned) == 2


def test_names_of_models_fill_neither_log_nor_memory(engine, caplog, monkeypatch):
    monkeypatch.setattr(service, "MAX_OTHER_NAMES", 3)
    bodies = [{"prompt": "a", "model": f"m{i}"} for i in range(6)]
    send_all(engine, [("POST", "/v1/completions", {"json": body}) for body in bodies])
    assert sum("named" in record.getMessage() for record in caplog.records) == 4  # the last one says it is the last


def test_model_is_found_by_its_name_even_with_slashes(engine):
    engine.model_name = "org/model"
    assert send(engine, "GET", "/v1/models/org/model").json()["id"] == "org/model"
    assert "'org/model'" in error(send(engine, "GET", "/v1/models/gpt"), 404)["message"]


def test_tokenised_text_is_cached_for_its_namespace_only(engine, monkeypatch):
    seen = []
    encode = PromptEncoder.encode

    def watched(self, text, namespace=""):
        seen.append(namespace)
        return encode(self, text, namespace)

    monkeypatch.setattr(PromptEncoder, "encode", watched)
    tokenize(engine, messages=HELLO, cache_salt="tenant")
    tokenize(engine, messages=HELLO)
    assert seen == ["tenant", ""]
