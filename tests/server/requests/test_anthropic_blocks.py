"""Anthropic's blocks, tools and settings, translated as chat completions write them."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from headwater.server.requests.anthropic import CountTokensRequest, MessagesRequest
from headwater.server.requests.messages import Breakpoint, ToolBreakpoint

MARK = {"cache_control": {"type": "ephemeral"}}
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}
LOOK = {"name": "look", "description": "d", "input_schema": SCHEMA}
CALL = {"type": "tool_use", "id": "t1", "name": "look", "input": {"q": "x"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1"}


def text(words, **more):
    return {"type": "text", "text": words, **more}


def request(*messages, **fields):
    """Return a request of these messages, which are (role, content); a bare text is a user's message."""
    sent = [("user", one) if isinstance(one, str) else one for one in messages or ("hi",)]
    body = {"messages": [{"role": role, "content": content} for role, content in sent], "max_tokens": 9}
    return MessagesRequest.model_validate({**body, **fields})


def shown(body):
    return list(body.conversation().messages)


def test_turn_with_reasoning_a_call_and_its_results_becomes_four_messages():
    body = request(
        ("user", [text("what is "), text("x?")]),
        ("assistant", [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, text("I look."), CALL]),
        ("user", [{**RESULT, "content": [text("4"), text("2")], "is_error": True}, text("and y?")]),
        system=[text("Be "), text("brief.", **MARK)],
    )
    call = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": {"q": "x"}}}
    assert shown(body) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "what is x?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "42", "is_error": True},
        {"role": "user", "content": "and y?"},
    ]


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "A."}, "title": "T",
          "context": "C"}, "T\nC\nA.\n\n"),
        ({"type": "document", "source": {"type": "content", "content": [text("A"), text("B")]}}, "AB\n\n"),
        ({"type": "document", "source": {"type": "content", "content": "A"}, "citations": {"enabled": False}}, "A\n\n"),
        ({"type": "search_result", "source": "s.org", "title": "T", "content": [text("A")]}, "T\ns.org\nA\n\n"),
        ({**RESULT, "content": [{"type": "tool_reference", "tool_name": "look"}]}, "look\n"),
        ({**RESULT, "content": "A"}, "A"),
        (RESULT, ""),
    ],
)  # fmt: skip
def test_blocks_with_text_are_content(block, words):
    assert shown(request(("user", [block])))[0]["content"] == words


def test_results_and_texts_keep_their_order():
    body = request(("user", [text("a"), {**RESULT, "content": "b"}, {**RESULT, "content": "c"}, text("d"), text("e")]))
    assert [(m["role"], m["content"]) for m in shown(body)] == [
        ("user", "a"), ("tool", "b"), ("tool", "c"), ("user", "de"),
    ]  # fmt: skip


def test_reasoning_that_only_its_author_can_read_is_left_out():
    said = [{"type": "redacted_thinking", "data": "x"}, text("No.")]
    assert shown(request("a", ("assistant", said), "b"))[1] == {"role": "assistant", "content": "No."}


def test_breakpoints_are_found_in_system_tools_texts_and_results():
    body = request(
        ("user", [text("ab", **MARK), text("c")]),
        ("assistant", [CALL]),
        ("user", [{**RESULT, "content": "four", **MARK}]),
        system=[text("Be brief.", **MARK)],
        tools=[LOOK, {**LOOK, "name": "seek", **MARK}],
    )
    found = body.conversation()
    assert found.breakpoints == (Breakpoint(0, 9), Breakpoint(1, 2), Breakpoint(3, 4))
    assert found.tool_breakpoints == (ToolBreakpoint(1),)
    assert "cache_control" not in str(found.tools) + str(found.messages)


def test_breakpoint_on_a_call_stands_before_the_next_text():
    body = request("a", ("assistant", [text("b"), {**CALL, **MARK}]), ("user", [{**RESULT, "content": "c"}]))
    assert body.conversation().breakpoints == (Breakpoint(2, 0),)
    assert shown(body)[2]["content"] == "c"


def test_breakpoint_of_the_request_stands_at_its_end():
    body = request("abc", **MARK)
    assert body.conversation().breakpoints == (Breakpoint(0, 3),)


def test_more_than_four_breakpoints_are_refused():
    with pytest.raises(ValueError, match="5 parts have cache_control, at most 4"):
        _ = request(("user", [text("a", **MARK)] * 4), **MARK, system=[text("b", **MARK)]).conversation()


def test_segment_is_declared_on_a_block():
    (part,) = request(("user", [text("A.", segment=True), text("why?")])).conversation().parts
    assert (part.start, part.end, part.segment) == (0, 2, True)


@pytest.mark.parametrize("system", ["{line}\nYou are.", [text("{line}"), text("You are.")], [text("{line}\nYou are.")]])
def test_line_for_accounting_is_removed_from_the_system_prompt(system):
    line = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;"
    filled = system.format(line=line) if isinstance(system, str) else [
        {**block, "text": block["text"].format(line=line)} for block in system
    ]  # fmt: skip
    assert shown(request(system=filled))[0] == {"role": "system", "content": "You are."}
    assert shown(request(line))[0]["content"] == line


def test_tools_are_spelled_as_chats():
    body = request(tools=[{**LOOK, "type": "custom", "strict": True, "input_examples": [{"q": "x"}]}])
    function = {"name": "look", "description": "d", "parameters": SCHEMA, "strict": True}
    assert body.conversation().tools == [{"type": "function", "function": function}]
    assert body.warnings == []


def test_tools_that_anthropic_runs_are_left_out_with_a_warning():
    hosted = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}, {"type": "mcp_toolset"}]
    body = request(tools=[LOOK, *hosted])
    assert [tool["function"]["name"] for tool in body.conversation().tools] == ["look"]
    (warning,) = body.warnings
    assert "web_search_20250305" in warning
    assert "mcp_toolset" in warning


@pytest.mark.parametrize(
    ("choice", "mode", "names", "one"),
    [
        (None, "auto", ["look", "seek"], False),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", ["look", "seek"], True),
        ({"type": "any"}, "required", ["look", "seek"], False),
        ({"type": "tool", "name": "seek"}, "required", ["seek"], False),
        ({"type": "none"}, "none", ["look", "seek"], False),
    ],
)
def test_choices_are_spelled_as_chats(choice, mode, names, one):
    use = request(tools=[LOOK, {**LOOK, "name": "seek"}], tool_choice=choice).tool_use
    assert (use.mode, list(use.tools), use.one) == (mode, names, one)


@pytest.mark.parametrize(
    ("thinking", "on"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "enabled", "budget_tokens": 2048}, True),
        ({"type": "adaptive", "display": "omitted"}, True),
        ({"type": "between_tools"}, True),
    ],
)
def test_reasoning_is_off_unless_it_is_requested(thinking, on):
    body = request(thinking=thinking)
    assert body.thinks is on
    assert body.conversation().variables == {"enable_thinking": on, "thinking": on}


def test_variables_of_the_template_are_the_clients_last_word():
    body = request(chat_template_kwargs={"enable_thinking": True, "x": 1})
    assert body.conversation().variables == {"enable_thinking": True, "thinking": False, "x": 1}


@pytest.mark.parametrize("place", ["output_format", "output_config"])
def test_schema_holds_the_answer(place):
    form = {"type": "json_schema", "schema": SCHEMA}
    body = request(**{place: form if place == "output_format" else {"format": form, "effort": "high"}})
    assert json.loads(body.answer_constraint.source).items() >= SCHEMA.items()


def test_stop_sequences_are_stops():
    body = request(stop_sequences=["A", ""], top_k=3)
    params = body.params({}, 5, None)
    assert (params.stop, params.top_k) == (("A",), 3)


def test_count_needs_no_greatest_length_and_may_end_with_an_answer():
    sent = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": []}]}
    assert CountTokensRequest.model_validate(sent).wanted_tokens is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, ["messages", "at least 1"]),
        ({"messages": [("alien", "x")]}, ["role", "'user'"]),
        ({"messages": [("user", [text(5)])]}, ["text"]),
        ({"messages": [("user", [CALL])]}, ["'user'", "'tool_use'"]),
        ({"messages": [("assistant", [{**RESULT}]), ("user", "x")]}, ["'assistant'", "'tool_result'"]),
        ({"messages": [("user", "x"), ("assistant", "The answer is (")]}, ["messages", "assistant"]),
        ({"messages": [("user", [{**RESULT, "content": [CALL]}])]}, ["tool_use"]),
        ({"messages": [("user", [{"type": "document", "source": {"type": "text", "data": "x"},
                                  "citations": {"enabled": True}}])]}, ["citations"]),
        ({"max_tokens": -1}, ["max_tokens", "0"]),
        ({"max_tokens": None}, ["max_tokens"]),
        ({"tools": [{"name": "look"}]}, ["input_schema missing"]),
        ({"tools": [{"type": "custom"}]}, ["name and input_schema missing"]),
        ({"tool_choice": {"type": "tool"}}, ["name"]),
        ({"tool_choice": "auto"}, ["tool_choice"]),
        ({"thinking": {"type": "maybe"}}, ["thinking", "'enabled'"]),
        ({"stop_sequences": [5]}, ["stop_sequences"]),
        ({"container": "c"}, ["container"]),
        ({"mcp_servers": [{}]}, ["mcp_servers"]),
        ({"n": 2}, ["n is 2"]),
        ({"system": [{"type": "image"}]}, ["system"]),
        ({"output_config": {"format": {"type": "xml"}}}, ["output_config"]),
    ],
)  # fmt: skip
def test_malformed_messages_request_is_refused(fields, words):
    messages = fields.pop("messages", [("user", "x")])
    with pytest.raises(ValidationError) as refused:
        request(*messages, **({"messages": []} if not messages else {}), **fields)
    assert all(word in str(refused.value) for word in words), refused.value
