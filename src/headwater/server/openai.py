"""OpenAI's requests, checked, with the extensions that other engines have made common. Unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from headwater.server.chat import Conversation, template_message
from headwater.types import SamplingParams

# What asking for more than the value here would need is not built; to ignore it would be a wrong answer.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
}

MAX_TOP_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16

NotEmpty = Field(min_length=1)
TokenIds = Annotated[list[Annotated[int, Field(ge=0, strict=True)]], NotEmpty]


class StreamOptions(BaseModel):
    include_usage: bool = False


class SamplingRequest(BaseModel):
    """What both forms of request share."""

    model_config = ConfigDict(allow_inf_nan=False)

    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)  # -1 and 0: off
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str = ""

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_built(cls, values: Any) -> Any:
        for name, allowed in NEUTRAL.items() if isinstance(values, dict) else ():
            if values.get(name) is not None and values[name] not in allowed:
                raise ValueError(f"{name} is {values[name]!r}, this server takes {allowed[0]!r} only")
        return values

    @field_validator("stop", "stop_token_ids", "cache_salt", "ignore_eos", "stream", mode="before")
    @classmethod
    def _null_is_the_default(cls, value: Any, info: Any) -> Any:
        if value is None:
            return cls.model_fields[info.field_name].default
        return [value] if info.field_name == "stop" and isinstance(value, str) else value

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def params(self, defaults: dict[str, Any], max_tokens: int, logprobs: int | None) -> SamplingParams:
        """Sampling as the engine takes it; what the request leaves open comes from the model, then from OpenAI."""

        def chosen(name: str, otherwise: float) -> Any:
            offered = (getattr(self, name), defaults.get(name), otherwise)
            return next(value for value in offered if value is not None)

        return SamplingParams(
            max_tokens=max_tokens,
            temperature=chosen("temperature", 1.0),
            top_k=max(0, chosen("top_k", 0)),
            top_p=chosen("top_p", 1.0),
            min_p=chosen("min_p", 0.0),
            seed=self.seed,
            stop=tuple(s for s in self.stop if s),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
        )


class CompletionRequest(SamplingRequest):
    prompt: str | TokenIds | Annotated[list[str], NotEmpty] | Annotated[list[TokenIds], NotEmpty]
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _one_message_for_all_forms(cls, value: Any, validate: Any) -> Any:
        try:
            return validate(value)
        except ValueError as error:
            raise ValueError("must be text, a list of token ids, or a list of either, and not empty") from error

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt  # type: ignore[list-item,return-value]

    @property
    def wanted_tokens(self) -> int | None:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs


class ChatMessage(BaseModel):
    """A message; templates may read more of it than is named here."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatRequest(SamplingRequest):
    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError(f"top_logprobs is {self.top_logprobs}, but logprobs is {self.logprobs}: it needs true")
        return self

    @property
    def conversation(self) -> Conversation:
        """Raises ValueError for content that is no text."""
        messages = tuple(template_message(message.model_dump()) for message in self.messages)
        return Conversation(messages, self.tools or None, self.chat_template_kwargs or {})

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
