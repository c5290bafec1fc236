"""Requests of Anthropic's Messages API: blocks, tools and settings, and the same as chat completions write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    field_validator,
    model_validator,
)

from headwater.server.requests.anthropic_blocks import (
    TEXT_OR_BLOCKS,
    AnyBlock,
    CacheControl,
    OtherBlock,
    ShownBlock,
    Texts,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    as_blocks,
    kind_of,
    parts,
)
from headwater.server.requests.chat import CONTINUED, ChatMessage, ConversationRequest, Effort, thinking_variables
from headwater.server.requests.normal_form import Message
from headwater.server.requests.sampling import MAX_TOKENS, NEUTRAL, Stops, Whole
from headwater.server.requests.tools import MAX_TOOLS, FunctionName, ToolDefinition, ToolUse, dropped_tools, tool_use

# fields that this server cannot honour, in addition to those of all requests
UNSUPPORTED: dict[str, tuple[Any, ...]] = {"container": (), "mcp_servers": ([],), "n": (1,)}

# of each role, in addition to blocks with text
OTHER_BLOCKS = {"user": ("tool_result",), "assistant": ("tool_use", "thinking", "redacted_thinking"), "system": ()}


class AnthropicMessage(BaseModel, strict=True):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Annotated[AnyBlock, Discriminator(kind_of)]], BeforeValidator(as_blocks), TEXT_OR_BLOCKS]

    @model_validator(mode="after")
    def _fits_its_role(self) -> AnthropicMessage:
        for block in self.content:
            if not isinstance(block, ShownBlock | OtherBlock) and block.type not in OTHER_BLOCKS[self.role]:
                raise ValueError(f"content of role {self.role!r} has a block of type {block.type!r}")
        return self


class Tool(BaseModel, strict=True):
    """Tool of the client, or one that Anthropic defines: its `type` says which, and it has no schema."""

    type: str | None = None
    name: FunctionName | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> Tool:
        missing = [name for name in ("name", "input_schema") if getattr(self, name) is None]
        if missing and not self.foreign:
            raise ValueError(f"{' and '.join(missing)} missing: a tool of the client needs name and input_schema")
        return self

    @property
    def foreign(self) -> bool:
        """True if Anthropic defines the tool."""
        return self.type not in (None, "custom")

    def definition(self) -> ToolDefinition:
        """Return the tool as chat completions write it."""
        given = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        function = {name: value for name, value in (given | {"strict": self.strict}).items() if value is not None}
        marked = {} if self.cache_control is None else {"cache_control": self.cache_control}
        return ToolDefinition.model_validate({"type": "function", "function": function, **marked})


class ToolChoice(BaseModel, strict=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_its_tool(self) -> ToolChoice:
        if self.type == "tool" and self.name is None:
            raise ValueError("name is missing: a choice of type 'tool' needs it")
        return self


class Thinking(BaseModel, strict=True):
    """Reasoning before the answer, on or off. `display` is ignored."""

    budget_tokens: Annotated[int, Field(ge=0), Whole] | None = None
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]


class JsonFormat(BaseModel, strict=True):
    type: Literal["json_schema"]
    of_answer: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel, strict=True):
    format: JsonFormat | None = None
    effort: Effort | None = None


class CountTokensRequest(ConversationRequest):
    """Body of /v1/messages/count_tokens: the fields that shape a prompt."""

    neutral: ClassVar = NEUTRAL | UNSUPPORTED
    format_field: ClassVar = "output_config.format"
    call_id_prefix: ClassVar = "toolu_"

    messages: Annotated[list[AnthropicMessage], Field(min_length=1, fail_fast=True)]
    system: Texts | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None  # the older place of output_config.format
    cache_control: CacheControl | None = None  # a breakpoint at the end of the last message
    stop: Stops | None = Field(None, alias="stop_sequences")

    @property
    def thinks(self) -> bool:
        """True if the request turns reasoning on: it is off by default, as at Anthropic."""
        return self.thinking is not None and self.thinking.type != "disabled"

    @property
    def template_variables(self) -> dict[str, Any]:
        effort = self.output_config and self.output_config.effort
        level = {"reasoning_effort": effort} if effort else {}
        return thinking_variables(self.thinks) | level | super().template_variables

    @property
    def thought_tokens(self) -> int | None:
        budget = self.thinking.budget_tokens if self.thinking is not None else None
        return super().thought_tokens if budget is None else budget

    @property
    def tool_use(self) -> ToolUse:
        one = self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use
        return tool_use(self.chat_tools(), self.chat_choice(), not one)

    @property
    def left_out(self) -> list[str]:
        return dropped_tools(str(tool.type) for tool in self.tools or () if tool.foreign)

    def chat_messages(self) -> list[ChatMessage]:
        system = parts(self.system or ())
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        messages += messages_of(self.messages)
        if self.cache_control is not None:
            messages[-1]["cache_control"] = self.cache_control
        return [ChatMessage(**message) for message in messages]

    def chat_tools(self) -> list[ToolDefinition]:
        return [tool.definition() for tool in self.tools or () if not tool.foreign]

    def chat_choice(self) -> Any:
        match self.tool_choice:
            case ToolChoice(type="any"):
                return "required"
            case ToolChoice(type="tool", name=name):
                return {"type": "function", "function": {"name": name}}
            case choice:
                return choice and choice.type

    def chat_format(self) -> Any:
        chosen = self.output_format or (self.output_config and self.output_config.format)
        return chosen and {"type": "json_schema", "json_schema": {"schema": chosen.of_answer}}


class MessagesRequest(CountTokensRequest):
    """Body of /v1/messages."""

    max_tokens: Annotated[
        int, Field(ge=0, le=MAX_TOKENS), Whole
    ]  # 0: the prompt is computed and cached, and the answer left out

    @field_validator("messages")
    @classmethod
    def _ends_with_a_turn_to_answer(cls, value: list[AnthropicMessage]) -> list[AnthropicMessage]:
        if value[-1].role == "assistant":
            raise ValueError(CONTINUED)
        return value

    @property
    def wanted_tokens(self) -> int:
        return max(1, self.max_tokens)

    @property
    def may_be_cut(self) -> bool:
        return True


def messages_of(messages: Sequence[AnthropicMessage]) -> list[Message]:
    """Translate messages. Each result of a tool becomes a message, and calls become a field of their message.

    A breakpoint on a call stands before the text of the next message: none can stand after a call in its own.
    """
    translated: list[Message] = []
    mark: CacheControl | None = None
    for message in messages:
        turns = [answer_of(message.content)] if message.role == "assistant" else turns_of(message)
        if mark is not None:
            turns[0]["content"].insert(0, {"type": "text", "text": "", "cache_control": mark})
        marks = [block.cache_control for block in message.content if isinstance(block, ToolUseBlock)]
        mark = next((one for one in reversed(marks) if one is not None), None)
        translated += turns
    return translated


def answer_of(blocks: Sequence[AnyBlock]) -> Message:
    """Translate the content of an assistant."""
    message: Message = {"role": "assistant", "content": parts(blocks)}
    if thought := "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)):
        message["reasoning_content"] = thought
    if calls := [block for block in blocks if isinstance(block, ToolUseBlock)]:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
            for call in calls
        ]
    return message


def turns_of(message: AnthropicMessage) -> list[Message]:
    """Translate a message of a user or the system, in the order of its blocks."""
    turns: list[Message] = []
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            turns.append(result_of(block))
        elif turns and turns[-1]["role"] == message.role:
            turns[-1]["content"] += parts([block])
        else:
            turns.append({"role": message.role, "content": parts([block])})
    return turns


def result_of(block: ToolResultBlock) -> Message:
    turn = {"role": "tool", "tool_call_id": block.tool_use_id, "content": parts(block.content or ())}
    marks = {"is_error": block.is_error or None, "cache_control": block.cache_control}
    return turn | {name: value for name, value in marks.items() if value is not None}
