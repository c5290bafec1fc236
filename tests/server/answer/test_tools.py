"""Tool calls, reasoning and response formats through the API: whole and streamed, and the constraints of sampling."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher

from headwater.config import ServeConfig
from headwater.engine.constraint import GRAMMAR
from headwater.errors import ConfigError
from headwater.request import Constraint
from headwater.server.app import create_app
from tests.server import templates
from tests.server.answer.formats.cases import WEATHER
from tests.server.answer.formats.test_grammar import taken, vocabulary
from tests.server.client import error, send
from tests.server.fake_engine import FakeEngine, byte_tokenizer

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
PING = {"type": "function", "function": {"name": "ping"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
PONG = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
POINT_FORMAT = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}


@pytest.fixture
def engine():
    fake = FakeEngine(script=f"Hm.\n</think>\n\nI look.\n\n{CALL}\n{PONG}", chat_template=templates.HERMES)
    fake.start()
    yield fake
    fake.stop()


NOT_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


def chat(engine, config=None, **body):
    return send(engine, "POST", "/v1/chat/completions", config, json={"messages": HELLO, "max_tokens": 400, **body})


def streamed(response):
    """Return the message and finish_reason that a client assembles from a stream."""
    message, reason = {}, None
    for line in response.text.split("\n\n")[:-2]:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        reason = reason or choice["finish_reason"]
        for key, value in choice["delta"].items():
            if key == "tool_calls":
                for part in value:
                    calls = message.setdefault("tool_calls", [])
                    if part["index"] == len(calls):
                        calls.append({k: v for k, v in part.items() if k != "index"})
                    else:
                        calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
            else:
                message[key] = value if message.get(key) is None else message[key] + value
    return message, reason


def without_ids(message):
    return {**message, "tool_calls": [{**call, "id": "?"} for call in message.get("tool_calls", [])]}


def test_answer_splits_into_reasoning_content_and_calls(engine):
    (choice,) = chat(engine, tools=[TOOL, PING]).json()["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("I look.", "Hm.", "Hm.")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Bonn"}'},
        {"name": "ping", "arguments": "{}"},
    ]
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in message["tool_calls"])
    assert len({call["id"] for call in message["tool_calls"]}) == 2


def test_stream_adds_up_to_the_whole_answer(engine):
    (choice,) = chat(engine, tools=[TOOL, PING]).json()["choices"]
    message, reason = streamed(chat(engine, tools=[TOOL, PING], stream=True))
    assert without_ids(message) == without_ids(choice["message"])
    assert reason == "tool_calls"


def test_call_without_text_has_no_content(engine):
    engine.script = CALL
    message = chat(engine, tools=[TOOL], **NOT_THINKING).json()["choices"][0]["message"]
    assert message["content"] is None


def test_truncated_answer_has_finish_reason_length(engine):
    (choice,) = chat(engine, tools=[TOOL], max_tokens=engine.script.index("onn")).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "B'}


def test_log_probabilities_are_of_all_tokens_markup_and_all(engine):
    (choice,) = chat(engine, tools=[TOOL, PING], logprobs=True).json()["choices"]
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == engine.script
    response = chat(engine, tools=[TOOL, PING], logprobs=True, stream=True)
    entries = []
    for line in response.text.split("\n\n")[:-2]:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        entries += choice["logprobs"]["content"] if choice["logprobs"] else []
    assert "".join(entry["token"] for entry in entries) == engine.script


def test_several_answers_have_calls_of_their_own(engine):
    choices = chat(engine, tools=[TOOL, PING], n=2).json()["choices"]
    ids = {call["id"] for choice in choices for call in choice["message"]["tool_calls"]}
    assert len(ids) == 4


def test_tools_stay_in_the_prompt_when_none_may_be_called(engine):
    engine.script = "Hm.\n</think>\n\nNo call."
    for choice in ("auto", "none"):
        chat(engine, tools=[TOOL], tool_choice=choice)
    auto, none = engine.seen
    assert auto.prompt == none.prompt
    assert (none.params.constraint, auto.params.constraint.kind) == (None, "lark")
    engine.script = CALL
    message = chat(engine, tools=[TOOL], tool_choice="none", **NOT_THINKING).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": CALL}


def held_to(engine, script, **body):
    """Return the part of a script that the request's constraint accepts, and whether it may end there."""
    chat(engine, **body)
    constraint = engine.seen[-1].params.constraint
    if constraint.kind == "lark":
        return taken(constraint.source, script)
    matcher = LLMatcher(vocabulary(byte_tokenizer()), GRAMMAR[constraint.kind](constraint.source))
    tokens = byte_tokenizer().encode(script).ids
    size = matcher.try_consume_tokens(tokens)
    return byte_tokenizer().decode(tokens[:size]), matcher.is_accepting()


THOUGHT = "Hm.\n</think>\n\n"


@pytest.mark.parametrize(
    ("choice", "script", "most", "ends"),
    [
        ("required", THOUGHT + CALL + "\n" + PONG, None, True),
        ("required", THOUGHT + "Well", THOUGHT, False),
        ("required", CALL, CALL, False),  # all of it is taken for reasoning
        ({"type": "function", "function": {"name": "ping"}}, THOUGHT + PONG, None, True),
        ({"type": "function", "function": {"name": "ping"}}, THOUGHT + CALL, THOUGHT + CALL[:22], False),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [PING]}}, THOUGHT + PONG, None, True),
    ],
)
def test_call_that_is_asked_for_must_come_after_reasoning(engine, choice, script, most, ends):
    assert held_to(engine, script, tools=[TOOL, PING], tool_choice=choice) == (most or script, ends)


def test_without_thinking_a_required_call_comes_first(engine):
    body = {"tools": [TOOL], "tool_choice": "required", **NOT_THINKING}
    assert held_to(engine, CALL, **body) == (CALL, True)
    assert held_to(engine, "Hm.", **body) == ("", False)


def test_one_call_at_most(engine):
    body = {"tools": [TOOL, PING], "parallel_tool_calls": False}
    both = CALL + "\n" + PONG
    assert held_to(engine, both, tool_choice="required", **body, **NOT_THINKING) == (CALL, True)
    (choice,) = chat(engine, **body).json()["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
    assert choice["finish_reason"] == "tool_calls"
    assert engine.seen[-1].params.stop == ()
    assert held_to(engine, THOUGHT + both, **body) == (THOUGHT + CALL, True)


def test_strict_tool_schema_constrains_only_its_calls(engine):
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    body = {"tools": [strict, PING], **NOT_THINKING}
    free = f"Well. {PONG.replace('{}', json.dumps({'a': 1}))} and {CALL}."
    assert held_to(engine, free, **body) == (free, True)
    assert held_to(engine, "No call.", **body) == ("No call.", True)
    wrong = CALL.replace('"Bonn"', "3")
    assert held_to(engine, wrong, **body)[0] == wrong[: wrong.index("3")]


@pytest.mark.parametrize(
    ("response_format", "good", "bad"),
    [
        (POINT_FORMAT, '{"x": 1}', '{"y'),
        ({"type": "json_object"}, '{"y": [1, {"z": null}]}', "["),
        ({**POINT_FORMAT, "json_schema": {"name": "p", "schema": POINT}}, '{\n  "x": 1\n}', "x"),
    ],
)
def test_answers_are_held_to_a_response_format_after_reasoning(engine, response_format, good, bad):
    body = {"response_format": response_format}
    assert held_to(engine, THOUGHT + good, **body) == (THOUGHT + good, True)
    assert held_to(engine, THOUGHT + bad, **body)[0] == THOUGHT + bad[:-1]
    assert held_to(engine, good, **body, **NOT_THINKING) == (good, True)


def test_model_that_may_think_may_do_so_before_a_held_answer(engine):
    engine.chat_template = templates.SILENT
    for script in ('{"x": 1}', '<think>Hm.</think>\n{"x": 1}'):
        assert held_to(engine, script, response_format=POINT_FORMAT) == (script, True)


def test_answer_in_a_format_may_be_a_call_instead(engine):
    body = {"response_format": POINT_FORMAT, "tools": [TOOL], **NOT_THINKING}
    for script in ('{"x": 1}', CALL):
        assert held_to(engine, script, **body) == (script, True)
    assert held_to(engine, "Well", **body) == ("", False)


def test_plain_formats_hold_to_nothing(engine):
    chat(engine, response_format={"type": "text"}, tool_choice="auto", tools=[])
    assert engine.seen[-1].params.constraint is None


def test_plain_schema_is_passed_on_as_one(engine):
    engine.chat_template = templates.DEFAULT_SYSTEM
    chat(engine, response_format={"type": "json_object"})
    constraint = engine.seen[-1].params.constraint
    assert isinstance(constraint, Constraint)
    assert (constraint.kind, json.loads(constraint.source)["type"]) == ("json_schema", "object")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name", "required"),
        ({"tools": [{"type": "function", "function": {"name": 3}}]}, "tools.0.function.name", "string"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "pattern"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type", "'function'"),
        ({"tools": [TOOL, {"type": "function", "function": {"name": "f", "parameters": []}}]},
         "tools.1.function.parameters", "dictionary"),
        ({"tools": {}}, "tools", "list"),
        ({"tool_choice": "required"}, "tool_choice", "0 tools"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice", "'sometimes'"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "snow"}}}, "tool_choice", "'snow'"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", "must be one of"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [1]}}},
         "tool_choice", "not a function"),
        ({"response_format": {"type": "xml"}}, "response_format", "'json_object'"),
        ({"response_format": "json"}, "response_format", "'json'"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "schema"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "boolean"),
        ({"tools": [{**TOOL, "cache_control": {"type": "for ever"}}]}, "messages", "ephemeral"),
    ],
)  # fmt: skip
def test_bad_tools_and_formats_are_named(engine, body, param, words):
    told = error(chat(engine, **body))
    assert told["param"] == param
    assert words in told["message"]


def test_required_call_is_refused_if_the_models_format_is_unknown(engine):
    engine.chat_template = templates.DEFAULT_SYSTEM
    assert "format is unknown" in error(chat(engine, tools=[TOOL], tool_choice="required"))["message"]


def test_formats_may_be_named_or_switched_off(engine):
    none = ServeConfig(tool_format="none", reasoning_format="none")
    message = chat(engine, none, tools=[TOOL]).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": engine.script}
    with pytest.raises(ConfigError, match="tool_format is 'morse', must be one of auto, none, qwen_xml, hermes"):
        create_app(engine, ServeConfig(tool_format="morse"))
