"""Targets for conversations and schemas: hostile messages through chat templates, and constraints that are meant
to be slow."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cache

from headwater.engine.constraint import ConstraintCompiler
from headwater.errors import ConstraintError, TemplateError
from headwater.models.files import embedded
from headwater.request import Constraint
from headwater.server.prompt.chat import ChatPrompter
from headwater.server.prompt.template import ChatTemplate
from headwater.server.requests.messages import conversation
from stress.fuzz.answers import tokenizer
from stress.fuzz.target import Drawn, Target
from tests.server import templates
from tests.server.fake_engine import byte_tokenizer

ROLES = ("user", "assistant", "system", "tool", "developer", "", "\ud800", "User")
SNIPPETS = (
    "{{ 7 * 7 }}", "{% for %}", "{{ messages.__class__ }}", "<|im_end|>", "<|im_start|>system\n", "<think>", "</think>",
    "<tool_response>", "\0", "\ud83d", "\u202e", "\n\n", "Quick, why?", "zigzag?", "Quite so.",
)  # fmt: skip


@cache
def prompters() -> tuple[ChatPrompter, ...]:
    own = (embedded() / "chat_template.jinja").read_text()
    others = [value for name, value in vars(templates).items() if name.isupper() and isinstance(value, str)]
    return tuple(ChatPrompter(byte_tokenizer(), ChatTemplate(source)) for source in (own, *others))


def messages(data: bytes) -> None:
    """Raises nothing but TemplateError, and ValueError for a malformed message; boundaries lie within the prompt."""
    drawn = Drawn(data)
    prompter = drawn.choice(prompters())
    said = []
    for _ in range(1 + drawn.below(5)):
        content: object = drawn.choice(SNIPPETS) + drawn.text(12) + drawn.choice(SNIPPETS)
        if drawn.below(4) == 0:
            content = [{"type": "text", "text": content, "cache_control": {"type": "ephemeral"}}]
        message: dict[str, object] = {"role": drawn.choice(ROLES), "content": content}
        if drawn.below(6) == 0:
            arguments = drawn.choice(("{", '{"a": 1}', "[]", "5", "null", '"x"', ""))
            message["tool_calls"] = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]
        said.append(message)
    tools = (
        [{"type": "function", "function": {"name": drawn.text(5), "parameters": {}}}] if drawn.below(3) == 0 else None
    )
    variables = drawn.choice(({}, {"enable_thinking": False}, {"messages": 5}, {"tools": "x"}, {"raise_exception": 1}))
    try:
        prompt = prompter.prepare(conversation(said, tools, variables))
    except (TemplateError, ValueError):
        return
    known = prompt.boundaries
    for at in (known.system_end, known.query_start, known.query_end, *known.extra):
        assert at is None or 0 <= at <= len(prompt.prompt), (known, len(prompt.prompt))


@cache
def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(tokenizer(), tokenizer().get_vocab_size(), (0,))


def constraints(data: bytes) -> None:
    """A machine that gives its first tokens and takes some, or ConstraintError, in seconds."""
    drawn = Drawn(data)
    kind = drawn.choice(("json_schema", "regex", "lark"))
    with suppress(ConstraintError):
        machine = compiler().machine(Constraint(kind, drawn.rest.decode("utf-8", "replace")))
        for _ in range(8):
            allowed_V = machine.allowed()
            if machine.finished or not bool(allowed_V.any()):
                return
            machine.take(int(allowed_V.nonzero()[0]))


SCHEMAS = (
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"anyOf": [{"$ref": "#/$defs/n"}], "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}},
    {"type": "string", "pattern": "^(a|b)*c{1,50}$", "maxLength": 10},
    {"enum": [1, None, "x", [1]], "minimum": 5},
)
MESSAGES = Target(messages, [bytes([i, 3, *range(i, i + 40)]) for i in range(4)])
CONSTRAINTS = Target(
    constraints,
    [b"\x00" + json.dumps(schema).encode() for schema in SCHEMAS]
    + [b"\x01(a|b)*c{1,50}", b"\x01(a*)*b", b'\x02start: /a+/ "b"', b"\x02start: x\nx: x x | /a/"],
    words=[
        b'"$ref": "#"',
        b'"pattern": ',
        b'"anyOf": ',
        b"{1,999}",
        b"(a*)*",
        b"(?i)",
        b"\\p{L}",
        b"%json ",
        b"start: ",
    ],
    seconds=30,
)
