"""Normal form of a conversation: its messages as one model's chat template takes them, whatever form clients send.

The form of a message depends on the messages before it only, so that the next turn's prompt begins as this one's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

Message = dict[str, Any]
Part = dict[str, Any]

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # type -> its field
THOUGHT_PARTS = ("thinking", "redacted_thinking", "reasoning")  # not content, but clients send them back
MARKS = ("cache_control", "segment")  # fields of a part besides its content
MAX_TYPE_CHARACTERS = 32  # of a part's type in a placeholder
# First lines of system texts that agents write for a provider's accounting, and that differ in each request
BILLING_LINES = ("x-anthropic-billing-header:",)
INVALID = "INVALID_JSON"  # key of arguments that are not an object
GAP: Part = {"type": "text", "text": "\n\n"}  # between texts that become one
EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
KIMI_ID = re.compile(r"functions\.[^\s:<>]+:\d+")
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


def text_parts(message: Message) -> list[Part]:
    """Return a message's content as parts with texts: without thoughts, and with placeholders for other types."""
    content = message.get("content")
    if not isinstance(content, list):
        return [{"type": "text", "text": content or message.get("refusal") or ""}]
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return [_as_text(part) for part in parts if part.get("type") not in THOUGHT_PARTS]


def _as_text(part: Part) -> Part:
    if not has_text(part):
        return placeholder(part)
    return {**part, "type": "text", "text": part[TEXT_PARTS[part.get("type", "text")]]}


def has_text(part: Part) -> bool:
    """Return whether a part is of a type with a text, and has one."""
    kind = part.get("type", "text")
    return isinstance(kind, str) and isinstance(part.get(TEXT_PARTS.get(kind, "")), str)


def placeholder(part: Part) -> Part:
    """Return a text that stands for a part without one, such as an image. Fields besides its content stay."""
    kind = re.sub(r"\W+", " ", str(part.get("type"))).strip()[:MAX_TYPE_CHARACTERS]
    empty = kind in TEXT_PARTS  # a text part whose text is null
    text = "" if empty else f"[{kind} left out]"
    return {"type": "text", "text": text} | {name: part[name] for name in MARKS if name in part}


def thought(message: Message) -> str | None:
    """Return the reasoning that a client sends back, as a field or as parts of the content."""
    for name in ("reasoning_content", "reasoning", "thinking"):
        if isinstance(given := message.get(name), str) and given:
            return given
    content = message.get("content")
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    found = [part.get("thinking", part.get("text")) for part in parts if part.get("type") in THOUGHT_PARTS]
    return "".join(text for text in found if isinstance(text, str)) or None


def is_tool_response(text: str) -> bool:
    """Return whether a user's text is the result of a tool, which some clients send so."""
    plain = text.strip()
    return plain.startswith("<tool_response>") and plain.endswith("</tool_response>")


@dataclass(frozen=True, slots=True)
class MessageRules:
    """Rules that a chat template sets for messages, found by probing it, and the server's own."""

    first_system: bool = True  # a system message at the start is shown
    later_system: bool = True  # so is one after other messages, at its place
    developer: bool = False  # developer is a role of its own; otherwise it is the system
    merged_roles: tuple[str, ...] = ()  # of messages that may not follow one of their own role
    fills_turns: bool = False  # nor may they with only calls and results between them
    single_calls: bool = False  # a message has one call at most
    opens_with_query: bool = False  # the first message after the system's has to be a user's query
    separators: Mapping[str, str] = field(default_factory=dict)  # between parts of a content, by role
    thought_field: str = "reasoning_content"  # name of the field with an assistant's reasoning
    shows_call_ids: bool = False  # ids of calls are part of the prompt, as functions.NAME:N
    thinks_by_word: bool = False  # /think and /no_think in the system's text switch the reasoning
    joins_thought: bool = False  # a message with a call has reasoning or a content, not both
    efforts: tuple[str, ...] = ()  # levels of reasoning that it knows, ascending
    billing: bool = False  # billing lines stay

    def effort(self, wanted: str) -> str:
        """Return the level of reasoning that the template knows and that is nearest to a wanted one."""
        if wanted in self.efforts or wanted not in EFFORTS or not self.efforts:
            return wanted
        return min(self.efforts, key=lambda known: abs(EFFORTS.index(known) - EFFORTS.index(wanted)))


@dataclass(frozen=True, slots=True)
class NormalMessage:
    """Message in normal form: its content is a list of parts with texts."""

    message: Message
    origin: int  # number of the client's message that it comes from, or that it was put before


class RefusedPart(ValueError):
    """Part of a content that no template could show. `reason` continues the name of the message or item."""

    def __init__(self, message: int, reason: str) -> None:
        super().__init__(f"message {message} {reason}")
        self.message, self.reason = message, reason


def normal_form(sent: Sequence[Message], rules: MessageRules, thinks: bool | None = None) -> list[NormalMessage]:
    """Return the messages in normal form. `thinks`: reasoning is switched on or off; None: the template decides.

    Raises ValueError for content other than text in a user's message that no answer follows: older ones, and those in
    results of tools, become placeholders.
    """
    new = 1 + max((i for i, message in enumerate(sent) if message["role"] == "assistant"), default=-1)
    shaped = []
    for number, message in enumerate(sent):
        _refuse_parts(number, message, new=number >= new and message["role"] == "user")
        shaped.append(NormalMessage(_shaped(message, rules), number))
    if rules.shows_call_ids:
        shaped = list(_with_call_ids(shaped))
    shaped = _with_one_system(shaped, rules, thinks)
    if rules.single_calls:
        shaped = _with_single_calls(shaped)
    if rules.opens_with_query:
        shaped = _opened(shaped)
    return list(_alternating(shaped, rules)) if rules.merged_roles else shaped


def _refuse_parts(number: int, message: Message, new: bool) -> None:
    """Raise RefusedPart for parts with a text that is not one, and for new parts of other types."""
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        if isinstance(part, str) or has_text(part):
            continue
        kind = part.get("type")
        text = part.get(TEXT_PARTS[kind]) if isinstance(kind, str) and kind in TEXT_PARTS else part
        if text is not None and (text is not part or (new and kind not in THOUGHT_PARTS)):
            has = f"of role {message['role']!r} has a part of type {kind!r}"
            raise RefusedPart(number, f"{has}, and this model takes text only: 'text' with a text")


def _shaped(message: Message, rules: MessageRules) -> Message:
    """Return a message with parts that have texts, its calls decoded, and older spellings replaced."""
    shaped = {name: value for name, value in message.items() if value is not None and name not in ANSWER_ONLY_FIELDS}
    role = {"function": "tool", "developer": "developer" if rules.developer else "system"}.get(
        message["role"], message["role"]
    )
    parts = text_parts(message)
    if role == "system" and not rules.billing:
        parts = [part for part in map(_without_billing, parts) if part["text"] or len(parts) == 1]
    shaped |= {"role": role, "content": _separated(parts, rules.separators.get(str(role), ""))}
    if (control := message.get("cache_control")) is not None:
        shaped["content"].append({"type": "text", "text": "", "cache_control": control})
    calls = shaped.pop("tool_calls", None)
    if not calls and isinstance(called := message.get("function_call"), dict):
        calls = [{"type": "function", "function": called}]
    for call in calls or ():
        if (plain := decoded(call)) is None:
            shaped["content"].append({"type": "text", "text": json.dumps(call)})
        else:
            shaped.setdefault("tool_calls", []).append(plain)
    for name in ("reasoning_content", "thinking"):
        shaped.pop(name, None)
    if (reasoning := thought(message)) is not None:
        shaped[rules.thought_field] = reasoning
        texts = [part["text"] for part in shaped["content"] if part["text"]]
        if rules.joins_thought and texts and "tool_calls" in shaped:
            shaped |= {rules.thought_field: "\n".join((reasoning, *texts)), "content": []}
    return shaped


def mapping(arguments: Any) -> dict[str, Any]:
    """Return arguments as a mapping, which templates expect.

    Those that are not a JSON object, as of an answer that was cut off, become its one value, named as Anthropic does.
    """
    value = arguments
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(arguments or "{}", parse_constant=_refuse)
    if isinstance(value, dict) or value is None:
        return value or {}
    return {INVALID: arguments}


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def decoded(call: Any) -> dict[str, Any] | None:
    """Return a call with its arguments as a mapping; None for a call without a name."""
    if not isinstance(call, dict):
        return None
    if isinstance(custom := call.get("custom"), dict):  # a call of a free-form tool
        function = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
        call = {"id": call.get("id"), "function": function}
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str) or not name:
        return None
    named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**named, "type": "function", "function": {"name": name, "arguments": mapping(function.get("arguments"))}}


def _without_billing(part: Part) -> Part:
    """Remove a billing line: with it, no prompt would begin like the one before."""
    if not part["text"].startswith(BILLING_LINES):
        return part
    return {**part, "text": part["text"].partition("\n")[2]}


def _separated(parts: Iterable[Part], separator: str) -> list[Part]:
    """Put the template's separator between parts, except before the first text."""
    separated: list[Part] = []
    for part in parts:
        if separator and any(earlier["text"] for earlier in separated):
            separated.append({"type": "text", "text": separator})
        separated.append(part)
    return separated


def _with_one_system(shaped: list[NormalMessage], rules: MessageRules, thinks: bool | None) -> list[NormalMessage]:
    """Merge the system's messages at the start into one, and give later ones a form that the template shows."""
    start = next((i for i, one in enumerate(shaped) if one.message["role"] not in ("system", "developer")), len(shaped))
    leading = _merged(shaped[:start])
    if rules.thinks_by_word and thinks is not None:
        word = {"type": "text", "text": "/think" if thinks else "/no_think"}
        first = leading or [NormalMessage({"role": "system", "content": []}, 0)]
        leading = [_extended(first[0], [word, *([GAP] if first[0].message["content"] else [])], before=True)]
    if not rules.first_system:
        leading = [_as_user(one) for one in leading]
    later = shaped[start:]
    if not rules.later_system:
        later = [_as_user(one) if one.message["role"] == "system" else one for one in later]
    return leading + later


def _merged(same: Sequence[NormalMessage]) -> list[NormalMessage]:
    """Merge messages of one role, at most into one, with an empty line between their texts."""
    if len(same) < 2:
        return list(same)
    first, *others = same
    for other in others:
        parts = other.message["content"]
        first = _extended(first, [GAP, *parts] if _text(first) and _text(other) else parts)
    return [first]


def _extended(one: NormalMessage, parts: list[Part], before: bool = False) -> NormalMessage:
    content = one.message["content"]
    return NormalMessage({**one.message, "content": parts + content if before else content + parts}, one.origin)


def _text(one: NormalMessage) -> str:
    return "".join(part["text"] for part in one.message["content"])


def _as_user(one: NormalMessage) -> NormalMessage:
    """Return a system's message as a user's that says so, for a template that shows no system's message there."""
    opened, closed = ({"type": "text", "text": text} for text in ("<system>\n", "\n</system>"))
    return NormalMessage(
        {**one.message, "role": "user", "content": [opened, *one.message["content"], closed]}, one.origin
    )


def _opened(shaped: list[NormalMessage]) -> list[NormalMessage]:
    """Put an empty query after the system's message unless the user's first query is there."""
    start = 1 if shaped and shaped[0].message["role"] in ("system", "developer") else 0
    if shaped[start:] and shaped[start].message["role"] == "user" and not is_tool_response(_text(shaped[start])):
        return shaped
    return [*shaped[:start], NormalMessage({"role": "user", "content": []}, start), *shaped[start:]]


def _alternating(shaped: Iterable[NormalMessage], rules: MessageRules) -> Iterator[NormalMessage]:
    """Merge messages of one role that follow each other, and fill turns between calls with an empty message."""
    last: NormalMessage | None = None  # not yielded yet
    turn = None  # role of the last message that is neither call nor result
    for one in shaped:
        role = _turn_of(one)
        if last is not None and role is not None and _turn_of(last) == role in rules.merged_roles:
            last = _merged([last, one])[0]
            continue
        if last is not None:
            yield last
        if rules.fills_turns and role is not None:
            if role == turn:
                yield NormalMessage({"role": "assistant" if role == "user" else "user", "content": []}, one.origin)
            turn = role
        last = one
    if last is not None:
        yield last


def _turn_of(one: NormalMessage) -> str | None:
    """Return the role of a user's message, or of an assistant's without calls; None for others."""
    role = str(one.message["role"])
    return role if role in ("user", "assistant") and not one.message.get("tool_calls") else None


def _with_single_calls(shaped: Sequence[NormalMessage]) -> list[NormalMessage]:
    """Write several calls of a message as messages with one call each, which its result follows."""
    split: list[NormalMessage] = []
    taken: set[int] = set()
    for number, one in enumerate(shaped):
        calls = one.message.get("tool_calls", ())
        if len(calls) < 2:
            split += [] if number in taken else [one]
            continue
        results = list(takewhile(lambda i: shaped[i].message["role"] == "tool", range(number + 1, len(shaped))))
        for i, call in enumerate(calls):
            own = next((r for r in results if shaped[r].message.get("tool_call_id") == call.get("id")), None)
            whole = one.message if i == 0 else {"role": one.message["role"], "content": []}
            split.append(NormalMessage({**whole, "tool_calls": [call]}, one.origin))
            if own is not None and own not in taken:
                split.append(shaped[own])
                taken.add(own)
    return split


def _with_call_ids(shaped: Iterable[NormalMessage]) -> Iterator[NormalMessage]:
    """Give calls that another model made the ids that this model writes, and name them so in their results."""
    renamed, waiting, number = dict[Any, str](), list[str](), 0
    for one in shaped:
        message = one.message
        calls = []
        for call in message.get("tool_calls", ()):
            known = isinstance(sent := call.get("id"), str) and KIMI_ID.fullmatch(sent)
            written = sent if known else f"functions.{call['function']['name']}:{number}"
            renamed[sent], number = written, number + 1
            waiting.append(written)
            calls.append({**call, "id": written})
        if calls:
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            sent = message.get("tool_call_id")
            answered = renamed.get(sent if isinstance(sent, str) else None) or (waiting[0] if waiting else None)
            waiting = [other for other in waiting if other != answered]
            if answered is not None:
                message = {**message, "tool_call_id": answered}
        yield NormalMessage(message, one.origin)
