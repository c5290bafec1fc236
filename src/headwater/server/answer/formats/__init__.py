"""Formats in which model families write reasoning and tool calls, by name in two tables."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TypeVar

from headwater.server.answer.formats import json_calls, python_calls, xml_calls
from headwater.server.answer.formats.harmony import HARMONY
from headwater.server.answer.formats.parser import ReasoningFormat, ToolFormat

Format = TypeVar("Format", ReasoningFormat, ToolFormat)

# "auto" takes the first format whose marks are in the chat template.
REASONING: dict[str, ReasoningFormat] = {
    # Qwen, DeepSeek, Nemotron, Ring, MiniMax-M1, Falcon-H1R and most others. M1's chat template leaves reasoning to the
    # model and has no tag; it names the model in its system prompt.
    "think": ReasoningFormat("<think>", "</think>", ("MiniMax-M1",)),
    "harmony": HARMONY,  # gpt-oss; has its own calls
}
TOOLS: dict[str, ToolFormat] = {
    "qwen_xml": xml_calls.QWEN_XML,
    "hermes": json_calls.HERMES,
    "nemotron": json_calls.NEMOTRON,
    "kimi": json_calls.KIMI,
    "jamba": json_calls.JAMBA,
    "minimax": json_calls.MINIMAX,
    "minimax_xml": xml_calls.MINIMAX_XML,
    "granite": json_calls.GRANITE,
    "python": python_calls.PYTHON,
}


def chosen(table: Mapping[str, Format], name: str, template: str) -> Format | None:
    """Return a format by name, or for "auto" the first one that the chat template uses; None for "none".

    None also if "auto" recognises no format. Raises KeyError for a name that is not in the table.
    """
    if name == "auto":
        return next((format_ for format_ in table.values() if format_.used_by(template)), None)
    return None if name == "none" else table[name]


reasoning_format = partial(chosen, REASONING)
tool_format = partial(chosen, TOOLS)
