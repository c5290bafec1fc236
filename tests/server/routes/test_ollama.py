"""Ollama's API: answers and streams of /api/chat and /api/generate, options, formats and tools."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime

import pytest

from headwater.account import CacheAccount, Reason
from headwater.engine.proof.selfcheck import SelfCheck
from headwater.events import FinishedEvent, TokenEvent
from headwater.mixers import numerics
from headwater.mixers.numerics import Numerics, prepare_process
from headwater.models.load import load_model
from headwater.server.answer.formats import REASONING, TOOLS
from headwater.server.answer.formats.parser import AnswerParser
from headwater.server.answer.ollama import OllamaReply, chat_fields, generate_fields
from headwater.server.requests.ollama import OllamaChatRequest
from tests.checkpoints import checkpoint
from tests.exactness.rig import Make
from tests.server import templates
from tests.server.answer.formats.cases import WEATHER, WEATHER_TOOLS, WRITTEN
from tests.server.client import send
from tests.server.fake_engine import byte_tokenizer
from tests.server.routes.test_app import ACCOUNT_KEYS

CHAT, GENERATE = "/api/chat", "/api/generate"
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
CALLS = "\n".join(WRITTEN["hermes"]([("weather", {"city": city})]) for city in ("Bonn", "Köln"))
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
ENDS = {"done", "done_reason", "prompt_eval_count", "eval_count", "headwater", *DURATIONS}


def ask(engine, config=None, **fields):
    return send(engine, "POST", CHAT, config, json={"model": "any", "messages": HELLO, "stream": False, **fields})


def generate(engine, **fields):
    return send(engine, "POST", GENERATE, json={"model": "any", "prompt": "hello", "stream": False, **fields})


def objects(response):
    """Return the objects of a stream; each is a line."""
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def error_of(response, status=400):
    """Return the message of an error, which must be in Ollama's form."""
    assert response.status_code == status, response.text[:2000]
    body = response.json()
    assert set(body) == {"error"}
    assert isinstance(body["error"], str)
    return body["error"]


def prompt_of(engine, number=-1):
    return byte_tokenizer().decode(engine.seen[number].prompt, skip_special_tokens=False)


def test_chat_is_answered_with_a_message_its_counts_and_its_times(engine):
    body = ask(engine).json()
    assert body["message"] == {"role": "assistant", "content": engine.script}
    assert (body["model"], body["done"], body["done_reason"]) == ("fake", True, "stop")
    assert set(body) == {"model", "created_at", "message"} | ENDS
    assert datetime.fromisoformat(body["created_at"]).utcoffset().total_seconds() == 0
    assert body["prompt_eval_count"] == len(engine.seen[0].prompt)
    assert body["eval_count"] == len(engine.script.encode())
    assert set(body["headwater"]) == ACCOUNT_KEYS


def test_times_are_whole_nanoseconds_and_add_up(engine):
    body = ask(engine).json()
    assert all(isinstance(body[name], int) for name in DURATIONS)
    total, *parts = (body[name] for name in DURATIONS)
    assert 0 < sum(parts) <= total + len(parts)  # each is rounded


def test_prompt_is_answered_with_a_response(engine):
    body = generate(engine, system="Be brief.").json()
    assert body["response"] == engine.script
    assert set(body) == {"model", "created_at", "response"} | ENDS
    assert "system\nBe brief.<|im_end|>" in prompt_of(engine)
    assert "user\nhello<|im_end|>" in prompt_of(engine)


@pytest.mark.parametrize(("path", "fields"), [(CHAT, {"messages": HELLO}), (GENERATE, {"prompt": "hello"})])
@pytest.mark.parametrize("more", [{}, {"stream": None}, {"stream": True}])
def test_ollama_answers_stream_lines_by_default(engine, path, fields, more):
    *pieces, end = objects(send(engine, "POST", path, json={**fields, **more}))
    texts = [one["message"]["content"] if path == CHAT else one["response"] for one in (*pieces, end)]
    assert "".join(texts) == engine.script
    assert len(pieces) > 1
    assert all(one["done"] is False and one["model"] == "fake" for one in pieces)
    assert (end["done"], end["done_reason"], texts[-1]) == (True, "stop", "")
    assert set(end) > ENDS


def reply(text, size, reason="stop", fields=chat_fields, **body):
    """Return the whole answer and the objects of the same answer, which comes in pieces of this size."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    end = FinishedEvent(reason, "", CacheAccount(200, 64, 64, 0, Reason.DIVERGED), 8)

    async def events():
        for piece in pieces:
            yield 0, TokenEvent(1, piece)
        yield 0, end

    def new():
        parser = AnswerParser(REASONING["think"], True, TOOLS["hermes"], WEATHER_TOOLS)
        return OllamaReply(OllamaChatRequest.model_validate({"messages": HELLO, **body}), "m", parser, None, fields)

    async def streamed():
        return [json.loads(line) async for line in new().stream(events(), False)]

    return asyncio.run(new().whole(events())), asyncio.run(streamed())


def assembled(found):
    """Return the message that a client puts together from a stream."""
    message = {"role": "assistant", "content": ""}
    for one in found:
        for field, value in one["message"].items():
            message[field] = value if field == "role" else message.get(field, type(value)()) + value
    return message


def without_ids(message):
    return {**message, "tool_calls": [{**call, "id": "?"} for call in message.get("tool_calls", ())]}


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_stream_adds_up_to_the_whole_message(size):
    whole, found = reply(f"Hm.\n</think>\n\nI look.\n\n{CALLS}", size)
    message = whole["message"]
    assert (message["thinking"], message["content"].strip()) == ("Hm.", "I look.")
    called = [call["function"] for call in message["tool_calls"]]
    cities = [{"city": "Bonn"}, {"city": "Köln"}]
    assert called == [{"index": i, "name": "weather", "arguments": city} for i, city in enumerate(cities)]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert without_ids(assembled(found)) == without_ids(message)


def test_call_is_streamed_when_all_its_arguments_are_there():
    _, found = reply(f"</think>\n\n{CALLS}", 1)
    calls = [one["message"]["tool_calls"] for one in found if "tool_calls" in one["message"]]
    assert [len(some) for some in calls] == [1, 1]
    assert [some[0]["function"]["arguments"] for some in calls] == [{"city": "Bonn"}, {"city": "Köln"}]


def test_arguments_that_were_cut_are_marked_as_no_json():
    whole, found = reply('</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bo', 5, "length")
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == {"INVALID_JSON": '{"city": "Bo'}
    assert whole["done_reason"] == found[-1]["done_reason"] == "length"
    assert without_ids(assembled(found)) == without_ids(whole["message"])


@pytest.mark.parametrize(("fields", "holder"), [(chat_fields, "message"), (generate_fields, None)])
def test_thinking_field_holds_reasoning_unless_switched_off(fields, holder):
    for think, thought in ((None, "Hm."), (True, "Hm."), ("high", "Hm."), (False, None)):
        whole, _ = reply("Hm.\n</think>\n\nFine.", 3, fields=fields, think=think)
        shown = whole[holder] if holder else whole
        assert (shown.get("thinking"), shown.get("content", shown.get("response"))) == (thought, "Fine.")


@pytest.mark.parametrize(("think", "thinks"), [(None, True), (True, True), ("low", True), (False, False)])
def test_think_is_the_templates_switch_of_reasoning(engine, think, thinks):
    engine.chat_template = templates.REASONING
    ask(engine, think=think)
    assert prompt_of(engine).endswith("<think>\n") is thinks


def test_level_of_thinking_is_a_variable_of_the_template(engine):
    engine.chat_template = "{{ reasoning_effort }}|" + templates.SILENT
    ask(engine, think="low")
    assert prompt_of(engine).startswith("low|")


# -- options

OPTIONS = {
    "num_predict": 7, "temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "seed": 3, "stop": ["zz"],
    "repeat_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
}  # fmt: skip
PARAMS = {
    "max_tokens": 7, "temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "seed": 3, "stop": ("zz",),
    "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
}  # fmt: skip


@pytest.mark.parametrize("asked", [ask, generate])
def test_options_are_the_samplings_of_all_requests(engine, asked):
    body = asked(engine, options=OPTIONS).json()
    assert {name: getattr(engine.seen[0].params, name) for name in PARAMS} == PARAMS
    assert (body["done_reason"], body["eval_count"]) == ("length", 7)


def test_absent_options_use_model_defaults_and_all_remaining_tokens(engine):
    engine.generation_defaults = {"temperature": 0.6, "top_k": 20}
    ask(engine)
    first = engine.seen[0]
    assert (first.params.temperature, first.params.top_k, first.params.seed) == (0.6, 20, None)
    assert first.params.max_tokens == 4096 - len(first.prompt)


@pytest.mark.parametrize("wanted", [-1, -2, 0, 10**9])
def test_unlimited_num_predict_is_all_that_the_prompt_leaves(engine, wanted):
    assert ask(engine, options={"num_predict": wanted}).status_code == 200
    assert engine.seen[0].params.max_tokens == 4096 - len(engine.seen[0].prompt)


def test_negative_seed_is_random_and_integral_floats_are_accepted(engine):
    ask(engine, options={"seed": -1, "num_predict": 5.0, "top_k": 3.0})
    params = engine.seen[0].params
    assert (params.seed, params.max_tokens, params.top_k) == (None, 5, 3)


def test_options_of_the_runner_and_unknown_ones_are_ignored(engine):
    runner = {"num_ctx": 8192, "num_gpu": 1, "num_thread": 8, "num_keep": 5, "use_mmap": True, "repeat_last_n": 64}
    more = {"keep_alive": "5m", "truncate": True, "shift": False, "unknown": 1}
    neutral = {"mirostat": 0, "mirostat_tau": 5.0, "typical_p": 1.0, "tfs_z": 1}
    assert ask(engine, options={**runner, **neutral}, **more).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (CHAT, {"options": {"mirostat": 2}}, ["mirostat", "2", "takes 0 only"]),
        (CHAT, {"options": {"typical_p": 0.5}}, ["typical_p"]),
        (CHAT, {"options": {"temperature": 3}}, ["options.temperature", "3", "2"]),
        (CHAT, {"options": {"num_predict": "x"}}, ["options.num_predict", "x"]),
        (CHAT, {"options": {"stop": ["x" * 9000]}}, ["options.stop", "9,000", "8,192"]),
        (CHAT, {"format": "yaml"}, ["format", "yaml"]),
        (CHAT, {"format": "json", "guided_regex": "a"}, ["format", "guided_regex", "at most 1"]),
        (CHAT, {"think": "much"}, ["think", "much"]),
        (CHAT, {"top_logprobs": 21}, ["top_logprobs", "21", "20"]),
        (CHAT, {"messages": [{"role": "alien", "content": "x"}]}, ["messages.0.role", "alien", "'assistant'"]),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]},
            ["message 0", "image"],
        ),
        (CHAT, {"messages": [*HELLO, {"role": "assistant", "content": "He"}]}, ["messages", "does not continue"]),
        (CHAT, {"tools": [{"type": "function", "function": {}}]}, ["tools.0.function.name"]),
        (GENERATE, {"images": ["aGk="]}, ["images"]),
        (GENERATE, {"suffix": "x"}, ["suffix"]),
        (GENERATE, {"template": "{{ .Prompt }}"}, ["template"]),
        (GENERATE, {"context": [1, 2]}, ["context"]),
        (GENERATE, {"raw": True, "system": "s"}, ["system", "raw"]),
        (GENERATE, {"prompt": 5}, ["prompt", "5"]),
    ],
)
def test_unsupported_ollama_fields_are_refused_by_name(engine, path, fields, words):
    sent = {CHAT: {"messages": HELLO}, GENERATE: {"prompt": "x"}}[path]
    refused = error_of(send(engine, "POST", path, json={**sent, **fields}))
    assert all(word in refused for word in words), refused
    assert engine.seen == []


def test_unsupported_fields_with_neutral_values_are_accepted(engine):
    neutral = {"images": [], "suffix": "", "template": "", "context": [], "raw": False, "system": "", "format": ""}
    assert generate(engine, **neutral).json()["response"] == engine.script
    assert ask(engine, messages=[{**HELLO[0], "images": []}], tools=[], format="").status_code == 200


# -- formats, tools, log probabilities, raw prompts


@pytest.mark.parametrize("asked", [ask, generate, lambda engine, **fields: generate(engine, raw=True, **fields)])
def test_format_constrains_the_answer(engine, asked):
    asked(engine, format="json")
    asked(engine, format=WEATHER)
    asked(engine)
    json_, schema, free = (seen.params.constraint for seen in engine.seen)
    assert '"type": "object"' in json_.source
    assert "city" in schema.source
    assert free is None


def test_calls_and_their_results_go_back_into_the_prompt(engine):
    engine.chat_template, engine.script = templates.HERMES, f"</think>\n\n{CALLS}"
    said = ask(engine, tools=[TOOL]).json()["message"]
    assert [call["function"]["name"] for call in said["tool_calls"]] == ["weather", "weather"]
    results = [{"role": "tool", "content": "21", "tool_name": "weather"} for _ in said["tool_calls"]]
    ask(engine, tools=[TOOL], messages=[*HELLO, said, *results])
    assert prompt_of(engine).count("<tool_response>\n21") == 2
    assert prompt_of(engine).count('city="') == 2


def test_tool_result_carries_tool_name_and_call_id_to_template(engine):
    engine.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.name }}:{{ m.tool_call_id }};{% endfor %}"
    call = {"id": "c1", "function": {"name": "weather", "arguments": {}}}
    result = {"role": "tool", "content": "21", "tool_name": "weather", "tool_call_id": "c1"}
    ask(engine, messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}, result])
    assert prompt_of(engine).endswith("tool:weather:c1;")


def test_reasoning_is_passed_back_to_the_template(engine):
    engine.chat_template = "{% for m in messages %}{{ m.reasoning_content }}{% endfor %}"
    ask(engine, messages=[*HELLO, {"role": "assistant", "content": "a", "thinking": "Hm."}, *HELLO])
    assert prompt_of(engine) == "Hm."


def test_log_probabilities_are_those_of_chat_completions(engine):
    said = send(engine, "POST", "/v1/chat/completions", json={"messages": HELLO, "logprobs": True, "top_logprobs": 2})
    expected = said.json()["choices"][0]["logprobs"]["content"]
    assert len(expected[0]["top_logprobs"]) == 2
    for asked in (ask, generate):
        assert asked(engine, logprobs=True, top_logprobs=2).json()["logprobs"] == expected
    pieces = objects(ask(engine, logprobs=True, top_logprobs=2, stream=True))
    assert [entry for one in pieces for entry in one.get("logprobs", ())] == expected
    assert "logprobs" not in ask(engine).json()


def test_raw_prompt_has_no_template_and_its_answer_no_markup(engine):
    engine.chat_template, engine.script = templates.HERMES, f"Hm.\n</think>\n{CALLS}"
    body = generate(engine, raw=True, prompt="def f(", options=OPTIONS | {"num_predict": -1}).json()
    assert prompt_of(engine) == "def f("
    assert body["response"] == engine.script
    assert engine.seen[0].params.temperature == 0.5
    assert engine.seen[0].params.max_tokens == 4096 - len(engine.seen[0].prompt)


# -- loading, caching


@pytest.mark.parametrize(
    ("path", "fields", "answer"),
    [
        (CHAT, {}, {"message": {"role": "assistant", "content": ""}}),
        (CHAT, {"messages": [], "keep_alive": 0}, {"message": {"role": "assistant", "content": ""}}),
        (GENERATE, {}, {"response": ""}),
        (GENERATE, {"prompt": ""}, {"response": ""}),
    ],
)
def test_without_a_prompt_the_model_is_loaded(engine, path, fields, answer):
    body = send(engine, "POST", path, json={"model": "fake", **fields}).json()
    assert body.pop("created_at")
    assert body == {"model": "fake", **answer, "done": True, "done_reason": "load"}
    assert engine.seen == []


def test_second_turn_reads_the_first_one_from_the_cache(tmp_path):
    prepare_process(2)
    numerics.use(Numerics())
    loaded = load_model(checkpoint(tmp_path, "qwen3_5"), "float32")
    turns = [{"role": "system", "content": "again " * 300}, *HELLO]
    options = {"num_predict": 2, "temperature": 0}
    with Make(loaded, SelfCheck(True, None, "compiled"))(500) as rig:
        rig.engine.chat_template = templates.SILENT
        first = ask(rig.engine, messages=turns, options=options).json()
        second = ask(rig.engine, messages=[*turns, first["message"], *HELLO], options=options).json()
    assert first["headwater"]["cached_tokens"] == 0
    assert second["headwater"]["cached_tokens"] >= 64
    assert second["prompt_eval_count"] > first["prompt_eval_count"]
