"""The tools of a request and which of them it wants called, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from headwater.server.answer.formats.tools import Tool, Tools
from headwater.server.http.errors import BadRequest

MODES = ("none", "auto", "required")
MAX_TOOLS = 512
MAX_NAME = 256  # characters


class FunctionDefinition(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str = Field(min_length=1, max_length=MAX_NAME, pattern=r"^[^<>\s]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(BaseModel):
    """A tool as it was sent; templates show it so, in the order of its keys."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: FunctionDefinition
    _sent: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep_what_was_sent(cls, value: Any, handler: Any) -> ToolDefinition:
        made: ToolDefinition = handler(value)
        if isinstance(value, dict):
            made._sent = value
        return made

    @property
    def sent(self) -> dict[str, Any]:
        return self._sent

    @property
    def tool(self) -> Tool:
        function = self.function
        return Tool(function.name, function.parameters or {"type": "object"}, bool(function.strict))


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What may become of a request's tools."""

    mode: str = "auto"  # "auto" | "none" | "required"
    tools: Tools = field(default_factory=dict)
    one: bool = False  # at most one call


def tool_use(definitions: Sequence[ToolDefinition], choice: Any, parallel: bool | None) -> ToolUse:
    """The tools that may be called, and whether one must be. Raises BadRequest for a choice that names no tool.

    "none" and "auto" without tools ask for nothing, and are let pass: frameworks send them with every request.
    """
    tools = {definition.function.name: definition.tool for definition in definitions}
    mode, names = _chosen(choice)
    if not tools and (mode == "required" or names is not None):
        raise BadRequest(f"tool_choice is {_short(choice)}, but there are 0 tools to choose from", "tool_choice")
    for name in names or ():
        if name not in tools:
            raise BadRequest(f"tool_choice names {name!r}, the tools are {', '.join(map(repr, tools))}", "tool_choice")
    allowed = tools if names is None else {name: tools[name] for name in names}
    return ToolUse(mode, allowed, parallel is False)


def _chosen(choice: Any) -> tuple[str, list[str] | None]:
    """The mode, and the names that are allowed, None for all."""
    match choice:
        case None:
            return "auto", None
        case str() if choice in MODES:
            return choice, None
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return "required", [name]
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)}}:
            return mode, [_allowed_name(tool) for tool in tools]
    raise BadRequest(
        f"tool_choice is {_short(choice)}, must be one of {', '.join(map(repr, MODES))}, "
        "{'type': 'function', 'function': {'name': …}} or {'type': 'allowed_tools', …}",
        "tool_choice",
    )


def _allowed_name(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise BadRequest(f"tool_choice allows {_short(tool)}, which is no function with a name", "tool_choice")


def _short(value: Any) -> str:
    return repr(value)[:100]
