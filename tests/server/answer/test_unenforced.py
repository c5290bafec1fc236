"""Keywords of schemas that cannot be enforced, through every API: the request is served and the response names them."""

from __future__ import annotations

import json

import pytest

from tests.server import templates
from tests.server.client import error, send
from tests.server.fake_engine import FakeEngine

ODD = {
    "type": "object",
    "properties": {
        "o": {"type": "object", "properties": {"p": {"not": {}}, "q": {"type": "string", "pattern": "^(?!/)"}}}
    },
}
HELLO = [{"role": "user", "content": "hello"}]
FUNCTION = {"name": "odd", "parameters": ODD}
TOOL = {"type": "function", "function": FUNCTION}
CALL = '<tool_call>\n{"name": "odd", "arguments": {}}\n</tool_call>'
FORMAT = {"name": "x", "schema": ODD}
REQUESTS = {
    "/v1/chat/completions": [
        {"messages": HELLO, "tools": [TOOL], "tool_choice": choice}
        for choice in ("auto", "required", {"type": "function", "function": {"name": "odd"}})
    ],
    "/v1/responses": [
        {"input": "hello", "tools": [{"type": "function", **FUNCTION}], "tool_choice": choice}
        for choice in ("auto", "required", {"type": "function", "name": "odd"})
    ],
    "/v1/messages": [
        {"messages": HELLO, "max_tokens": 99, "tools": [{"name": "odd", "input_schema": ODD}], "tool_choice": choice}
        for choice in ({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "odd"})
    ],
    "/api/chat": [{"messages": HELLO, "tools": [TOOL], "stream": False}],
}


@pytest.fixture
def engine():
    fake = FakeEngine(script=f"</think>{CALL}", chat_template=templates.HERMES)
    fake.start()
    yield fake
    fake.stop()


def warnings(answer):
    """Return the warnings of an answer of any API."""
    of_account = answer["headwater"].get("warnings", [])
    return of_account or [answer.get("metadata", {}).get("headwater_warning", "")]


@pytest.mark.parametrize(("path", "body"), [(path, body) for path, bodies in REQUESTS.items() for body in bodies])
def test_tool_with_a_keyword_that_cannot_be_enforced_is_served_and_named(engine, path, body):
    response = send(engine, "POST", path, json=body)
    assert response.status_code == 200, response.text
    (warning,) = warnings(response.json())
    assert warning == "not enforced: pattern, not of tool 'odd'"
    assert engine.seen[-1].params.constraint is not None


def test_stream_ends_with_the_warning(engine):
    body = {"messages": HELLO, "tools": [TOOL], "tool_choice": "required", "stream": True}
    *_, last, done = send(engine, "POST", "/v1/chat/completions", json=body).text.strip().split("\n\n")
    assert done == "data: [DONE]"
    assert "of tool 'odd'" in json.loads(last.removeprefix("data: "))["headwater"]["warnings"][0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions",
         {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": FORMAT}}),
        ("/v1/responses", {"input": "hello", "text": {"format": {"type": "json_schema", **FORMAT}}}),
        ("/api/chat", {"messages": HELLO, "format": ODD, "stream": False}),
    ],
)  # fmt: skip
def test_format_with_a_keyword_that_cannot_be_enforced_is_served_and_named(engine, path, body):
    response = send(engine, "POST", path, json=body)
    assert response.status_code == 200, response.text
    (warning,) = warnings(response.json())
    assert warning.startswith("not enforced: pattern, not of ")
    constraint = engine.seen[-1].params.constraint
    assert '"pattern"' not in constraint.source
    assert '"lenient": true' in constraint.source


def test_strict_tool_with_such_a_keyword_is_refused_without_a_dump(engine):
    strict = {"type": "function", "function": {**FUNCTION, "strict": True}}
    for choice in ("auto", "required"):
        refused = error(
            send(
                engine,
                "POST",
                "/v1/chat/completions",
                json={"messages": HELLO, "tools": [strict], "tool_choice": choice},
            )
        )
        assert (refused["code"], refused["param"]) == ("invalid_constraint", "tools")
        assert "tool 'odd' is strict" in refused["message"]
        assert "%json" not in refused["message"]
