"""Tools of a request, which of them may be called, and the schema that an answer has to fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PrivateAttr, model_validator

from headwater.server.http.errors import BadRequest, shown

MODES = ("none", "auto", "required")
MAX_TOOLS = 512
MAX_NAME_CHARACTERS = 256
MAX_WARNING_CHARACTERS = 400  # of names in a warning: a value of a response's metadata has at most 512


FunctionName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS, pattern=r"^[^<>\s]+$")]


class FunctionDefinition(BaseModel, strict=True):
    """Function of a tool, as OpenAI defines it."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def arguments(self) -> Mapping[str, Any]:
        """JSON schema of the arguments."""
        return self.parameters or {"type": "object"}


Tools = Mapping[str, FunctionDefinition]  # by name


class ToolDefinition(BaseModel, strict=True):
    """Tool of a request. `sent` is its JSON unchanged: templates show it in the order of its keys."""

    type: Literal["function"]
    function: FunctionDefinition
    _sent: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep_what_was_sent(cls, value: Any, handler: Any) -> ToolDefinition:
        definition: ToolDefinition = handler(value)
        if isinstance(value, dict):
            definition._sent = value
        return definition

    @property
    def sent(self) -> dict[str, Any]:
        return self._sent


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that an answer may call, and whether it must."""

    mode: str = "auto"  # "auto" | "none" | "required"
    tools: Tools = field(default_factory=dict)
    one: bool = False  # at most one call


def tool_use(definitions: Sequence[ToolDefinition], choice: Any, parallel: bool | None) -> ToolUse:
    """Read `tool_choice` and `parallel_tool_calls`. Raises BadRequest for a choice that names no tool.

    "none" and "auto" are accepted without tools: frameworks send them with every request.
    """
    tools = {definition.function.name: definition.function for definition in definitions}
    mode, names = _chosen(choice)
    if not tools and (mode == "required" or names is not None):
        raise BadRequest(f"tool_choice is {_short(choice)}, but there are 0 tools to choose from", "tool_choice")
    for name in names or ():
        if name not in tools:
            raise BadRequest(f"tool_choice names {name!r}, the tools are {', '.join(map(repr, tools))}", "tool_choice")
    allowed = tools if names is None else {name: tools[name] for name in names}
    return ToolUse(mode, allowed, parallel is False)


def _chosen(choice: Any) -> tuple[str, list[str] | None]:
    """Return the mode, and the names of the allowed tools, None for all."""
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
    raise BadRequest(f"tool_choice allows {_short(tool)}, which is not a function with a name", "tool_choice")


def dropped_tools(types: Iterable[str]) -> list[str]:
    """Return a warning about tools of these types, which run elsewhere, or no warning if there are none."""
    names = ", ".join(map(shown, dict.fromkeys(types)))[:MAX_WARNING_CHARACTERS]
    return [f"left out, since this server runs no tools itself: those of type {names}"] if names else []


def loose_grammars(names: Iterable[Any]) -> list[str]:
    """Return a warning about the grammars of these free-form tools, which no answer is constrained to."""
    listed = ", ".join(map(shown, names))[:MAX_WARNING_CHARACTERS]
    return [f"shown to the model and not enforced: the grammars of {listed}"] if listed else []


def answer_schema(response_format: Any) -> tuple[dict[str, Any] | None, bool]:
    """Return the JSON schema of a response_format, None for text, and whether it is "strict".

    Both kinds are enforced. If the schema is not strict, keywords that cannot be enforced are left out.
    Raises BadRequest for any other response_format.
    """
    match response_format:
        case None | {"type": "text"}:
            return None, False
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)} as given}:
            return schema, given.get("strict") is True
        case {"schema": dict(schema)} if response_format.get("type", "json_schema") in ("json_object", "json_schema"):
            return schema, response_format.get("strict") is True  # llama.cpp's spelling
        case {"type": "json_object"}:
            return {"type": "object"}, False
        case {"type": "json_schema"}:
            raise BadRequest("response_format is of type 'json_schema' without a json_schema.schema", "response_format")
    raise BadRequest(
        f"response_format is {_short(response_format)}, its type must be 'text', 'json_object' or 'json_schema'",
        "response_format",
    )


def _short(value: Any) -> str:
    return repr(value)[:100]
