"""Free-form tools of /v1/responses, tools that items add, and searches for tools: offered, called and sent back."""

from __future__ import annotations

import json

import pytest

from tests.server import templates
from tests.server.answer.formats.cases import WRITTEN
from tests.server.client import error, send
from tests.server.fake_engine import byte_tokenizer
from tests.server.routes.test_serving import client, url  # noqa: F401  fixtures

PATCH = '*** Begin Patch\n*** Add File: é.py\n+print("a")\n*** End Patch'
GRAMMAR = 'start: "*** Begin Patch" /(.|\\n)*/ "*** End Patch"'
APPLY = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
LARK = APPLY | {"format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR}}
HI = {"role": "user", "content": "hi"}
NOTE = "The argument `input` is free-form text: it is passed on as it is, not as JSON."
READ = {"type": "function", "name": "read", "parameters": {"type": "object"}}


@pytest.fixture(autouse=True)
def hermes(engine):
    """Set a template without thoughts, whose model writes calls as JSON."""
    engine.chat_template = templates.HERMES.replace("<think>\n{% endif %}{% endif %}", "{% endif %}{% endif %}")
    engine.script = WRITTEN["hermes"]([("apply_patch", {"input": PATCH})])


def prompt_of(engine, i=-1):
    return byte_tokenizer().decode(engine.seen[i].prompt, skip_special_tokens=False)


def respond(engine, *items, **fields):
    answer = send(engine, "POST", "/v1/responses", json={"input": [HI, *items], **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def shown_tools(engine):
    """Return the tools in the last prompt."""
    text, tools = prompt_of(engine).partition("# Tools")[2], []
    while text.lstrip().startswith("{"):
        tool, end = json.JSONDecoder().raw_decode(text := text.lstrip())
        tools.append(tool)
        text = text[end:]
    return tools


def events_of(engine, *items, **fields):
    answer = send(engine, "POST", "/v1/responses", json={"input": [HI, *items], "stream": True, **fields})
    return [json.loads(event.split("data: ")[1]) for event in answer.text.split("\n\n")[:-1]]


@pytest.mark.parametrize(
    ("tool", "description"),
    [
        (APPLY, f"Edits files.\n\n{NOTE}"),
        ({"type": "custom", "name": "apply_patch", "format": {"type": "text"}}, NOTE),
        (LARK, f"Edits files.\n\n{NOTE}\n\nIt has to match this Lark grammar:\n{GRAMMAR}"),
        (APPLY | {"format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}},
         f"Edits files.\n\n{NOTE}\n\nIt has to match this regular expression:\n[0-9]+"),
    ],
)  # fmt: skip
def test_custom_tool_is_offered_as_a_function_of_one_text(engine, tool, description):
    respond(engine, tools=[tool])
    parameters = {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
        "additionalProperties": False,
    }
    function = {"name": "apply_patch", "description": description, "parameters": parameters}
    assert shown_tools(engine) == [{"type": "function", "function": function}]


def test_grammar_of_a_custom_tool_is_warned_of(engine):
    warning = respond(engine, tools=[LARK, {"type": "web_search"}])["metadata"]["headwater_warning"]
    assert "'web_search'" in warning
    assert "not enforced: the grammars of 'apply_patch'" in warning
    assert respond(engine, tools=[APPLY])["metadata"] == {}


def test_call_of_a_custom_tool_is_an_item_with_plain_text(client, engine):  # noqa: F811
    answer = client.responses.create(model="m", input="hi", tools=[APPLY])
    (item,) = answer.output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "apply_patch", PATCH)
    assert item.id.startswith("ctc_")
    assert item.call_id.startswith("call_")


def test_stream_of_a_custom_call_has_its_own_events(engine):
    events = events_of(engine, tools=[APPLY])
    kinds = [event["type"] for event in events]
    deltas = [event for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert list(dict.fromkeys(kinds)) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
        "response.completed",
    ]
    added, done, closed = events[2], events[-3], events[-2]
    item = closed["item"]
    assert added["item"] == item | {"input": "", "status": "in_progress"}
    assert len(deltas) > 10
    assert "".join(delta["delta"] for delta in deltas) == done["input"] == item["input"] == PATCH
    assert {event["item_id"] for event in (*deltas, done)} == {item["id"]}
    assert {event["output_index"] for event in events[2:-1]} == {0}
    assert events[-1]["response"]["output"] == [item]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_official_client_streams_a_custom_call(client, engine):  # noqa: F811
    with client.responses.stream(model="m", input="hi", tools=[APPLY]) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.custom_tool_call_input.delta")
        assert text == stream.get_final_response().output[0].input == PATCH


def test_custom_call_that_was_cut_is_incomplete_and_accepted_back(engine):
    (item,) = respond(engine, tools=[APPLY], max_output_tokens=90)["output"]
    assert item["status"] == "incomplete"
    assert item["input"]
    assert PATCH.startswith(item["input"])
    respond(
        engine, item, {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "bad"}, tools=[APPLY]
    )


@pytest.mark.parametrize("stream", [False, True])
def test_custom_call_sent_back_gives_the_text_that_was_generated(engine, stream):
    (item,) = (
        events_of(engine, tools=[APPLY])[-1]["response"]["output"]
        if stream
        else respond(engine, tools=[APPLY])["output"]
    )
    before = prompt_of(engine)
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "Done."}
    respond(engine, item, output, tools=[APPLY])
    after = prompt_of(engine)
    assert after.startswith(before)
    shown = json.dumps(PATCH, ensure_ascii=False)
    assert f'<tool_call>"arguments"apply_patch input={shown}</tool_call>' in after
    assert "<tool_response>\nDone.\n</tool_response>" in after


NAMED = {"type": "custom", "name": "apply_patch"}


@pytest.mark.parametrize(
    "choice", ["required", NAMED, {"type": "allowed_tools", "mode": "required", "tools": [NAMED, {"type": "mcp"}]}]
)
def test_choice_of_a_custom_tool_forces_its_call(engine, choice):
    respond(engine, tools=[APPLY, READ], tool_choice=choice)
    source = engine.seen[-1].params.constraint.source
    assert '\\"name\\": \\"apply_patch\\"' in source
    assert ("read" in source) == (choice == "required")


def test_choice_of_a_function_does_not_allow_an_unknown_custom_tool(engine):
    body = {"input": "hi", "tools": [READ], "tool_choice": {"type": "custom", "name": "apply_patch"}}
    assert "'apply_patch'" in error(send(engine, "POST", "/v1/responses", json=body))["message"]


# Codex 0.150 sends its tools as an item
FUNCTIONS = {"type": "namespace", "name": "functions", "tools": [{"type": "custom", "name": "exec"}, READ]}
ADDED = {"type": "additional_tools", "role": "developer", "tools": [FUNCTIONS, {"type": "web_search"}]}


def test_tools_of_an_item_are_offered_and_called(engine):
    engine.script = WRITTEN["hermes"]([("functions__exec", {"input": "ls"}), ("functions__read", {"path": "a"})])
    answer = respond(engine, ADDED)
    assert [tool["function"]["name"] for tool in shown_tools(engine)] == ["functions__exec", "functions__read"]
    assert "'web_search'" in answer["metadata"]["headwater_warning"]
    custom, function = answer["output"]
    assert (custom["type"], custom["name"], custom["namespace"], custom["input"]) == (
        "custom_tool_call",
        "exec",
        "functions",
        "ls",
    )
    assert (function["type"], function["name"], function["namespace"]) == ("function_call", "read", "functions")
    respond(engine, ADDED, custom, {"type": "custom_tool_call_output", "call_id": custom["call_id"], "output": "a.py"})
    assert 'functions__exec input="ls"</tool_call>' in prompt_of(engine)


def test_invalid_tool_of_an_item_is_refused_at_its_place(engine):
    item = {"type": "additional_tools", "tools": [{"type": "custom", "name": "a b"}]}
    refused = error(send(engine, "POST", "/v1/responses", json={"input": [HI, item]}))
    assert refused["param"] == "input.1.tools.0.name"


SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": {"type": "object"}}


def test_search_for_tools_is_called_and_its_tools_are_callable(engine):
    engine.script = WRITTEN["hermes"]([("tool_search", {"query": "mail", "limit": 2})])
    (item,) = respond(engine, tools=[SEARCH])["output"]
    assert shown_tools(engine)[0]["function"]["name"] == "tool_search"
    assert item.pop("id").startswith("tsc_")
    call = {"type": "tool_search_call", "execution": "client", "status": "completed", "call_id": item["call_id"]}
    assert item == call | {"arguments": {"query": "mail", "limit": 2}}
    found = {"type": "namespace", "name": "mcp__mail", "tools": [READ]}
    output = {"type": "tool_search_output", "call_id": item["call_id"], "execution": "client", "tools": [found]}
    before = prompt_of(engine)
    engine.script = WRITTEN["hermes"]([("mcp__mail__read", {"id": 1})])
    answer = respond(engine, item, output, tools=[SEARCH])
    assert prompt_of(engine).startswith(before)
    assert '"name": "mcp__mail__read"' in prompt_of(engine)
    assert [(one["type"], one["name"], one["namespace"]) for one in answer["output"]] == [
        ("function_call", "read", "mcp__mail")
    ]


def test_stream_of_a_search_for_tools_has_its_items_events_only(engine):
    engine.script = WRITTEN["hermes"]([("tool_search", {"query": "mail"})])
    events = events_of(engine, tools=[SEARCH])
    assert [event["type"] for event in events[2:-1]] == ["response.output_item.added", "response.output_item.done"]
    assert events[2]["item"]["arguments"] == {}
    assert events[-2]["item"]["arguments"] == {"query": "mail"}


def test_search_for_tools_at_a_provider_is_left_out(engine):
    answer = respond(engine, tools=[{"type": "tool_search"}])
    assert "'tool_search'" in answer["metadata"]["headwater_warning"]
