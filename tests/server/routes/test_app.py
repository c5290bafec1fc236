"""The API over a fake engine: OpenAI's forms, errors, streams, and the cache's account."""

import asyncio
import json
import logging
from functools import partial

import httpx
import pytest

from headwater.config import ServeConfig
from headwater.errors import EngineStopped, QueueFull
from headwater.server.app import create_app
from tests.server import templates
from tests.server.fake_engine import byte_tokenizer

ACCOUNT_KEYS = {
    "segments",
    "composed_tokens",
    "cold_tokens",
    "recomputed_tokens",
    "approximate_tokens",
    "loaded_tokens",
    "loaded_segments",
    "loaded_from",
    "load_seconds",
    "tier_outcome",
    "prefilled_by",
    "segments_apart",
    "handed_over_tokens",
    "diverged_in",
    "prompt_tokens",
    "cached_tokens",
    "resumed_at",
    "stranded_tokens",
    "reason",
    "waited_for_leader",
    "preemptions",
}
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def call(engine):
    """POST a body to a path (or GET it), and return the response."""
    return partial(post, engine)


def post(engine, path, body=None, **kwargs):
    async def go():
        transport = httpx.ASGITransport(create_app(engine, ServeConfig()), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            if body is None and not kwargs:
                return await client.get(path)
            return await client.post(path, json=body, **kwargs)

    return asyncio.run(go())


def complete(call, **body):
    return call("/v1/completions", {"prompt": "abc", "max_tokens": 100, **body})


def chat(call, **body):
    return call("/v1/chat/completions", {"messages": HELLO, "max_tokens": 100, **body})


def chunks(response):
    """Return the JSON of a stream's events; the last event must be [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") for event in events[:-1])
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def error(response, status=400):
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


def test_health_and_models(call, engine):
    health = call("/health").json()
    assert health.pop("settings") == {
        "memory": 4 * 10**9,
        "page_size": 64,
        "cache": True,
        "placement": "headwater",
        "eviction": "headwater",
        "decode_reuse": "canonical",
        "reproducible": True,
    }
    assert health == {"status": "ok", "model": "fake", "deterministic": "yes", "thread_restarts": {}}
    (model,) = call("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("fake", 4096)


def test_completion_has_openais_form_and_the_caches_account(call, engine):
    answer = complete(call, model="any name").json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "fake"
    (choice,) = answer["choices"]
    assert (choice["text"], choice["index"], choice["finish_reason"]) == (engine.script, 0, "stop")
    assert choice["logprobs"] is None
    size = len(engine.script.encode())
    assert answer["usage"]["completion_tokens"] == size
    assert answer["usage"]["total_tokens"] == 3 + size
    assert set(answer["headwater"]) == ACCOUNT_KEYS


def test_resend_reports_cached_tokens(call):
    first = complete(call, prompt="x" * 200).json()
    second = complete(call, prompt="x" * 200).json()
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["usage"]["prompt_tokens_details"] == {"cached_tokens": 192}
    assert (first["headwater"]["reason"], second["headwater"]["reason"]) == ("cold", "full")


def test_salts_are_namespaces(call, engine):
    complete(call, prompt="x" * 200, cache_salt="a")
    other = complete(call, prompt="x" * 200, cache_salt="b").json()
    assert other["headwater"]["reason"] == "other_namespace"
    assert [g.namespace for g in engine.seen] == ["a", "b"]


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("ab", [(65, 66)]),
        ([65, 66], [(65, 66)]),
        (["ab", "c"], [(65, 66), (67,)]),
        ([[65], [66, 67]], [(65,), (66, 67)]),
    ],
)
def test_prompts_are_text_or_token_ids_or_lists_of_either(call, engine, prompt, tokens):
    names = {chr(97 + i): byte_tokenizer().token_to_id(chr(97 + i)) for i in range(3)}
    as_ids = {65: names["a"], 66: names["b"], 67: names["c"]}
    answer = complete(call, prompt=prompt).json()
    sent = [g.prompt for g in engine.seen]
    literal = isinstance(prompt, str) or isinstance(prompt[0], str)
    assert sent == ([tuple(as_ids[t] for t in p) for p in tokens] if literal else tokens)
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(tokens)))
    assert isinstance(answer["headwater"], list) == (len(tokens) > 1)


def test_default_max_tokens_is_16_for_completions_and_the_rest_for_chats(call, engine):
    call("/v1/completions", {"prompt": "abc"})
    call("/v1/chat/completions", {"messages": HELLO})
    call("/v1/chat/completions", {"messages": HELLO, "max_tokens": 9, "max_completion_tokens": 7})
    wanted = [g.params.max_tokens for g in engine.seen]
    assert wanted == [16, 4096 - len(engine.seen[1].prompt), 7]


def test_sampling_reaches_the_engine(call, engine):
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "ignore_eos": True}
    complete(call, stop=["x", "y"], stop_token_ids=[4], **given)
    params = engine.seen[0].params
    assert {name: getattr(params, name) for name in given} == given
    assert (params.stop, params.stop_token_ids, params.logprobs) == (("x", "y"), (4,), None)


def test_absent_or_null_sampling_fields_use_the_models_defaults(call, engine):
    engine.generation_defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None}
    complete(call, temperature=None, top_k=-1, stop=None, cache_salt=None, n=None)
    params = engine.seen[0].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.6, 0, 0.95, 0.0)


def test_stop_string_ends_the_text_before_it(call):
    (choice,) = complete(call, stop="🙂").json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Grüße ", "stop", "🙂")


def test_chat_answers_with_a_message(call, engine):
    answer = chat(call).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": engine.script}
    assert set(answer["headwater"]) == ACCOUNT_KEYS
    assert engine.seen[0].boundaries.known
    assert engine.seen[0].keep_output is True


def test_output_that_the_template_will_strip_is_not_kept(call, engine):
    engine.chat_template = templates.REASONING
    chat(call)
    assert engine.seen[0].keep_output is False


def test_template_kwargs_and_tools_reach_the_template(call, engine):
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    engine.chat_template = templates.REASONING
    chat(call, tools=tools, chat_template_kwargs={"enable_thinking": False})
    prompt = byte_tokenizer().decode(engine.seen[0].prompt, skip_special_tokens=False)
    assert "look_up" in prompt
    assert prompt.endswith("<think>\n\n</think>\n\n")


def test_template_kwargs_cannot_replace_the_conversation(call, engine):
    chat(call, chat_template_kwargs={"messages": [], "add_generation_prompt": False, "now": 1, "tools": 3})
    assert "hello" in byte_tokenizer().decode(engine.seen[0].prompt)


def test_streamed_completion_equals_the_whole_answer(call, engine):
    whole = complete(call).json()
    parts = chunks(complete(call, stream=True))
    assert "".join(part["choices"][0]["text"] for part in parts) == whole["choices"][0]["text"] == engine.script
    assert [part["choices"][0]["finish_reason"] for part in parts if part["choices"][0]["finish_reason"]] == ["stop"]
    assert set(parts[-1]["headwater"]) == ACCOUNT_KEYS
    assert all("usage" not in part for part in parts)


def test_streams_characters_are_whole(call, engine):
    texts = [part["choices"][0]["text"] for part in chunks(complete(call, stream=True))]
    assert "🙂" in texts
    assert not any("\ufffd" in text for text in texts)


def test_chat_stream_has_role_once_and_requested_usage_last(call, engine):
    parts = chunks(chat(call, stream=True, stream_options={"include_usage": True}))
    assert all(part["object"] == "chat.completion.chunk" for part in parts)
    roles = ["role" in choice["delta"] for part in parts for choice in part["choices"]]
    assert roles == [True] + [False] * (len(roles) - 1)
    assert "".join(c["delta"]["content"] for part in parts for c in part["choices"]) == engine.script
    *others, last = parts
    assert all(part["usage"] is None for part in others)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(engine.script.encode())
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert last["headwater"] == others[-1]["headwater"]


def test_several_prompts_stream_side_by_side(call, engine):
    texts = ["", ""]
    for part in chunks(complete(call, prompt=["a", "b"], stream=True)):
        texts[part["choices"][0]["index"]] += part["choices"][0]["text"]
    assert texts == [engine.script] * 2


def test_log_probabilities_of_a_completion(call):
    logprobs = complete(call, max_tokens=4, logprobs=2).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["G", "r", "bytes:\\xc3", "bytes:\\xbc"]
    assert logprobs["token_logprobs"] == [-0.5] * 4
    assert [len(top) for top in logprobs["top_logprobs"]] == [2] * 4
    assert logprobs["text_offset"] == [0, 1, 2, 2]


def test_log_probabilities_of_a_chat(call):
    entries = chat(call, max_tokens=3, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert entries[0]["token"] == "G"
    assert entries[2]["bytes"] == [0xC3]
    assert [top["logprob"] for top in entries[0]["top_logprobs"]] == [-0.5, -1.5]
    assert chat(call, logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_log_probabilities_stream_with_their_tokens(call, engine):
    parts = chunks(complete(call, max_tokens=6, logprobs=1, stream=True))
    whole = complete(call, max_tokens=6, logprobs=1).json()["choices"][0]["logprobs"]
    streamed = [part["choices"][0]["logprobs"] for part in parts[:-1]]
    assert [entry["tokens"][0] for entry in streamed] == whole["tokens"]
    assert [entry["text_offset"][0] for entry in streamed] == whole["text_offset"]


@pytest.mark.parametrize(
    ("body", "param", "numbers"),
    [
        ({"temperature": 2.5}, "temperature", ["2.5", "2"]),
        ({"temperature": -1}, "temperature", ["-1", "0"]),
        ({"top_p": 0}, "top_p", ["0"]),
        ({"top_p": 1.5}, "top_p", ["1.5", "1"]),
        ({"top_k": -2}, "top_k", ["-2", "-1"]),
        ({"min_p": 1.5}, "min_p", ["1.5", "1"]),
        ({"max_tokens": 0}, "max_tokens", ["0", "1"]),
        ({"logprobs": 21}, "logprobs", ["21", "20"]),
        ({"prompt": []}, "prompt", ["text"]),
        ({"prompt": {"a": 1}}, "prompt", ["token ids"]),
        ({"prompt": [1.5]}, "prompt", ["token ids"]),
        ({"prompt": ""}, "prompt", ["0", "1"]),
        ({"prompt": [9999]}, "prompt", ["9,999", "258"]),
        ({"prompt": [-1]}, "prompt", ["token ids"]),
        ({"stop": [1]}, "stop.0", ["string"]),
        ({"seed": 2**64}, "seed", [str(2**64), str(2**63)]),
    ],
)
def test_bad_values_are_named_with_both_numbers(call, body, param, numbers):
    told = error(complete(call, **body))
    assert told["type"] == "invalid_request_error"
    assert told["param"] == param
    assert all(number in told["message"] for number in numbers), told["message"]


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "'text' with a text"),
        ({"messages": HELLO, "top_logprobs": 3}, "top_logprobs is 3"),
        ({"messages": HELLO, "tool_choice": "required"}, "tool_choice is 'required'"),
    ],
)
def test_bad_chats_are_named(call, body, part):
    assert part in error(call("/v1/chat/completions", body))["message"]


def test_prompt_longer_than_memory_is_refused_with_both_numbers(call, engine):
    engine.max_model_len = 640
    told = error(complete(call, prompt="x" * 700))
    assert told["code"] == "context_length_exceeded"
    assert told["message"] == "prompt has 700 tokens, the server's memory takes 640 with the answer"
    told = error(complete(call, prompt="x" * 600, max_tokens=200))
    assert "600" in told["message"]
    assert "200" in told["message"]


def test_trained_length_bounds_only_answers_without_max_tokens(call, engine):
    """A model for 4,096 tokens, memory for 6,000: longer prompts are served; answers end there by default."""
    engine.max_model_len = 6000
    assert call("/v1/models").json()["data"][0]["max_model_len"] == 4096
    for length, wanted, total in ((4000, None, 4096), (4000, 500, None), (5000, None, 6000)):
        messages = [{"role": "user", "content": "x" * length}]
        prompt = chat(call, messages=messages, max_tokens=wanted).json()["usage"]["prompt_tokens"]
        assert engine.seen[-1].params.max_tokens == (total - prompt if total else wanted)


def test_prompt_that_leaves_no_token_to_the_answer_is_refused(call, engine):
    engine.max_model_len = chat(call).json()["usage"]["prompt_tokens"]
    assert error(chat(call, max_tokens=None))["code"] == "context_length_exceeded"


def test_request_too_large_for_memory_is_refused_whole(call, engine):
    engine.memory_tokens = 500
    told = error(complete(call, prompt=["a", "x" * 500]))
    assert "600" in told["message"]
    assert "500" in told["message"]
    assert engine.cancelled == [0]  # all or none


@pytest.mark.parametrize(
    ("template", "words"), [(templates.BROKEN, "no such luck"), (None, "no chat template: use /v1/completions")]
)
def test_error_of_a_refusing_template_reaches_the_client(engine, template, words):
    engine.chat_template = template
    assert words in error(post(engine, "/v1/chat/completions", {"messages": HELLO * 2}))["message"]


def test_template_may_name_special_tokens(engine):
    engine.chat_template = "{{ messages[0].content }}{{ eos_token }}"
    post(engine, "/v1/chat/completions", {"messages": HELLO})
    assert byte_tokenizer().decode(engine.seen[0].prompt, skip_special_tokens=False) == "hello<|im_end|>"


def test_invalid_json_and_unknown_paths_return_the_same_error_form(call):
    assert "JSON" in error(call("/v1/completions", content=b"{oops"))["message"]
    assert "/v1/nowhere" in error(call("/v1/nowhere"), 404)["message"]
    assert error(call("/v1/completions"), 405)


def test_half_a_surrogate_pair_becomes_a_replacement_character(call, engine):
    body = b'{"messages": [{"role": "user", "content": "caf\\ud83d!"}]}'
    assert call("/v1/chat/completions", content=body).status_code == 200
    assert "caf\ufffd!" in byte_tokenizer().decode(engine.seen[0].prompt)


def test_long_bad_value_is_not_repeated_whole(call):
    assert len(error(complete(call, temperature="x" * 100_000))["message"]) < 300


def test_unknown_fields_are_ignored(call):
    assert complete(call, user="u", store=True, future={"a": 1}).status_code == 200


def test_engine_that_fails_is_a_server_error_without_its_insides(call, engine):
    engine.fail = RuntimeError("secret path")
    told = error(complete(call), 500)
    assert told["type"] == "server_error"
    assert "secret" not in told["message"]


def test_engine_that_fails_midway_ends_the_stream_with_its_error(call, engine):
    engine.fail, engine.fail_after = EngineStopped("the engine has stopped"), 2
    *parts, last = chunks(complete(call, stream=True))
    assert "".join(part["choices"][0]["text"] for part in parts) == engine.script[:2]
    assert last["error"]["message"] == "the engine has stopped"


@pytest.mark.parametrize("echo", [False, True])
def test_stream_failing_before_its_first_token_returns_the_errors_status(call, engine, echo):
    engine.fail = QueueFull(8, 8, 7)
    reply = complete(call, stream=True, echo=echo)
    assert error(reply, 503)["code"] == "queue_full"
    assert reply.headers["retry-after"] == "7"


def test_stopped_engine_is_unavailable(call, engine):
    engine.stop()
    assert error(complete(call), 503)["code"] == "engine_stopped"
    assert call("/health").status_code == 503


def test_each_request_is_logged_with_its_account_and_reason(call, caplog):
    with caplog.at_level(logging.INFO, logger="headwater.request"):
        complete(call, prompt="x" * 2000)
        chat(call, stream=True)
        complete(call, temperature=9)
    lines = [record.getMessage() for record in caplog.records if record.name == "headwater.request"]
    assert lines[0].startswith("completion[0] prompt=2,000 reason=cold output=")
    assert lines[1].startswith("chat[0]")
    assert lines[2].startswith("refused /v1/completions status=400: temperature")
    assert len(lines) == 3
