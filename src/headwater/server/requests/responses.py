"""Request of OpenAI's Responses API, and its items, tools and formats as chat completions write them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, get_args

from pydantic import Field, TypeAdapter, ValidationError, field_validator

from headwater.server.http.errors import BadRequest, shown
from headwater.server.requests.chat import ChatMessage, ConversationRequest, Effort, Messages, thinking_variables
from headwater.server.requests.items import (
    CALL_ITEMS,
    ClientTool,
    Named,
    checked,
    flat_name,
    flat_tools,
    is_list_of_objects,
    messages_of,
    tools_of_search,
    translated,
)
from headwater.server.requests.messages import PLAIN, Conversation
from headwater.server.requests.normal_form import MessageRules, RefusedPart
from headwater.server.requests.sampling import NEUTRAL, TokenLimit, limited
from headwater.server.requests.tools import (
    MAX_TOOLS,
    ToolDefinition,
    ToolUse,
    dropped_tools,
    loose_grammars,
    tool_use,
)

# the server keeps nothing between requests, and gives one answer
STORELESS: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "truncation": ("disabled", "auto"),
    "top_logprobs": (0,),
    "n": (1,),
}
NAMED_CHOICES = ("function", "custom")  # types of a tool_choice that names one tool

MESSAGES, TOOL = TypeAdapter(Messages), TypeAdapter(ToolDefinition)


class ResponsesRequest(ConversationRequest):
    """Body of /v1/responses."""

    neutral: ClassVar = STORELESS | NEUTRAL
    format_field: ClassVar = "text.format"

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: TokenLimit | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None  # its effort is used; all of the reasoning is returned
    metadata: dict[str, str] | None = Field(None, max_length=16)
    user: str | None = None

    @field_validator("input")
    @classmethod
    def _not_empty(cls, value: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        if not value:
            raise ValueError("has 0 items, at least 1 is needed")
        return value

    @field_validator("reasoning")
    @classmethod
    def _known_effort(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value and value.get("effort") is not None and value["effort"] not in get_args(Effort):
            raise ValueError(f"effort is {shown(value['effort'])}, it must be one of {', '.join(get_args(Effort))}")
        return value

    def chat_messages(self) -> list[ChatMessage]:
        messages = messages_of(self.input)
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        return checked(MESSAGES, messages, {"input": self.input}, "input")

    def chat_tools(self) -> list[ToolDefinition]:
        tools = [tool for tool in self._tools() if tool.run_by_client]
        if len(tools) > MAX_TOOLS:
            raise BadRequest(f"tools has {len(tools):,} functions, at most {MAX_TOOLS:,} are accepted", "tools")
        body = {"tools": self.tools, "input": self.input}
        return [checked(TOOL, tool.function(), body, *tool.place) for tool in tools]

    def chat_choice(self) -> Any:
        choice = self.tool_choice
        if not isinstance(choice, dict):
            return choice
        kind = choice.get("type")
        if kind in NAMED_CHOICES:
            return {"type": "function", "function": {"name": flat_name(choice)}}
        if kind == "allowed_tools" and is_list_of_objects(choice.get("tools")):
            names = [flat_name(tool) for tool in choice["tools"] if tool.get("type") in NAMED_CHOICES]
            allowed = [{"type": "function", "function": {"name": name}} for name in names]
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": allowed}}
        takes = "this server takes 'function', 'custom' and 'allowed_tools'"
        raise BadRequest(f"tool_choice is of type {kind!r}, {takes}", "tool_choice")

    def chat_format(self) -> Any:
        match (self.text or {}).get("format"):
            case None | {"type": "text" | "json_object"} as chosen:
                return chosen
            case {"type": "json_schema", "schema": dict()} as chosen:
                return {"type": "json_schema", "json_schema": {name: v for name, v in chosen.items() if name != "type"}}
            case {"type": "json_schema"}:
                raise BadRequest("text.format is of type 'json_schema' and has no object as its schema", "text.format")
            case chosen:
                types = "its type must be 'text', 'json_object' or 'json_schema'"
                raise BadRequest(f"text.format is {shown(chosen)}, {types}", "text.format")

    def conversation(self, rules: MessageRules = PLAIN) -> Conversation:
        try:
            return super().conversation(rules)
        except RefusedPart as error:
            number = translated(self._items()).origins[error.message - bool(self.instructions)]
            raise BadRequest(f"item {number} {error.reason}", f"input.{number}.content") from error
        except ValueError as error:
            raise BadRequest(str(error), "input") from error

    @property
    def wanted_tokens(self) -> int | None:
        return limited(self.max_output_tokens)

    @property
    def template_variables(self) -> dict[str, Any]:
        return thinking_variables((self.reasoning or {}).get("effort")) | super().template_variables

    @property
    def tool_use(self) -> ToolUse:
        """Tools that may be called, with those that a search found: the template shows them as its result."""
        found = [definition for tool in self._found() if (definition := valid(tool)) is not None]
        return tool_use([*found, *self.chat_tools()], self.chat_choice(), self.parallel_tool_calls)

    @property
    def left_out(self) -> list[str]:
        tools = list(self._tools())
        dropped = dropped_tools(tool.kind for tool in tools if not tool.run_by_client)
        names = [tool.named["name"] for tool in tools if tool.has_grammar]
        return dropped + loose_grammars(names)

    @property
    def call_items(self) -> dict[str, Named]:
        """Types and names of items with calls, as the client knows them, by the names that the model sees."""
        tools = [tool for tool in (*self._found(), *self._tools()) if tool.run_by_client]
        named = [(flat_name(tool.named), {"type": CALL_ITEMS[tool.kind], **tool.named}) for tool in tools]
        return {name: call for name, call in named if isinstance(name, str)}

    def _tools(self) -> Iterator[ClientTool]:
        """Yield the request's tools, and those that items add. Raises BadRequest for a namespace without tools."""
        yield from flat_tools(self.tools, "tools")
        for number, item in enumerate(self._items()):
            if item.get("type") == "additional_tools":
                yield from flat_tools(item.get("tools"), "input", number, "tools")

    def _found(self) -> Iterator[ClientTool]:
        return (
            tool for item in self._items() if item.get("type") == "tool_search_output" for tool in tools_of_search(item)
        )

    def _items(self) -> list[dict[str, Any]]:
        return self.input if isinstance(self.input, list) else []


def valid(tool: ClientTool) -> ToolDefinition | None:
    """Return a tool's definition, None if it is invalid."""
    try:
        return TOOL.validate_python(tool.function())
    except (BadRequest, ValidationError):
        return None
