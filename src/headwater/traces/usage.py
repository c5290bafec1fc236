"""Usage as APIs report it, and texts of the parts of messages that they log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headwater.traces.reader import whole
from headwater.traces.request import Usage

CALLS = ("name", "input", "arguments", "action")  # of a part that calls a tool
TEXTS = ("text", "thinking", "content", "output", "response", "summary")  # of any other part, in this order


def usage_of(record: Any) -> Usage | None:
    """Return the usage in the form of OpenAI's chat or responses API, of Codex, or of Anthropic; None without one.

    Anthropic's `input_tokens` are those that were neither read from the cache nor written to it.
    """
    if not isinstance(record, Mapping):
        return None
    if {"prompt_tokens", "completion_tokens"} & record.keys():
        details = record.get("prompt_tokens_details") or {}
        counts = {name: record.get(name) or 0 for name in ("prompt_tokens", "completion_tokens")}
        return Usage(whole(counts, "prompt_tokens"), details.get("cached_tokens"), whole(counts, "completion_tokens"))
    if record.get("input_tokens") is None:
        return None
    prompt, output = whole(record, "input_tokens"), record.get("output_tokens") or 0
    if record.get("cache_read_input_tokens") is not None:
        cached = whole(record, "cache_read_input_tokens")
        return Usage(prompt + cached + (record.get("cache_creation_input_tokens") or 0), cached, output)
    details = record.get("input_tokens_details") or {}
    return Usage(prompt, record.get("cached_input_tokens", details.get("cached_tokens")), output)


def part_text(part: Any) -> str:
    """Return the text of a part of a message: text, reasoning, a call of a tool, or its result. Others have none."""
    if isinstance(part, str):
        return part
    if isinstance(part, list):
        return "".join(map(part_text, part))
    if not isinstance(part, Mapping):
        return ""
    if "name" in part or "action" in part:
        return json.dumps({name: part[name] for name in CALLS if name in part}, sort_keys=True, ensure_ascii=False)
    return next((part_text(part[name]) for name in TEXTS if part.get(name)), "")
