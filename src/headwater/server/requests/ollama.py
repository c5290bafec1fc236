"""Requests of Ollama's API: messages and options, and the same as chat completions write them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from headwater.server.http.errors import of_field
from headwater.server.requests.chat import (
    CONTINUED,
    MAX_TOP_LOGPROBS,
    ChatMessage,
    CompletionRequest,
    ConversationRequest,
    Effort,
    ToolDefinitions,
    thinking_variables,
)
from headwater.server.requests.sampling import (
    MAX_TOKENS,
    NEUTRAL,
    MinP,
    Penalty,
    RepetitionPenalty,
    SamplingRequest,
    Seed,
    Stops,
    Temperature,
    TopK,
    TopP,
    Whole,
    limited,
    refuse_unsupported,
)
from headwater.server.requests.tools import ToolDefinition, answer_schema

# Options and fields that this server cannot honour, with their neutral values. Options of the runner (num_ctx, num_gpu,
# num_thread and others) and `keep_alive` change no answer here, and are ignored as unknown fields are.
UNSUPPORTED_OPTIONS: dict[str, tuple[Any, ...]] = {"mirostat": (0,), "typical_p": (1,), "tfs_z": (1,)}
IMAGES: dict[str, tuple[Any, ...]] = {"images": ([],)}
UNSUPPORTED: dict[str, tuple[Any, ...]] = NEUTRAL | {"n": (1,), "_debug_render_only": (False,)}
UNSUPPORTED_PROMPT: dict[str, tuple[Any, ...]] = UNSUPPORTED | IMAGES | {"template": ("",), "context": ([],)}

# Ollama's name of an option -> the name of the same field in other requests
SAME = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
RANDOM_SEED = -1


class OllamaOptions(BaseModel, allow_inf_nan=False, strict=True):
    """Options of sampling by Ollama's names. Options that are not named here are ignored."""

    num_predict: Annotated[int, Field(ge=-2, le=MAX_TOKENS), Whole] | None = None  # below 1: all that the prompt leaves
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    stop: Stops | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, values: Any) -> Any:
        refuse_unsupported(UNSUPPORTED_OPTIONS, values)
        return values

    def given(self) -> dict[str, Any]:
        """Return the options that are set, by their names in other requests."""
        values = {SAME.get(name, name): value for name, value in self if value is not None}
        if values.get("max_tokens", 1) < 1:
            del values["max_tokens"]
        if values.get("seed") == RANDOM_SEED:
            del values["seed"]
        return values


class OllamaRequest(ConversationRequest):
    """Fields that /api/chat and /api/generate share."""

    neutral: ClassVar = UNSUPPORTED
    format_field: ClassVar = "format"

    options: OllamaOptions | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Effort | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    stream: bool | None = True

    @model_validator(mode="after")
    def _take_options(self) -> OllamaRequest:
        """Set the fields of all requests from `options`, and stream unless the request says no."""
        for name, value in self.options.given().items() if self.options is not None else ():
            setattr(self, name, value)
        self.stream = self.stream is not False
        return self

    def chat_tools(self) -> list[ToolDefinition]:
        return []

    def chat_choice(self) -> Any:
        return None

    def chat_format(self) -> Any:
        if isinstance(self.format, dict):
            return {"type": "json_schema", "json_schema": {"schema": self.format}}
        return {"type": "json_object"} if self.format else None

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables of the chat template: without `think`, the template decides about reasoning."""
        return thinking_variables(self.think) | super().template_variables

    @property
    def may_be_cut(self) -> bool:
        return True

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CalledFunction(BaseModel, strict=True):
    name: str
    arguments: dict[str, Any] = {}


class OllamaCall(BaseModel, strict=True):
    id: str | None = None
    function: CalledFunction

    def as_chat(self) -> dict[str, Any]:
        """Return the call as chat completions write it, with arguments that are decoded already."""
        named = {} if self.id is None else {"id": self.id}
        return {**named, "type": "function", "function": self.function.model_dump()}


class OllamaMessage(BaseModel, strict=True):
    """Message of /api/chat. A tool's result names its call by `tool_name`, `tool_call_id`, or only by its place."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def as_chat(self) -> ChatMessage:
        """Return the message as chat completions write it."""
        calls = [call.as_chat() for call in self.tool_calls or ()] or None
        content: Any = self.content or ""
        if self.images:
            content = [{"type": "text", "text": content}, *({"type": "image"} for _ in self.images)]
        more = {"reasoning_content": self.thinking, "name": self.tool_name, "tool_call_id": self.tool_call_id}
        given = {name: value for name, value in more.items() if value is not None}
        return ChatMessage.model_validate({"role": self.role, "content": content, "tool_calls": calls, **given})


class OllamaChatRequest(OllamaRequest):
    """Body of /api/chat. Without messages the model is loaded, which it always is."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] | None = None
    tools: ToolDefinitions | None = None

    @field_validator("messages")
    @classmethod
    def _ends_with_a_turn_to_answer(cls, value: list[OllamaMessage] | None) -> list[OllamaMessage] | None:
        if value and value[-1].role == "assistant":
            raise ValueError(CONTINUED)
        return value

    def chat_messages(self) -> list[ChatMessage]:
        return [message.as_chat() for message in self.messages or ()]

    def chat_tools(self) -> list[ToolDefinition]:
        return self.tools or []


class RawRequest(CompletionRequest):
    """Prompt of /api/generate that no template shapes: a completion without a default length."""

    @property
    def wanted_tokens(self) -> int | None:
        return limited(self.max_tokens)

    @property
    def may_be_cut(self) -> bool:
        return True


class OllamaGenerateRequest(OllamaRequest):
    """Body of /api/generate. Without a prompt the model is loaded, which it always is."""

    neutral: ClassVar = UNSUPPORTED_PROMPT

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None

    @model_validator(mode="after")
    def _raw_is_all(self) -> OllamaGenerateRequest:
        if self.raw and self.system:
            raise of_field("system", "system is given and raw is true: a raw prompt holds all of the text")
        return self

    def chat_messages(self) -> list[ChatMessage]:
        system = [ChatMessage(role="system", content=self.system)] if self.system else []
        return [*system, ChatMessage(role="user", content=self.prompt or "")]

    def as_completion(self) -> RawRequest:
        """Return the request as a completion of its prompt without a template."""
        shared = {name: getattr(self, name) for name in SamplingRequest.model_fields}
        schema, _ = answer_schema(self.chat_format())
        form = {} if schema is None else {"json_schema": schema}
        return RawRequest.model_validate({**shared, **form, "prompt": self.prompt, "logprobs": self.wanted_logprobs})
