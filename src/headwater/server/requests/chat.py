"""OpenAI's two older requests, checked, with the extensions that other engines have made common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from headwater.server.prompt.documents import Document
from headwater.server.prompt.segments import MAX_SEGMENTS
from headwater.server.requests.messages import Conversation, conversation
from headwater.server.requests.response_format import answer_schema
from headwater.server.requests.sampling import MAX_TOKENS, SamplingRequest, TokenId, refuse_others
from headwater.server.requests.tools import MAX_TOOLS, ToolDefinition, ToolUse, tool_use

MAX_TOP_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16

CHAT_ONLY = {
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "documents": ([],),
}  # to ignore them would be a wrong answer

TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]


class CompletionRequest(SamplingRequest):
    prompt: str | TokenIds | Texts | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = None
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)  # 0: the prompt is scored, and nothing said

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_chats_have(cls, values: Any) -> Any:
        return refuse_others(values, CHAT_ONLY)

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _one_message_for_all_forms(cls, value: Any, validate: Any) -> Any:
        try:
            return validate(value)
        except ValueError as error:
            raise ValueError("must be text, a list of token ids, or a list of either, and not empty") from error

    @model_validator(mode="after")
    def _agree(self) -> CompletionRequest:
        if self.best_of not in (None, self.answers):
            raise ValueError(
                f"best_of is {self.best_of:,} and n is {self.answers:,}: this server takes equal ones only"
            )
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt  # type: ignore[list-item,return-value]

    @property
    def scores_prompt(self) -> bool:
        """Whoever has the prompt echoed wants log probabilities of it, too."""
        return bool(self.echo) and self.logprobs is not None

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


Documents = Annotated[list[Document], Field(max_length=MAX_SEGMENTS, fail_fast=True)]


class ChatRequest(SamplingRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    documents: Documents | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError(f"top_logprobs is {self.top_logprobs}, but logprobs is {self.logprobs}: it needs true")
        return self

    @property
    def conversation(self) -> Conversation:
        """Raises ValueError for content that is no text, and for bad breakpoints.

        Tools are shown to the model whatever tool_choice says, so that it changes nothing of what is cached.
        """
        tools = [definition.sent for definition in self.tools or ()]
        documents = [document.sent for document in self.documents or ()]
        return conversation([m.model_dump() for m in self.messages], tools, self.chat_template_kwargs, documents)

    @property
    def tool_use(self) -> ToolUse:
        """Raises BadRequest for a tool_choice that cannot be."""
        return tool_use(self.tools or (), self.tool_choice, self.parallel_tool_calls)

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """Raises BadRequest for a response_format that is none."""
        return answer_schema(self.response_format)

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
