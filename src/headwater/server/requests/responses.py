"""OpenAI's Responses request, checked, and the chat request that it comes to."""

from __future__ import annotations

from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import Field, ValidationError, field_validator, model_validator

from headwater.server.requests.chat import ChatRequest, Documents
from headwater.server.requests.sampling import MAX_TOKENS, SamplingRequest, refuse_others

# nothing is kept between requests, and one answer is given
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "n": (1,),
}
TEXT_PARTS = ("input_text", "output_text", "text")
OWN_FIELDS = ("input", "instructions", "max_output_tokens", "text", "tools", "tool_choice", "max_tokens")

Message = dict[str, Any]


class ResponsesRequest(SamplingRequest):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    documents: Documents | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_needs_a_store(cls, values: Any) -> Any:
        return refuse_others(values, NEUTRAL)

    @field_validator("input")
    @classmethod
    def _not_empty(cls, value: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        if not value:
            raise ValueError("has 0 items, at least 1 is needed")
        return value

    def chat(self) -> ChatRequest:
        """The same as a chat completion; raises RequestValidationError where an item has no counterpart there."""
        shared = self.model_dump(exclude=set(OWN_FIELDS), exclude_none=True, include=set(ChatRequest.model_fields))
        try:
            return ChatRequest.model_validate({**shared, **self._own()})
        except ValidationError as error:
            raise RequestValidationError([{**e, "loc": ("body", *e["loc"])} for e in error.errors()]) from error
        except ValueError as error:
            found = {"type": "value_error", "loc": ("body",), "msg": str(error), "input": None}
            raise RequestValidationError([found]) from error

    def _own(self) -> dict[str, Any]:
        """What chat completions spell otherwise."""
        spelled = {
            "messages": with_instructions(self.instructions, messages_of(self.input)),
            "max_completion_tokens": self.max_output_tokens,
            "tools": [chat_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": chat_choice(self.tool_choice),
            "response_format": chat_format((self.text or {}).get("format")),
        }
        return {name: value for name, value in spelled.items() if value is not None}


def messages_of(items: str | list[dict[str, Any]]) -> list[Message]:
    """Input items as messages: an assistant's reasoning, text and calls that follow each other are one message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    for item in items:
        kind = str(item.get("type", "message"))
        if kind not in ITEMS:
            raise ValueError(f"input has an item of type {kind!r}, this server takes {', '.join(ITEMS)}")
        ITEMS[kind](messages, item)
    return messages


def _add_message(messages: list[Message], item: dict[str, Any]) -> None:
    role, content = item.get("role"), text_parts(item.get("content"))
    if role == "assistant" and messages and messages[-1]["role"] == "assistant" and messages[-1]["content"] is None:
        messages[-1]["content"] = content
    else:
        messages.append({"role": "system" if role == "developer" else role, "content": content})


def _add_reasoning(messages: list[Message], item: dict[str, Any]) -> None:
    parts = item.get("content") or item.get("summary") or []
    text = "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
    if text:
        messages.append({"role": "assistant", "content": None, "reasoning_content": text})


def _add_call(messages: list[Message], item: dict[str, Any]) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
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
    """Content with its parts named as chat completions name them; what is no text stays, to be refused there."""
    if not isinstance(content, list):
        return content
    named = {"type": "text"}
    return [
        {**part, **named} if isinstance(part, dict) and part.get("type") in TEXT_PARTS else part for part in content
    ]


def with_instructions(instructions: str | None, messages: list[Message]) -> list[Message]:
    """Instructions come first; templates take one system message, so texts of several at the start are joined."""
    told = [instructions] if instructions else []
    while messages and messages[0]["role"] == "system" and isinstance(messages[0]["content"], str):
        told.append(messages.pop(0)["content"])
    return [{"role": "system", "content": "\n\n".join(told)}, *messages] if told else messages


def chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise ValueError(f"tools has one of type {tool.get('type')!r}, this server takes 'function' only")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def chat_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise ValueError(f"tool_choice is of type {choice.get('type')!r}, this server takes 'function' only")
    return {"type": "function", "function": {"name": choice.get("name")}}


def chat_format(chosen: Any) -> dict[str, Any] | None:
    if not isinstance(chosen, dict) or chosen.get("type") != "json_schema":
        return chosen  # type: ignore[no-any-return]
    return {"type": "json_schema", "json_schema": {name: v for name, v in chosen.items() if name != "type"}}
