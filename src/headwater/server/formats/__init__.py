"""How model families write reasoning and tool calls: one file a format, by name in these tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from headwater.server.formats.granite import GRANITE
from headwater.server.formats.hermes import HERMES
from headwater.server.formats.jamba import JAMBA
from headwater.server.formats.kimi import Kimi
from headwater.server.formats.minimax import MINIMAX
from headwater.server.formats.minimax_xml import MINIMAX_XML
from headwater.server.formats.nemotron import NEMOTRON
from headwater.server.formats.qwen_xml import QWEN_XML
from headwater.server.formats.reasoning import ReasoningFormat
from headwater.server.formats.think import THINK
from headwater.server.formats.tools import ToolFormat

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
