"""Content of a message: a text, or parts with texts; parts of other types become placeholders or are refused."""

from __future__ import annotations

import re
from typing import Any

Message = dict[str, Any]
Part = dict[str, Any]

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # type -> its field
THOUGHT_PARTS = ("thinking", "redacted_thinking", "reasoning")  # not content, but clients send them back
MARKS = ("cache_control", "segment")  # fields of a part besides its content
MAX_TYPE_CHARACTERS = 32  # of a part's type in a placeholder


def text_parts(message: Message) -> list[Part]:
    """Return a message's content as parts with texts: without thoughts, and with placeholders for other types."""
    content = message.get("content")
    if not isinstance(content, list):
        return [{"type": "text", "text": content or message.get("refusal") or ""}]
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return [_as_text(part) for part in parts if part.get("type") not in THOUGHT_PARTS]


def _as_text(part: Part) -> Part:
    return (
        {**part, "type": "text", "text": part[TEXT_PARTS[part.get("type", "text")]]}
        if has_text(part)
        else placeholder(part)
    )


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
