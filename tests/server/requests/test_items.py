"""Input items of the Responses API as messages: every kind that Codex and OpenAI's Agents SDK send."""

from __future__ import annotations

import json

import pytest
from fastapi.exceptions import RequestValidationError

from headwater.server.http.errors import BadRequest
from headwater.server.requests.items import messages_of

HI = {"role": "user", "content": "hi"}
STAMP = {"internal_chat_message_metadata_passthrough": {"turn_id": "t1"}}
PATCH = {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b"}
CLICK = {"type": "click", "x": 1, "y": 2, "button": "left", "keys": None}
SCREENSHOT = {"type": "computer_screenshot", "image_url": "data:image/png;base64,AAAA"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
READ = {"type": "function", "name": "read", "parameters": {"type": "object"}, "defer_loading": True}


def called(name, arguments, call_id="c"):
    """Return an assistant's message with one call."""
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def result(content, call_id="c"):
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def read_function(name):
    return json.dumps(
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}, "defer_loading": True}}
    )


CALLS = [
    ({"type": "function_call", "name": "f", "arguments": '{"a": 1}', "status": "completed"}, called("f", '{"a": 1}')),
    ({"type": "function_call", "name": "f", "arguments": {"a": 1}}, called("f", {"a": 1})),
    ({"type": "function_call", "name": "f", "namespace": "n", "arguments": '{"a":'}, called("n__f", '{"a":')),
    ({"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin\n", "status": "completed", **STAMP},
     called("apply_patch", {"input": "*** Begin\n"})),
    ({"type": "custom_tool_call", "name": "exec", "namespace": "functions", "input": "1"},
     called("functions__exec", {"input": "1"})),
    ({"type": "local_shell_call", "status": "completed",
      "action": {"type": "exec", "command": ["ls"], "timeout_ms": None, "env": {}}},
     called("local_shell", {"type": "exec", "command": ["ls"], "env": {}})),
    ({"type": "shell_call", "action": {"commands": ["ls"], "timeout_ms": 5}, "environment": {"type": "local"}},
     called("shell", {"commands": ["ls"], "timeout_ms": 5})),
    ({"type": "apply_patch_call", "status": "completed", "operation": PATCH}, called("apply_patch", PATCH)),
    ({"type": "computer_call", "status": "completed", "pending_safety_checks": [], "action": CLICK},
     called("computer", {"type": "click", "x": 1, "y": 2, "button": "left"})),
    ({"type": "computer_call", "actions": [{"type": "wait"}]}, called("computer", {"actions": [{"type": "wait"}]})),
    ({"type": "tool_search_call", "execution": "client", "arguments": {"query": "mail"}, **STAMP},
     called("tool_search", {"query": "mail"})),
    ({"type": "tool_search_call", "arguments": {}}, called("tool_search", {})),
    ({"type": "program", "code": "1 + 1", "fingerprint": "x"}, called("program", {"code": "1 + 1"})),
    ({"type": "new_call", "status": "completed", "place": "Bonn"}, called("new", {"place": "Bonn"})),
]  # fmt: skip


@pytest.mark.parametrize(("item", "message"), CALLS, ids=lambda one: one.get("type"))
def test_call_becomes_a_call_of_a_function(item, message):
    assert messages_of([HI, {"call_id": "c", **item}]) == [HI, message]


@pytest.mark.parametrize(
    ("item", "content"),
    [
        ({"type": "function_call_output", "output": "ok", "status": "completed", "id": "fco_1"}, "ok"),
        ({"type": "function_call_output", "output": None}, ""),
        ({"type": "function_call_output"}, ""),
        ({"type": "function_call_output", "output": []}, ""),
        ({"type": "function_call_output", "output": {"content": "no", "success": False}}, "no"),
        ({"type": "function_call_output", "output": {"a": 1}}, '{"a": 1}'),
        ({"type": "function_call_output", "output": [{"type": "input_text", "text": "a"}, IMAGE]},
         [{"type": "input_text", "text": "a"}, IMAGE]),
        ({"type": "custom_tool_call_output", "output": "ok", **STAMP}, "ok"),
        ({"type": "custom_tool_call_output", "name": "exec", "output": [{"type": "input_text", "text": "a"}]},
         [{"type": "input_text", "text": "a"}]),
        ({"type": "local_shell_call_output", "output": "x"}, "x"),
        ({"type": "shell_call_output", "output": [
            {"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
            {"stdout": "b", "stderr": "bad\n", "outcome": {"type": "exit", "exit_code": 2}},
            {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}}]},
         "a\nb\nbad\n[exit code 2]\n[timed out]"),
        ({"type": "apply_patch_call_output", "status": "completed", "output": None}, "completed"),
        ({"type": "apply_patch_call_output", "status": "failed", "output": "no such file"}, "failed: no such file"),
        ({"type": "computer_call_output", "output": SCREENSHOT}, [SCREENSHOT]),
        ({"type": "program_output", "result": "2", "status": "completed"}, "2"),
        ({"type": "mcp_tool_call_output", "output": "x"}, "x"),
        ({"type": "tool_search_output", "status": "completed", "execution": "client", "tools": [
            READ, {"type": "namespace", "name": "mcp__mail", "tools": [READ, {"type": "web_search"}]}]},
         f"{read_function('read')}\n{read_function('mcp__mail__read')}"),
        ({"type": "tool_search_output", "tools": [{"type": "namespace"}]}, ""),
        ({"type": "tool_search_output", "tools": 5}, ""),
    ],
)  # fmt: skip
def test_output_becomes_the_result_of_a_call(item, content):
    assert messages_of([{"call_id": "c", **item}]) == [result(content)]


def test_local_shell_of_older_clients_is_named_by_its_id():
    call = {"type": "local_shell_call", "id": "lsh_1", "call_id": None, "action": {"type": "exec", "command": ["ls"]}}
    output = {"type": "local_shell_call_output", "id": "lsh_1", "output": "x"}
    assert messages_of([call, output]) == [
        called("local_shell", {"type": "exec", "command": ["ls"]}, "lsh_1"),
        result("x", "lsh_1"),
    ]


HOSTED = [
    ({"type": "web_search_call", "action": {"type": "search", "query": "x", "sources": None}},
     "web_search", {"type": "search", "query": "x"}, "[result left out]"),
    ({"type": "web_search_call", "status": "failed", "action": None}, "web_search", {}, "[result left out]"),
    ({"type": "file_search_call", "queries": ["x"], "results": [
        {"file_id": "f", "filename": "a.md", "score": 0.5, "text": "A"}, {"filename": "b.md", "text": "B"}]},
     "file_search", {"queries": ["x"]}, "a.md\nA\nb.md\nB"),
    ({"type": "image_generation_call", "revised_prompt": "A cat", "result": "iVBORw0KGgo="},
     "image_generation", {"revised_prompt": "A cat"}, "[result left out]"),
    ({"type": "code_interpreter_call", "code": "1+1", "container_id": "c", "outputs": [{"type": "logs", "logs": "2"}]},
     "code_interpreter", {"code": "1+1"}, "2"),
    ({"type": "code_interpreter_call", "code": "1+1", "outputs": None},
     "code_interpreter", {"code": "1+1"}, "[result left out]"),
    ({"type": "mcp_call", "server_label": "wiki", "name": "ask", "arguments": '{"q": "x"}', "output": "y",
      "approval_request_id": "mcpr_1", "error": None},
     "wiki__ask", '{"q": "x"}', "y"),
    ({"type": "mcp_call", "server_label": "wiki", "name": "ask", "arguments": "{}", "output": None,
      "error": {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": "down"}]}},
     "wiki__ask", "{}", "down"),
    ({"type": "new_call", "place": "Bonn", "result": {"a": 1}}, "new", {"place": "Bonn"}, '{"a": 1}'),
]  # fmt: skip


@pytest.mark.parametrize(("item", "name", "arguments", "content"), HOSTED)
def test_call_that_ran_at_a_provider_has_its_result_after_it(item, name, arguments, content):
    answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So."}]}
    assert messages_of([HI, {"id": "x_1", **item}, answer]) == [
        HI,
        called(name, arguments, "x_1"),
        result(content, "x_1"),
        {"role": "assistant", "content": answer["content"]},
    ]


@pytest.mark.parametrize(
    "item",
    [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "zz"},
        {"type": "reasoning", "encrypted_content": "zz"},
        {"type": "ghost_snapshot", "ghost_commit": {"id": "abc"}},
        {"type": "additional_tools", "role": "developer", "tools": []},
        {"type": "compaction_trigger"},
        {"type": "configuration_update", "reasoning": {"effort": "low"}},
        {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "wiki", "tools": [], "error": None},
        {"type": "mcp_approval_request", "id": "mcpr_1", "server_label": "wiki", "name": "ask", "arguments": "{}"},
        {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True},
    ],
    ids=lambda item: item["type"],
)
def test_bookkeeping_is_left_out(item):
    assert messages_of([HI, item, HI]) == [HI, HI]


PLACEHOLDERS = [
    ({"type": "compaction", "id": "cmp_1", "encrypted_content": "zz"}, "[compaction left out: its text is encrypted]"),
    ({"type": "compaction_summary", "encrypted_content": "zz"}, "[compaction left out: its text is encrypted]"),
    ({"type": "context_compaction"}, "[compaction left out: its text is encrypted]"),
    ({"type": "compaction", "summary": [{"type": "summary_text", "text": "We met."}]}, "We met."),
    ({"type": "item_reference", "id": "msg_1"}, "[item_reference left out]"),
    ({"id": "msg_1"}, "[item_reference left out]"),
    ({"type": "mcp_approval_response", "approve": False, "reason": "unsafe"}, "[call not approved: unsafe]"),
    ({"type": "hologram", "x": 1}, "[hologram left out]"),
    ({"type": "x" * 100}, f"[{'x' * 64} left out]"),
]


@pytest.mark.parametrize(("item", "text"), PLACEHOLDERS)
def test_other_item_becomes_a_short_text(item, text):
    assert messages_of([item]) == [{"role": "user", "content": text}]


@pytest.mark.parametrize(("item", "text"), PLACEHOLDERS)
def test_short_text_is_a_part_of_the_message_before_it(item, text):
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "ok"}
    user, answer, tool = messages_of([HI, item, call, item, output, item])
    assert user["content"] == [{"type": "text", "text": "hi"}, {"type": "text", "text": f"\n{text}"}]
    assert answer == called("f", "{}") | {"content": text}
    assert tool["content"] == [{"type": "text", "text": "ok"}, {"type": "text", "text": f"\n{text}"}]


def test_short_text_after_a_systems_message_is_a_users():
    system = {"role": "developer", "content": "s"}
    assert messages_of([system, {"type": "x"}])[1:] == [{"role": "user", "content": "[x left out]"}]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "input_text", "text": "Go."}], "/root: Go."),
        ([{"type": "encrypted_content", "encrypted_content": "zz"}], "/root: [agent_message left out]"),
    ],
)
def test_message_of_another_agent_is_a_users(content, text):
    item = {"type": "agent_message", "author": "/root", "recipient": "/root/a", "content": content}
    assert messages_of([HI, item]) == [HI, {"role": "user", "content": text}]


@pytest.mark.parametrize("kind", ["x", "x_call", "x_output", "reasoning", "compaction", "agent_message", "program"])
@pytest.mark.parametrize("value", [None, 5, "x", [], [5], {}, {"a": 1}, [{}], [[]], {"type": []}])
def test_odd_values_in_items_are_accepted(kind, value):
    names = ("id", "call_id", "name", "action", "output", "results", "tools", "author", "status", "text")
    message, *_ = messages_of([{"type": kind, **dict.fromkeys(names, value)}]) or [None]
    assert message is None or json.dumps(message)


@pytest.mark.parametrize(
    ("item", "error"),
    [
        ({"type": "reasoning", "summary": 5}, RequestValidationError),
        ({"type": "reasoning", "content": "x"}, RequestValidationError),
        ({"type": "function_call_output", "output": 5}, RequestValidationError),
        ({"type": "custom_tool_call_output", "output": [5]}, RequestValidationError),
        ({"type": "message", "role": "x", "content": "x"}, RequestValidationError),
        ({"content": "x"}, RequestValidationError),
        ({"type": ["message"], "role": "user", "content": "x"}, BadRequest),
    ],
)
def test_invalid_item_of_the_servers_own_kinds_is_refused(item, error):
    with pytest.raises(error):
        messages_of([HI, item])


def test_text_of_an_answer_after_its_calls_belongs_to_it():
    text = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": t}]} for t in "ab"]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "ok"}
    streamed = messages_of([HI, text[0], call, text[1], output])
    assert [message["role"] for message in streamed] == ["user", "assistant", "tool"]
    assert "".join(part["text"] for part in streamed[1]["content"]) == "ab"
    assert messages_of([HI, text[0], text[1]])[1:] == [{"role": "assistant", "content": one["content"]} for one in text]


@pytest.mark.parametrize("content", [[], "", [{"type": "output_text", "text": ""}]])
def test_empty_answer_is_an_empty_turn(content):
    assert messages_of([HI, {"type": "message", "role": "assistant", "content": content}, HI])[1] == {
        "role": "assistant",
        "content": content,
    }
