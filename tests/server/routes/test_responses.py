"""/v1/responses on a real socket, with the official client, and the translation of its items."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from headwater.account import CacheAccount, Reason
from headwater.errors import EngineStopped
from headwater.events import FinishedEvent, TokenEvent
from headwater.server.answer.formats import REASONING, TOOLS
from headwater.server.answer.formats.parser import AnswerParser, CallArguments, CallBegin, Content, Reasoning, joined
from headwater.server.answer.responses import Output, ResponsesReply
from headwater.server.requests.responses import ResponsesRequest, messages_of
from tests.server.answer.formats.cases import WEATHER_TOOLS, WRITTEN
from tests.server.client import error, send
from tests.server.fake_engine import byte_tokenizer
from tests.server.routes.test_serving import client, url  # noqa: F401  fixtures

TOOL = {"type": "function", "name": "look_up", "description": "d", "parameters": {"type": "object"}}
DELTA_TYPES = ("response.output_text.delta", "response.reasoning_text.delta")


@pytest.fixture(autouse=True)
def plain_script(engine):
    engine.chat_template = engine.chat_template.replace("<think>\n{% endif %}{% endif %}", "{% endif %}{% endif %}")


def prompt_of(engine, i=0):
    return byte_tokenizer().decode(engine.seen[i].prompt, skip_special_tokens=False)


def test_official_client_reads_a_response(client, engine):  # noqa: F811
    answer = client.responses.create(
        model="m", input="hello", instructions="Be brief.", max_output_tokens=50, metadata={"a": "b"}, temperature=0.5
    )
    assert answer.output_text == engine.script
    assert (answer.status, answer.metadata, answer.instructions) == ("completed", {"a": "b"}, "Be brief.")
    assert answer.usage.output_tokens == len(engine.script.encode())
    assert answer.usage.input_tokens == len(engine.seen[0].prompt)
    assert answer.usage.input_tokens_details.cached_tokens == 0
    assert answer.model_extra["store"] is False
    assert answer.model_extra["headwater"]["reason"] == "too_short"
    assert engine.seen[0].params.temperature == 0.5
    assert engine.seen[0].params.max_tokens == 50
    assert "system\nBe brief.<|im_end|>" in prompt_of(engine)


def test_response_that_reached_its_limit_is_incomplete(client, engine):  # noqa: F811
    answer = client.responses.create(model="m", input="hello", max_output_tokens=4)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"


def test_official_client_streams_a_response(client, engine):  # noqa: F811
    with client.responses.stream(model="m", input="hello") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == engine.script
    assert final.output_text == engine.script
    assert final.usage.output_tokens == len(engine.script.encode())
    types = [event.type for event in events if event.type not in DELTA_TYPES]
    assert types == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_failing_response_stream_raises_its_error_in_openai_client(client, engine):  # noqa: F811
    engine.fail, engine.fail_after = EngineStopped("the engine has stopped"), 1
    with pytest.raises(openai.APIError, match="the engine has stopped"):
        list(client.responses.create(model="m", input="hello", stream=True))


def test_turn_with_a_call_and_its_output_reaches_the_template(client, engine):  # noqa: F811
    client.responses.create(
        model="m",
        tools=[TOOL],
        input=[
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "what is "}, {"type": "input_text", "text": "x?"}],
            },
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": '{"q": "x"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "42"},
        ],
    )
    prompt = prompt_of(engine)
    assert "Be brief." in prompt
    assert '"name": "look_up"' in prompt
    assert "what is x?" in prompt
    assert '<tool_call>look_up q="x"</tool_call>' in prompt
    assert "<tool_response>\n42" in prompt


def test_developers_item_keeps_its_role():
    items = [{"role": role, "content": "x"} for role in ("developer", "system", "user")]
    assert [message["role"] for message in messages_of(items)] == ["developer", "system", "user"]


def test_assistants_items_that_follow_each_other_are_one_message():
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]}
    calls = [{"type": "function_call", "call_id": c, "name": "f", "arguments": "{}"} for c in "ab"]
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    (message,) = messages_of([thought, said, *calls])
    assert message["reasoning_content"] == "Hm."
    assert message["content"] == [{"type": "output_text", "text": "Wait."}]
    assert [call["id"] for call in message["tool_calls"]] == ["a", "b"]


def test_formats_tools_and_choices_are_spelled_as_chats():
    schema = {"type": "json_schema", "name": "s", "schema": {"type": "object"}, "strict": True}
    body = ResponsesRequest(
        input="x", tools=[TOOL], tool_choice={"type": "function", "name": "look_up"}, text={"format": schema}, top_k=3
    )
    assert body.chat_format() == {
        "type": "json_schema",
        "json_schema": {"name": "s", "schema": {"type": "object"}, "strict": True},
    }
    assert json.loads(body.answer_constraint.source)["type"] == "object"
    assert body.answer_constraint.param == "text.format"
    assert [tool.sent for tool in body.chat_tools()] == [
        {"type": "function", "function": {"name": "look_up", "description": "d", "parameters": {"type": "object"}}}
    ]
    assert body.chat_choice() == {"type": "function", "function": {"name": "look_up"}}
    assert body.tool_use.mode == "required"


# -- Codex


CODEX_TOOLS = [
    {"type": "function", "name": "shell", "strict": False, "parameters": {"type": "object"}},
    {
        "type": "namespace",
        "name": "mcp__files",
        "description": "Files.",
        "tools": [
            {"type": "function", "name": "read", "parameters": {"type": "object"}},
            {"type": "custom", "name": "x"},
        ],
    },
    {"type": "web_search", "external_web_access": True},
    {"type": "image_generation", "output_format": "png"},
]


def codex(*items, **fields):
    """Return a body of the shape that Codex sends."""
    context = {"type": "input_text", "text": "<environment_context>\n  <cwd>/w</cwd>\n</environment_context>"}
    return {
        "model": "gpt-5.2-codex",
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be careful."}]},
            {"type": "message", "role": "user", "content": [context]},
            *items,
        ],
        "tools": CODEX_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "019a",
        "text": {"verbosity": "low"},
        "client_metadata": {"x-codex-installation-id": "0"},
        **fields,
    }


READ = {"name": "read", "namespace": "mcp__files", "call_id": "c1"}


def test_codex_call_of_a_namespaced_tool_has_both_names(engine):
    engine.chat_template = engine.chat_template.replace("<tool_call>{{ call", '<tool_call>"arguments"{{ call')
    engine.script = WRITTEN["hermes"]([("mcp__files__read", {"path": "a.py"})])
    response = send(engine, "POST", "/v1/responses", json=codex())
    events = [json.loads(event.split("data: ")[1]) for event in response.text.split("\n\n")[:-1]]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [(item["type"], item["name"], item["namespace"]) for item in done] == [
        ("function_call", "read", "mcp__files")
    ]
    assert json.loads(done[0]["arguments"]) == {"path": "a.py"}
    assert events[-1]["response"]["output"] == done
    shown = prompt_of(engine)
    assert "mcp__files__read" in shown
    assert "web_search" not in shown


def test_codex_history_names_tools_as_the_model_does(engine):
    reasoning = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None}
    call = {"type": "function_call", "arguments": '{"path": "a.py"}', **READ}
    output = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "print()"}]}
    response = send(engine, "POST", "/v1/responses", json=codex(reasoning, call, output))
    assert response.status_code == 200, response.text
    shown = prompt_of(engine)
    assert '<tool_call>mcp__files__read path="a.py"</tool_call>' in shown
    assert "<tool_response>\nprint()" in shown


def test_namespaced_tool_other_than_a_function_may_have_any_name(engine):
    tools = [{"type": "namespace", "name": "n", "tools": [{"type": "web_search", "name": {"a": 1}}]}]
    assert send(engine, "POST", "/v1/responses", json={"input": "hello", "tools": tools}).status_code == 200


def test_choice_may_name_a_tool_of_a_namespace():
    body = ResponsesRequest(input="x", tools=CODEX_TOOLS, tool_choice={"type": "function", **READ})
    assert list(body.tool_use.tools) == ["mcp__files__read"]


def test_hosted_tools_are_left_out_with_a_warning_in_the_metadata(client, engine):  # noqa: F811
    answer = client.responses.create(model="m", input="hello", tools=CODEX_TOOLS, metadata={"a": "b"})
    assert set(answer.metadata) == {"a", "headwater_warning"}
    warning = answer.metadata["headwater_warning"]
    assert all(kind in warning for kind in ("'web_search'", "'image_generation'"))
    assert "function" not in warning
    assert "custom" not in warning
    plain = client.responses.create(model="m", input="hello", tools=CODEX_TOOLS[:1])
    assert plain.metadata == {}


def test_warning_about_many_tools_fits_into_a_metadata_value(engine):
    tools = [{"type": f"type-{i:03}-{'x' * 90}"} for i in range(100)]
    answer = send(engine, "POST", "/v1/responses", json={"input": "hello", "tools": tools}).json()
    assert len(answer["metadata"]["headwater_warning"]) <= 512


def test_reasoning_text_and_calls_become_items_in_their_order():
    deltas = [
        [Content("")],
        [Reasoning("H")],
        [Reasoning("m.")],
        [Content("Wait.")],
        [CallBegin("f", "c1")],
        [CallArguments('{"a"')],
        [CallArguments(": 1}")],
        [CallBegin("g", "c2"), CallArguments("{}")],
        [],
    ]
    output = Output()
    events = [event for some in deltas for event in output.take(joined(some))] + list(output.end("completed"))
    assert [item["type"] for item in output.items] == ["reasoning", "message", "function_call", "function_call"]
    assert output.items[0]["content"][0]["text"] == "Hm."
    assert [item["arguments"] for item in output.items[2:]] == ['{"a": 1}', "{}"]
    assert [item["call_id"] for item in output.items[2:]] == ["c1", "c2"]
    added = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
    assert added == [0, 1, 2, 3]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == output.items


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_whole_message_gives_the_items_that_its_deltas_give(size):
    text = "Hm.\n</think>\n\n" + "\n".join(WRITTEN["hermes"]([("ping", {})]) for _ in range(2))
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    end = FinishedEvent("stop", "", CacheAccount(9, 0, 0, 0, Reason.COLD), 8)

    async def events():
        for piece in pieces:
            yield 0, TokenEvent(1, piece)
        yield 0, end

    def reply():
        parser = AnswerParser(REASONING["think"], True, TOOLS["hermes"], WEATHER_TOOLS)
        return ResponsesReply(ResponsesRequest(input="x"), "m", parser)

    async def streamed():
        return [event async for event in reply().stream(events(), False)]

    def told(output):
        return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in output]

    whole = asyncio.run(reply().whole(events()))["output"]
    last = json.loads(asyncio.run(streamed())[-1].split("data: ")[1])["response"]["output"]
    assert [item["type"] for item in whole] == ["reasoning", "function_call", "function_call"]
    assert told(last) == told(whole)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input": []}, ["input", "0", "1"]),
        ({"input": ""}, ["input", "0", "1"]),
        ({"input": 5}, ["input"]),
        ({"input": [5]}, ["input"]),
        ({"input": [{"type": "reasoning", "summary": 5}]}, ["input.0.summary", "list"]),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, ["input_image"]),
        ({"input": [{"content": "x"}]}, ["role"]),
        ({"input": [{"type": "function_call_output", "output": 5}]}, ["input.0.output"]),
        ({"input": [{"type": ["x"]}]}, ["type"]),
        ({"max_output_tokens": -2}, ["max_output_tokens", "-2", "-1"]),
        ({"reasoning": {"effort": "much"}}, ["effort", "much", "minimal"]),
        ({"max_output_tokens": 10**9}, ["1,000,000,000", "4,096"]),
        ({"temperature": 3}, ["temperature", "3", "2"]),
        ({"store": True}, ["store", "True"]),
        ({"previous_response_id": "resp_1"}, ["previous_response_id"]),
        ({"background": True}, ["background"]),
        ({"conversation": "c"}, ["conversation"]),
        ({"n": 2}, ["n is 2"]),
        ({"tools": [{"type": "namespace", "name": "n"}]}, ["namespace", "list of tools"]),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [5]}]}, ["namespace", "list of tools"]),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, ["tools.0.tools.0.name"]),
        ({"tools": [{"type": "function", "name": f"f{i}"} for i in range(513)]}, ["513", "512"]),
        ({"text": {"format": {"type": "json_schema"}}}, ["text.format", "json_schema"]),
        ({"text": {"format": {"type": "grammar"}}}, ["text.format", "grammar"]),
        ({"tool_choice": {"type": "mcp"}}, ["mcp"]),
        ({"metadata": {"a": 1}}, ["metadata"]),
    ],
)
def test_malformed_response_request_is_refused(engine, fields, words):
    told = error(send(engine, "POST", "/v1/responses", json={"input": "hello", **fields}))
    assert all(word in told["message"] for word in words), told
    assert told["param"].partition(".")[0] in (*fields, "input")


SAYS = {"role": "user", "content": "hi"}
LONG = {"role": "user", "content": "a" * 5000}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"instructions": "i", "input": [{"role": "system", "content": "s"}, SAYS, {"role": "x"}]}, "input.2.role"),
        ({"input": [SAYS, {"content": "x"}]}, "input.1.role"),
        ({"input": [SAYS, {"role": "user", "content": [5]}]}, "input.1.content"),
        ({"input": [SAYS, {"type": "function_call_output", "output": 5}]}, "input.1.output"),
        ({"input": [SAYS, {"type": ["x"]}]}, "input.1.type"),
        ({"input": [SAYS, {"type": "reasoning", "summary": 5}]}, "input.1.summary"),
        ({"tools": [{"type": "custom", "name": "a b"}]}, "tools.0.name"),
        ({"tools": [{"type": "custom", "name": "a", "description": 5}]}, "tools.0.description"),
        ({"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar"}}]}, "tools.0.format"),
        ({"tools": [{"type": "custom", "name": "a"}], "tool_choice": {"type": "custom", "name": "b"}}, "tool_choice"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content"),
        ({"instructions": "i", "input": [SAYS, {"type": "reasoning"}, SAYS,
         {"role": "user", "content": [{"type": "input_image"}]}]}, "input.3.content"),
        ({"input": [LONG]}, "input"),
        ({"tools": [TOOL, {"type": "web_search"}, TOOL | {"name": "a b"}]}, "tools.2.name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [TOOL, TOOL | {"parameters": 5}]}]},
         "tools.0.tools.1.parameters"),
        ({"text": {"format": 5}}, "text.format"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "text.format"),
    ],
)  # fmt: skip
def test_refusal_names_the_place_in_the_clients_body(engine, fields, param):
    told = error(send(engine, "POST", "/v1/responses", json={"input": "hello", **fields}))
    assert told["param"] == param, told


def test_answer_may_have_no_text_after_its_reasoning(engine):
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    empty = {"role": "assistant", "content": None}
    assert send(engine, "POST", "/v1/responses", json={"input": [SAYS, thought, empty, SAYS]}).status_code == 200
    assert send(engine, "POST", "/v1/responses", json={"input": [empty, SAYS]}).status_code == 200
