"""Conversations as chat templates expect them, with the places in them that clients mark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import reduce
from typing import Any

from headwater.request import TIMES_TO_LIVE
from headwater.server.requests.normal_form import Message, MessageRules, NormalMessage, normal_form

MAX_BREAKPOINTS = 4  # of cache_control in a request, as at Anthropic
PLAIN = MessageRules()  # of a template that shows each message as it is


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
    written: dict[int, str] = field(default_factory=dict)  # texts of calls as the model wrote them, by message
    origins: tuple[int, ...] = ()  # of each message: the number of the client's that it comes from; empty: its own

    @property
    def numbers(self) -> Sequence[int]:
        """Numbers of the messages as the client counts them."""
        return self.origins or range(len(self.messages))


def conversation(
    messages: Iterable[Message],
    tools: list[dict[str, Any]] | None = None,
    variables: dict[str, Any] | None = None,
    documents: Iterable[dict[str, Any]] = (),
    rules: MessageRules = PLAIN,
) -> Conversation:
    """Return the conversation in normal form, with the breakpoints and declared parts in it.

    Raises ValueError as `normal_form` does, for breakpoints that are too many or of an unknown type or time to live,
    and for a `segment` that is not on a part with a text.
    """
    variables = dict(variables or {})
    if isinstance(effort := variables.get("reasoning_effort"), str):
        variables["reasoning_effort"] = rules.effort(effort)
    sent = list(messages)
    for number, message in enumerate(sent):
        if message.get("segment") is not None:
            raise ValueError(f"message {number} has a field segment, which only parts of its content may have")
    normal = normal_form(sent, rules, variables.get("enable_thinking"))
    breakpoints = [point for i, one in enumerate(normal) for point in _breakpoints(i, one.message)]
    tool_breakpoints = tuple(point for i, tool in enumerate(tools or ()) for point in _breakpoints_of_tool(i, tool))
    total = len(breakpoints) + len(tool_breakpoints)
    if total > MAX_BREAKPOINTS:
        raise ValueError(f"{total:,} parts have cache_control, at most {MAX_BREAKPOINTS:,} are accepted")
    return Conversation(
        tuple({**one.message, "content": "".join(part["text"] for part in one.message["content"])} for one in normal),
        [_plain_tool(tool) for tool in tools] if tools else None,
        variables,
        breakpoints=tuple(breakpoints),
        tool_breakpoints=tool_breakpoints,
        parts=tuple(part for i, one in enumerate(normal) for part in _declared_parts(i, one)),
        documents=tuple(documents),
        origins=tuple(one.origin for one in normal),
    )


def _breakpoints(number: int, message: Message) -> list[Breakpoint]:
    """Return the breakpoints in a message's content."""
    found, characters = dict[int, float | None](), 0
    for part in message["content"]:
        characters += len(part["text"])
        if (control := _cache_control(part)) is not None:
            found[characters] = _longer(found.get(characters), _ttl(control))
    return [Breakpoint(number, *place) for place in found.items()]


def _breakpoints_of_tool(number: int, tool: dict[str, Any]) -> list[ToolBreakpoint]:
    """Return the breakpoint after a tool, if it has one."""
    times = [_ttl(control) for part in (tool, tool.get("function")) if (control := _cache_control(part)) is not None]
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


def _declared_parts(number: int, one: NormalMessage) -> list[DeclaredPart]:
    """Return the parts with a field `segment`; raise ValueError for an empty segment."""
    found, characters = [], 0
    for part in one.message["content"]:
        start, characters = characters, characters + len(part["text"])
        declared = part.get("segment")
        if declared is None:
            continue
        if not isinstance(declared, bool):
            raise ValueError(f"segment of message {one.origin} is {repr(declared)[:100]}, it must be true or false")
        if declared and not part["text"]:
            raise ValueError(f"a segment of message {one.origin} has 0 characters, at least 1 is needed")
        found.append(DeclaredPart(number, start, characters, declared))
    return found


def _plain_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Remove cache_control from a tool: templates show all of it, and breakpoints must not change the prompt."""
    plain = {key: value for key, value in tool.items() if key != "cache_control"}
    if isinstance(function := plain.get("function"), dict):
        plain["function"] = {key: value for key, value in function.items() if key != "cache_control"}
    return plain
