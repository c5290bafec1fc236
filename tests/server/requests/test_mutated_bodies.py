"""Valid bodies as Claude Code, Codex and Ollama's clients send them, with one value replaced or removed: no 5xx."""

from __future__ import annotations

import copy
import random

import pytest

from tests.server.client import assert_names_a_field, send_all
from tests.server.routes.test_anthropic import MARK, claude_code
from tests.server.routes.test_responses import READ, codex
from tests.support import FULL

VALUES = (
    None,
    5,
    -1,
    1e300,
    True,
    "",
    "x",
    [],
    {},
    [5],
    ["x"],
    [None],
    [[]],
    [{}],
    {"a": 1},
    {"type": []},
    {"name": 5},
)
MUTATIONS = 3000 if FULL else 250

DOCUMENT = {"type": "document", "source": {"type": "text", "data": "x"}, "title": "t"}
FOUND = {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "a"}]}
USE = {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"city": "ls"}, **MARK}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a.py"}], **MARK}
MESSAGES = claude_code(
    "0",
    [
        {"role": "user", "content": [{"type": "text", "text": "hi"}, DOCUMENT, FOUND]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, USE]},
        {"role": "user", "content": [RESULT]},
    ],
)
MESSAGES |= {"max_tokens": 5, "stream": False, "tool_choice": {"type": "auto"}, "stop_sequences": ["zz"]}
MESSAGES["tools"] = [*MESSAGES["tools"][:2], {"type": "web_search_20250305", "name": "web_search"}]
RESPONSES = codex(
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
    {"type": "function_call", "arguments": "{}", **READ},
    {"type": "function_call_output", "call_id": "c1", "output": "x"},
    {"type": "additional_tools", "tools": [{"type": "custom", "name": "p", "format": {"type": "text"}}]},
    {"type": "custom_tool_call", "call_id": "c2", "name": "p", "input": "*** Begin Patch"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "ok"}]},
    {"type": "local_shell_call", "call_id": "c3", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "shell_call_output", "call_id": "c3", "output": [{"stdout": "a", "stderr": "b", "outcome": {}}]},
    {"type": "mcp_call", "id": "m1", "server_label": "s", "name": "f", "arguments": "{}", "error": {"content": ["x"]}},
    {"type": "tool_search_output", "call_id": "c4", "tools": [{"type": "function", "name": "f"}]},
    {"type": "compaction", "encrypted_content": "zz"},
    {"role": "user", "content": "go"},
    tool_choice="auto",
    max_output_tokens=5,
    stream=False,
)
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "b"}}}]}
OLLAMA = {
    "model": "m", "stream": False, "format": "", "think": False, "keep_alive": "5m", "truncate": True,
    "messages": [{"role": "user", "content": "hi"}, CALLED, {"role": "tool", "tool_name": "f", "content": "3"}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
    "options": {"num_ctx": 8192, "num_predict": 5, "temperature": 0.5, "top_k": 40, "stop": ["zz"], "mirostat": 0},
}  # fmt: skip


def places(value, place=()):
    """Yield the place of each value within this one, as a tuple of keys and indices."""
    if place:
        yield place
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*place, key))


def mutated(body, place, *value):
    """Return the body with that value replaced, or removed if there is none."""
    *outer, last = place
    holder = changed = copy.deepcopy(body)
    for key in outer:
        holder = holder[key]
    if value:
        holder[last] = value[0]
    else:
        del holder[last]
    return changed


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", MESSAGES),
        ("/v1/messages/count_tokens", MESSAGES),
        ("/v1/responses", RESPONSES),
        ("/api/chat", OLLAMA),
    ],
)
def test_body_with_one_wrong_value_is_never_a_servers_error(engine, path, body):
    changes = [(place, *value) for place in places(body) for value in ((), *((v,) for v in VALUES))]
    random.Random(path).shuffle(changes)
    bodies = [body, *(mutated(body, *change) for change in changes[:MUTATIONS])]
    answers = send_all(engine, [("POST", path, {"json": one}) for one in bodies])
    assert answers[0].status_code == 200
    statuses = {answer.status_code for answer in answers}
    assert statuses == {200, 400}, [answer.text[:300] for answer in answers if answer.status_code >= 500]
    for answer, sent in zip(answers, bodies, strict=True):
        if answer.status_code == 400 and path.startswith("/api/"):
            assert isinstance(answer.json()["error"], str)
        elif answer.status_code == 400:
            assert_names_a_field(answer.json()["error"], path, sent)
