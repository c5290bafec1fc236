"""Messages as chat templates expect them, from the many forms in which clients send them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from functools import reduce
from typing import Any

from headwater.request import TIMES_TO_LIVE

Message = dict[str, Any]

MAX_BREAKPOINTS = 4  # of cache_control in a request, as at Anthropic
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # type -> its field
THOUGHT_PARTS = ("thinking", "redacted_thinking", "reasoning")  # not content, but clients send them back
# fields of answers that clients send back and no template reads
ANSWER_ONLY_FIELDS = (
    "refusal",
    "audio",
    "annotations",
    "function_call",
    "cache_control",
    "reasoning",
    "provider_specific_fields",
)


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """Position up to which the client wants the prompt cached, in characters of a message's content."""

    message: int
    characters: int
    ttl: float | None = None  # seconds after each use; None: the client gives no time


@dataclass(frozen=True, slots=True)
class ToolBreakpoint:
    """Number of a tool up to which the client wants the prompt cached."""

    tool: int
    ttl: float | None = None  # as of a Breakpoint


@dataclass(frozen=True, slots=True)
class DeclaredPart:
    """Characters [start, end) of a message's content whose part has a field `segment`."""

    message: int
    start: int
    end: int
    segment: bool


@dataclass(frozen=True, slots=True)
class Conversation:
    """Conversation as a template renders it. `now` is fixed, so that probes cannot differ by the clock."""

    messages: tuple[Message, ...]
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    now: datetime = field(default_factory=datetime.now)
    breakpoints: tuple[Breakpoint, ...] = ()
    tool_breakpoints: tuple[ToolBreakpoint, ...] = ()
    parts: tuple[DeclaredPart, ...] = ()  # ascending
    documents: tuple[dict[str, Any], ...] = ()  # each with a text


def conversation(
    messages: Iterable[Message],
    tools: list[dict[str, Any]] | None = None,
    variables: dict[str, Any] | None = None,
    documents: Iterable[dict[str, Any]] = (),
) -> Conversation:
    """Translate messages for templates, and find breakpoints and declared parts in them.

    Raises ValueError for content that is not text, for breakpoints that are too many or of an unknown type or time to
    live, and for a `segment` that is not on a part with a text.
    """
    sent = list(messages)
    breakpoints = [point for i, message in enumerate(sent) for point in _breakpoints(i, message)]
    tool_breakpoints = tuple(point for i, tool in enumerate(tools or ()) for point in _breakpoints_of_tool(i, tool))
    total = len(breakpoints) + len(tool_breakpoints)
    if total > MAX_BREAKPOINTS:
        raise ValueError(f"{total:,} parts have cache_control, at most {MAX_BREAKPOINTS:,} are accepted")
    return Conversation(
        tuple(template_message(message) for message in sent),
        [_plain_tool(tool) for tool in tools] if tools else None,
        variables or {},
        breakpoints=tuple(breakpoints),
        tool_breakpoints=tool_breakpoints,
        parts=tuple(part for i, message in enumerate(sent) for part in _declared_parts(i, message)),
        documents=tuple(documents),
    )


def template_message(message: Message) -> Message:
    """Return a message with its text as one string, arguments of calls decoded, and older spellings replaced."""
    shaped = {key: value for key, value in message.items() if value is not None and key not in ANSWER_ONLY_FIELDS}
    shaped["content"] = "".join(text for text, _ in _texts(message))
    if shaped.get("role") == "function":
        shaped["role"] = "tool"
    calls = shaped.pop("tool_calls", None)
    if not calls and isinstance(called := message.get("function_call"), dict):
        calls = [{"type": "function", "function": called}]
    if calls:
        shaped["tool_calls"] = [_decoded(call) for call in calls]
    if isinstance(thought := message.get("reasoning_content") or message.get("reasoning") or _thought(message), str):
        shaped["reasoning_content"] = thought
    return shaped


def _texts(message: Message) -> list[tuple[str, Any]]:
    """Return the texts of a message's content, each with its part; raise ValueError for parts without text."""
    content = message.get("content")
    if not isinstance(content, list):
        return [(content or message.get("refusal") or "", message)]
    texts = []
    for part in content:
        kind = part.get("type")
        if kind in THOUGHT_PARTS:
            continue
        text = part.get(TEXT_PARTS.get(kind, "")) if isinstance(kind, str) else None
        if not isinstance(text, str):
            raise ValueError(f"content has a part of type {kind!r}, this model takes 'text' with a text")
        texts.append((text, part))
    return texts


def _thought(message: Message) -> str | None:
    """Return the reasoning that a client sends back as parts of the content."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    texts = [part.get("thinking", part.get("text")) for part in parts if part.get("type") in THOUGHT_PARTS]
    return "".join(text for text in texts if isinstance(text, str)) or None


def _breakpoints(number: int, message: Message) -> list[Breakpoint]:
    """Return the breakpoints in a message's content, and at its end."""
    found, characters = dict[int, float | None](), 0
    for text, part in _texts(message):
        characters += len(text)
        if part is not message and (control := _cache_control(part)) is not None:
            found[characters] = _longer(found.get(characters), _ttl(control))
    if (control := _cache_control(message)) is not None:
        found[characters] = _longer(found.get(characters), _ttl(control))
    return [Breakpoint(number, *place) for place in found.items()]


def _breakpoints_of_tool(number: int, tool: dict[str, Any]) -> list[ToolBreakpoint]:
    """Return the breakpoint after a tool, if it has one."""
    times = [_ttl(control) for part in _tool_parts(tool) if (control := _cache_control(part)) is not None]
    return [ToolBreakpoint(number, reduce(_longer, times))] if times else []


def _longer(one: float | None, other: float | None) -> float | None:
    """Return the longer of two times to live at one place, either of which may be None."""
    return max((seconds for seconds in (one, other) if seconds is not None), default=None)


def _cache_control(holder: Any) -> dict[str, Any] | None:
    """Return a cache_control; raise ValueError for a type other than "ephemeral", as Anthropic does."""
    control = holder.get("cache_control") if isinstance(holder, dict) else None
    if control is not None and (not isinstance(control, dict) or control.get("type") != "ephemeral"):
        raise ValueError(f"cache_control is {repr(control)[:100]}, its type must be 'ephemeral'")
    return control


def _ttl(control: dict[str, Any]) -> float | None:
    """Return the time to live in seconds; raise ValueError for values other than Anthropic's."""
    ttl = control.get("ttl")
    if ttl is None:
        return None
    if not isinstance(ttl, str) or ttl not in TIMES_TO_LIVE:
        allowed = " or ".join(map(repr, TIMES_TO_LIVE))
        raise ValueError(f"ttl of cache_control is {repr(ttl)[:100]}, it must be {allowed}")
    return TIMES_TO_LIVE[ttl]


def _declared_parts(number: int, message: Message) -> list[DeclaredPart]:
    """Return the parts with a field `segment`; raise ValueError for an empty segment, or the field on a message."""
    found, characters = [], 0
    for text, part in _texts(message):
        start, characters = characters, characters + len(text)
        declared = part.get("segment")
        if declared is None:
            continue
        if not isinstance(declared, bool):
            raise ValueError(f"segment of message {number} is {repr(declared)[:100]}, it must be true or false")
        if part is message:
            raise ValueError(f"message {number} has a field segment, which only parts of its content may have")
        if declared and not text:
            raise ValueError(f"a segment of message {number} has 0 characters, at least 1 is needed")
        found.append(DeclaredPart(number, start, characters, declared))
    return found


def _tool_parts(tool: dict[str, Any]) -> tuple[Any, Any]:
    return tool, tool.get("function")


def _plain_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Remove cache_control from a tool: templates show all of it, and breakpoints must not change the prompt."""
    plain = {key: value for key, value in tool.items() if key != "cache_control"}
    if isinstance(function := plain.get("function"), dict):
        plain["function"] = {key: value for key, value in function.items() if key != "cache_control"}
    return plain


def _decoded(call: dict[str, Any]) -> dict[str, Any]:
    """Decode the arguments of a call; arguments that are not JSON stay as they are, for the template to handle."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
