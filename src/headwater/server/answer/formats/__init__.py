"""How model families write reasoning and tool calls: one file a format, by name in these tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from headwater.server.answer.formats.granite import GRANITE
from headwater.server.answer.formats.hermes import HERMES
from headwater.server.answer.formats.jamba import JAMBA
from headwater.server.answer.formats.kimi import Kimi
from headwater.server.answer.formats.minimax import MINIMAX
from headwater.server.answer.formats.minimax_xml import MINIMAX_XML
from headwater.server.answer.formats.nemotron import NEMOTRON
from headwater.server.answer.formats.qwen_xml import QWEN_XML
from headwater.server.answer.formats.reasoning import ReasoningFormat
from headwater.server.answer.formats.think import THINK
from headwater.server.answer.formats.tools import ToolFormat

Format = TypeVar("Format", ReasoningFormat, ToolFormat)

# The first whose marks are in a chat template is the model's.
REASONING: dict[str, ReasoningFormat] = {"think": THINK}
TOOLS: dict[str, ToolFormat] = {
    "qwen_xml": QWEN_XML,
    "hermes": HERMES,
    "nemotron": NEMOTRON,
    "kimi": Kimi(),
    "jamba": JAMBA,
    "minimax": MINIMAX,
    "minimax_xml": MINIMAX_XML,
    "granite": GRANITE,
}


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """By name, or told from the chat template ("auto"); None for "none" and where nothing tells.

    Raises KeyError for a name that is not in the table.
    """
    return _chosen(REASONING, name, template)


def tool_format(name: str, template: str) -> ToolFormat | None:
    """Likewise for tool calls."""
    return _chosen(TOOLS, name, template)


def _chosen(table: Mapping[str, Format], name: str, template: str) -> Format | None:
    if name == "auto":
        return next((format_ for format_ in table.values() if format_.told_by(template)), None)
    return None if name == "none" else table[name]
