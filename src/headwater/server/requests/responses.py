"""Request of OpenAI's Responses API, and its items, tools and formats as chat completions write them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, TypeVar, get_args

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, field_validator

from headwater.server.http.errors import BadRequest, shown
from headwater.server.requests.chat import ChatMessage, ConversationRequest, Effort, Messages, thinking_variables
from headwater.server.requests.content import Message
from headwater.server.requests.messages import PLAIN, Conversation
from headwater.server.requests.normal_form import MessageRules
from headwater.server.requests.sampling import NEUTRAL, TokenLimit, limited
from headwater.server.requests.tools import MAX_TOOLS, ToolDefinition, dropped_tools

# the server keeps nothing between requests, and gives one answer
STORELESS: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "n": (1,),
}
TEXT_PARTS = ("input_text", "output_text")

Checked = TypeVar("Checked")
Named = dict[str, Any]  # a name of a function, and the namespace that it belongs to
Place = tuple[int | str, ...]  # keys that lead to a value of the body


class CallOutput(BaseModel):
    """Item with the output of a call."""

    output: str | list[dict[str, Any]]


MESSAGE, MESSAGES, OUTPUT = TypeAdapter(ChatMessage), TypeAdapter(Messages), TypeAdapter(CallOutput)
TOOL = TypeAdapter(ToolDefinition)


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
        messages = with_instructions(self.instructions, messages_of(self.input))
        return checked(MESSAGES, messages, {"input": self.input}, "input")

    def chat_tools(self) -> list[ToolDefinition]:
        functions = [one for one in self._flat_tools() if one[-1].get("type") == "function"]
        if len(functions) > MAX_TOOLS:
            raise BadRequest(f"tools has {len(functions):,} functions, at most {MAX_TOOLS:,} are accepted", "tools")
        body = {"tools": self.tools}
        return [checked(TOOL, chat_tool(space, tool), body, "tools", *place) for place, space, tool in functions]

    def chat_choice(self) -> Any:
        if not isinstance(self.tool_choice, dict):
            return self.tool_choice
        kind = self.tool_choice.get("type")
        if kind != "function":
            raise BadRequest(f"tool_choice is of type {kind!r}, this server takes 'function' only", "tool_choice")
        return {"type": "function", "function": {"name": flat_name(self.tool_choice)}}

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
        except ValueError as error:
            raise BadRequest(str(error), "input") from error

    @property
    def wanted_tokens(self) -> int | None:
        return limited(self.max_output_tokens)

    @property
    def template_variables(self) -> dict[str, Any]:
        return thinking_variables((self.reasoning or {}).get("effort")) | super().template_variables

    @property
    def warnings(self) -> list[str]:
        return dropped_tools(str(tool.get("type")) for *_, tool in self._flat_tools() if tool.get("type") != "function")

    @property
    def named_in_spaces(self) -> dict[str, Named]:
        """Names of calls as a client with namespaces knows them, by the names that the model sees."""
        spaced = [(namespace, tool.get("name")) for _, namespace, tool in self._flat_tools() if namespace is not None]
        named = [{"namespace": namespace, "name": name} for namespace, name in spaced if isinstance(name, str)]
        return {flat_name(one): one for one in named}

    def _flat_tools(self) -> Iterator[tuple[Place, str | None, dict[str, Any]]]:
        """Yield each tool with its place and namespace, if any. Raises BadRequest for a namespace without tools."""
        for number, tool in enumerate(self.tools or ()):
            if tool.get("type") != "namespace":
                yield (number,), None, tool
                continue
            name, inner = tool.get("name"), tool.get("tools")
            if not isinstance(name, str) or not isinstance(inner, list) or not all(isinstance(t, dict) for t in inner):
                raise BadRequest("tools has a namespace that lacks its name or its list of tools", f"tools.{number}")
            yield from (((number, "tools", i), name, one) for i, one in enumerate(inner))


def checked(adapter: TypeAdapter[Checked], value: Any, body: dict[str, Any], *place: int | str) -> Checked:
    """Validate a value; raise RequestValidationError if it is invalid, which names its place in the client's body."""
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        errors = [{**e, "loc": ("body", *place, *e["loc"])} for e in error.errors()]
        raise RequestValidationError(errors, body=body) from error


def messages_of(items: str | list[dict[str, Any]]) -> list[Message]:
    """Translate input items to messages: consecutive reasoning, text and calls of an assistant are one message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    body = {"input": items}
    for number, item in enumerate(items):
        kind = str(item.get("type", "message"))
        if kind not in ITEMS:
            takes = f"this server takes {', '.join(ITEMS)}"
            raise BadRequest(f"input has an item of type {kind!r}, {takes}", f"input.{number}.type")
        if kind == "function_call_output":
            checked(OUTPUT, item, body, "input", number)
        elif kind == "message" and not (item.get("content") is None and _continues_answer(messages, item)):
            checked(MESSAGE, {name: item[name] for name in ("role", "content") if name in item}, body, "input", number)
        ITEMS[kind](messages, item)
    return messages


def _continues_answer(messages: list[Message], item: dict[str, Any]) -> bool:
    """Return whether an item is the text of the assistant's message before it, which has reasoning or calls so far."""
    last = messages[-1] if messages else {"role": None}
    return item.get("role") == "assistant" == last["role"] and last["content"] is None


def _add_message(messages: list[Message], item: dict[str, Any]) -> None:
    role, content = item.get("role"), text_parts(item.get("content"))
    if _continues_answer(messages, item):
        messages[-1]["content"] = content
    else:
        messages.append({"role": "system" if role == "developer" else role, "content": content})


def _add_reasoning(messages: list[Message], item: dict[str, Any]) -> None:
    parts = item.get("content") or item.get("summary")
    parts = parts if isinstance(parts, list) else []
    text = "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
    if text:
        messages.append({"role": "assistant", "content": None, "reasoning_content": text})


def _add_call(messages: list[Message], item: dict[str, Any]) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    function = {"name": flat_name(item), "arguments": item.get("arguments")}
    calls = messages[-1].setdefault("tool_calls", [])
    calls.append({"id": item.get("call_id"), "type": "function", "function": function})


def _add_output(messages: list[Message], item: dict[str, Any]) -> None:
    content = text_parts(item.get("output"))
    messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})


ITEMS = {
    "message": _add_message,
    "reasoning": _add_reasoning,
    "function_call": _add_call,
    "function_call_output": _add_output,
}


def text_parts(content: Any) -> Any:
    """Name the text parts of a content as chat completions do; other parts stay, and are refused there."""
    if not isinstance(content, list):
        return content
    texts = [isinstance(part, dict) and part.get("type") in TEXT_PARTS for part in content]
    return [{**part, "type": "text"} if is_text else part for part, is_text in zip(content, texts, strict=True)]


def with_instructions(instructions: str | None, messages: list[Message]) -> list[Message]:
    """Put the instructions first. Templates take one system message, so system texts at the start are joined."""
    texts = [instructions] if instructions else []
    while messages and messages[0]["role"] == "system" and isinstance(messages[0]["content"], str):
        texts.append(messages.pop(0)["content"])
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages] if texts else messages


def flat_name(named: Named) -> Any:
    """Return the name of a function as the model sees it: with its namespace before it, if it has one."""
    name, namespace = named.get("name"), named.get("namespace")
    return f"{namespace}__{name}" if isinstance(namespace, str) and isinstance(name, str) else name


def chat_tool(namespace: str | None, tool: dict[str, Any]) -> dict[str, Any]:
    """Translate a function of a namespace, or of none."""
    flat = flat_name({**tool, "namespace": namespace})
    function = {name: flat if name == "name" else value for name, value in tool.items() if name != "type"}
    return {"type": "function", "function": function}
