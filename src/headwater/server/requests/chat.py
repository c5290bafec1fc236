"""Requests of completions and chat completions, with the extensions that other engines have made common."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, PrivateAttr, field_validator, model_validator

from headwater.request import Constraint
from headwater.server.http.errors import of_field
from headwater.server.requests.messages import PLAIN, Conversation, conversation
from headwater.server.requests.normal_form import MessageRules
from headwater.server.requests.sampling import (
    MAX_SEGMENTS,
    MAX_TOKENS,
    SCORED,
    SamplingRequest,
    TokenId,
    TokenLimit,
    Whole,
    limited,
)
from headwater.server.requests.structured import (
    FLEXIBLE,
    LENIENT,
    as_far_as_possible,
    known_keywords,
    only_one,
    schema_constraint,
)
from headwater.server.requests.tools import (
    MAX_TOOLS,
    MAX_WARNING_CHARACTERS,
    ToolDefinition,
    ToolUse,
    answer_schema,
    tool_use,
)

log = logging.getLogger("headwater.server")

MAX_TOP_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16
CONTINUED = "the last message is the assistant's, which this server does not continue: end with a user's"
# switches of reasoning in chat templates: Qwen's, GLM's and Nemotron's; DeepSeek's, Granite's and Kimi's
THINKING_SWITCHES = ("enable_thinking", "thinking")

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]  # of reasoning, as several APIs name it

# chat fields with their neutral values: a completion that ignored other values would be wrong
CHAT_ONLY = {"response_format": ({"type": "text"},), "tools": ([],), "documents": ([],)}

PromptLogprobs = Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]


class CompletionRequest(SamplingRequest):
    """Body of /v1/completions."""

    neutral: ClassVar = CHAT_ONLY | SCORED

    prompt: str | TokenIds | Texts | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = None
    prompt_logprobs: PromptLogprobs = None
    max_tokens: TokenLimit | None = None  # 0: the prompt is scored, and no token generated; -1: all that it leaves

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
            both = f"best_of is {self.best_of:,} and n is {self.answers:,}"
            raise of_field("best_of", f"{both}: this server takes equal ones only")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, as texts or token ids."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt  # type: ignore[list-item,return-value]

    @property
    def echoed_logprobs(self) -> int | None:
        """Number of likely tokens to return at each token of an echoed prompt; None: it is not echoed or not scored."""
        return self.logprobs if self.echo else None

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        return max((k for k in (self.echoed_logprobs, self.prompt_logprobs) if k is not None), default=None)

    @property
    def wanted_tokens(self) -> int | None:
        if self.max_tokens is None:
            return DEFAULT_COMPLETION_TOKENS
        return None if self.max_tokens < 0 else self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs


class ChatMessage(BaseModel, extra="allow"):
    """Message of a conversation; fields that are not named here are passed on to the template."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any] | str] | None = None
    tool_calls: list[dict[str, Any]] | None = None


def thinking_variables(wanted: bool | str | None) -> dict[str, Any]:
    """Return the template's variables for reasoning: on, off or a level; none for None, the template's own choice."""
    if wanted is None:
        return {}
    level = {"reasoning_effort": wanted} if isinstance(wanted, str) and wanted != "none" else {}
    return dict.fromkeys(THINKING_SWITCHES, wanted not in (False, "none")) | level


class Document(BaseModel, extra="allow", strict=True):
    """Document sent with a conversation; fields that are not named here are passed on to the template."""

    text: str = Field(min_length=1)
    title: str | None = None


class PredictedPart(BaseModel, strict=True):
    """Part of a predicted answer."""

    type: Literal["text"]
    text: str


class Prediction(BaseModel, strict=True):
    """The answer that the client expects, most of it: its tokens are drafts."""

    type: Literal["content"]
    content: str | list[PredictedPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


Messages = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
ToolDefinitions = Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)]
Documents = Annotated[list[Document], Field(max_length=MAX_SEGMENTS, fail_fast=True)]


def conversation_of(
    messages: Sequence[ChatMessage],
    tools: Sequence[ToolDefinition] | None,
    variables: dict[str, Any] | None,
    documents: Sequence[Document] | None,
    rules: MessageRules = PLAIN,
) -> Conversation:
    """Return the conversation in the normal form of the template's rules. Raises ValueError as `conversation` does.

    Templates show the tools whatever tool_choice is, so that it does not change what can be cached.
    """
    return conversation(
        [message.model_dump() for message in messages],
        [definition.sent for definition in tools or ()],
        variables,
        [document.model_dump(exclude_none=True) for document in documents or ()],
        rules,
    )


class ConversationRequest(SamplingRequest, ABC):
    """Request with a conversation. Subclasses translate their API's fields to those of chat completions."""

    format_field: ClassVar = "response_format"  # name of the field with the answer's format
    call_id_prefix: ClassVar = "call_"

    documents: Documents | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, le=MAX_TOKENS), Whole] | None = None
    _unenforced: list[str] = PrivateAttr(default_factory=list)

    @abstractmethod
    def chat_messages(self) -> list[ChatMessage]:
        """Return the messages as chat completions write them."""

    @abstractmethod
    def chat_tools(self) -> list[ToolDefinition]:
        """Return the tools as chat completions write them."""

    @abstractmethod
    def chat_choice(self) -> Any:
        """Return the `tool_choice` as chat completions write it."""

    @abstractmethod
    def chat_format(self) -> Any:
        """Return the `response_format` as chat completions write it."""

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables of the chat template."""
        return self.chat_template_kwargs or {}

    @property
    def left_out(self) -> list[str]:
        """Parts of the request that were left out, as sentences for the client."""
        return []

    @property
    def thought_tokens(self) -> int | None:
        """Tokens after which the reasoning is closed; None: the model closes it."""
        return self.thinking_token_budget

    @property
    def warnings(self) -> list[str]:
        """Parts of the request that were left out or are not enforced, as sentences for the client."""
        return self.left_out + self._unenforced

    def note_unenforced(self, parts: Sequence[str]) -> None:
        """Add a warning about parts of schemas that are not enforced."""
        self._unenforced += [f"not enforced: {'; '.join(parts)}"[:MAX_WARNING_CHARACTERS]] if parts else []

    def conversation(self, rules: MessageRules = PLAIN) -> Conversation:
        """Return the conversation for a template of these rules; raises ValueError as `conversation_of` does."""
        return conversation_of(self.chat_messages(), self.chat_tools(), self.template_variables, self.documents, rules)

    @property
    def tool_use(self) -> ToolUse:
        """Tools that may be called; raises BadRequest for an invalid tool_choice."""
        return tool_use(self.chat_tools(), self.chat_choice(), self.parallel_tool_calls)

    @property
    def answer_constraint(self) -> Constraint | None:
        """Constraint of the answer, also by its response_format; raises BadRequest if that is invalid, too."""
        constraint, (schema, strict) = super().answer_constraint, answer_schema(self.chat_format())
        if schema is None:
            return constraint
        if constraint is not None:
            raise only_one(str(constraint.param), self.format_field)
        if strict:
            return schema_constraint(schema, FLEXIBLE, self.format_field)
        kept, keywords = as_far_as_possible(schema, FLEXIBLE)
        if keywords:
            log.warning("of %s is not enforced: %s", self.format_field, known_keywords(keywords))
            self.note_unenforced([f"{', '.join(keywords)} of {self.format_field}"])
        return schema_constraint(dict(kept), FLEXIBLE | LENIENT, self.format_field)


class ChatRequest(ConversationRequest):
    """Body of /v1/chat/completions."""

    neutral: ClassVar = SCORED

    messages: Messages
    tools: ToolDefinitions | None = None
    tool_choice: Any = None
    response_format: Any = None
    max_completion_tokens: TokenLimit | None = None
    reasoning_effort: Effort | None = None
    prediction: Prediction | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), Whole] | None = None
    prompt_logprobs: PromptLogprobs = None

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            both = f"top_logprobs is {self.top_logprobs}, but logprobs is {self.logprobs}"
            raise of_field("top_logprobs", f"{both}: it needs true")
        return self

    def chat_messages(self) -> list[ChatMessage]:
        return self.messages

    def chat_tools(self) -> list[ToolDefinition]:
        return self.tools or []

    def chat_choice(self) -> Any:
        return self.tool_choice

    def chat_format(self) -> Any:
        return self.response_format

    @property
    def wanted_tokens(self) -> int | None:
        return limited(self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens)

    @property
    def template_variables(self) -> dict[str, Any]:
        return thinking_variables(self.reasoning_effort) | super().template_variables

    @property
    def predicted_text(self) -> str:
        return "" if self.prediction is None else self.prediction.text

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs
