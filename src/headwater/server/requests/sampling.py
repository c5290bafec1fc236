"""Fields that all requests share, mostly of sampling, and checks of lengths; unknown fields are ignored.

The scheduler checks whether a request fits in memory with the running ones (`headwater.schedule.limits`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from headwater.config import ServeConfig
from headwater.draft.drafter import MOST_DRAFTS
from headwater.errors import RequestTooLarge
from headwater.request import PRIORITIES, Fidelity, SamplingParams
from headwater.server.http.errors import BadRequest, of_field, shown
from headwater.server.http.exchange import ServedEngine
from headwater.server.http.middleware import current_namespace
from headwater.server.requests.structured import StructuredRequest

# Fields that would change an answer and are not supported, with their neutral values: an answer that ignored any other
# value would be wrong. Some are OpenAI's, some are extensions of other engines.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none",),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
}
NEUTRAL |= dict.fromkeys(("audio", "web_search_options", "prompt_logprobs", "prompt_embeds", "allowed_token_ids"), ())
NEUTRAL |= dict.fromkeys(("truncate_prompt_tokens", "lora_request"), ())
SCORED = {name: allowed for name, allowed in NEUTRAL.items() if name != "prompt_logprobs"}  # where prompts are scored

MAX_TOKENS = 2**31 - 1  # of a field; far above any model, whose own length is checked with the prompt
MAX_SEGMENTS = 1_024  # of one request
MAX_N = 128  # answers to one prompt
MIN_PENALTY = 0.01  # of repetition: a logit divided by 1e-38 is infinite
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 8_192  # of all stop strings together: each token's text is compared with every one
MAX_BIASES = 1_024
MAX_SALT_CHARACTERS = 1_024
MAX_TIMEOUT_SECONDS = 7 * 24 * 3600.0


def few_characters(value: list[str]) -> list[str]:
    """Raise an error for stop strings that are too long together."""
    total = sum(map(len, value))
    if total > MAX_STOP_CHARACTERS:
        raise ValueError(f"stop has {total:,} characters together, at most {MAX_STOP_CHARACTERS:,} are accepted")
    return value


def whole(value: Any) -> Any:
    """Return 40 for 40.0: programs that know one type of number write whole numbers so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = BeforeValidator(whole)
TokenId = Annotated[int, Field(ge=0, strict=True)]
STOPS_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": MAX_STOPS}]}
Stops = Annotated[
    list[str],
    Field(max_length=MAX_STOPS, fail_fast=True),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    AfterValidator(few_characters),
    WithJsonSchema(STOPS_SCHEMA),
]
Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1, le=MAX_TOKENS), Whole]  # -1 and 0: off
MinP = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63), Whole]
TokenLimit = Annotated[int, Field(ge=-1, le=MAX_TOKENS), Whole]  # -1 and 0: all that the prompt leaves
Penalty = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(ge=MIN_PENALTY, le=2)]


def refuse_unsupported(neutral: Mapping[str, tuple[Any, ...]], values: Any) -> None:
    """Raise an error for a field of the table `neutral` whose value is not neutral."""
    for name, allowed in neutral.items() if isinstance(values, dict) else ():
        if values.get(name) is not None and values[name] not in allowed:
            takes = f"it takes {allowed[0]!r} only" if allowed else "leave it out"
            raise of_field(name, f"{name} is {shown(values[name])}, which this server does not support: {takes}")


def limited(max_tokens: int | None) -> int | None:
    """Return the limit of an answer's length, None without one: clients write -1 or 0 for it, too."""
    return max_tokens if max_tokens is not None and max_tokens > 0 else None


class StreamOptions(BaseModel, strict=True):
    include_usage: bool | None = None
    include_progress: bool | None = None  # computed and all tokens of the prompt, in comments


class SpeculationOptions(BaseModel, strict=True, extra="forbid"):
    """Drafts of one request, instead of the server's setting."""

    drafter: Literal["off", "auto", "ngram", "suffix", "mtp", "draft"] | None = None
    tokens: Annotated[int, Field(ge=1, le=MOST_DRAFTS)] | None = None  # drafts of a step


class CacheHints(BaseModel, strict=True, extra="forbid"):
    """Hints about later use of the prompt's prefix. They change the eviction order, and no bit of an answer."""

    conversation_ended: bool | None = None  # true: no request continues from this one
    priority: Literal["low", "normal", "high"] | None = None  # among requests of the namespace; None: normal


class SamplingRequest(StructuredRequest, allow_inf_nan=False, strict=True):
    """Fields that all requests share. A null is the same as no field."""

    neutral: ClassVar = NEUTRAL

    model: str | None = None  # any name is accepted: the server has one model
    max_tokens: TokenLimit | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N), Whole] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS), Whole] | None = None
    stop: Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    timeout: float | None = Field(None, gt=0, le=MAX_TIMEOUT_SECONDS)  # seconds
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(None, max_length=MAX_SALT_CHARACTERS)
    exact: bool | None = None  # true: no segment is reused; the prompt's tokens are the same
    fidelity: Fidelity | None = Field(None, strict=False)  # None: balanced; used if segments are reused
    speculation: SpeculationOptions | None = None  # None: as the server does
    cache_hints: CacheHints | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, values: Any) -> Any:
        refuse_unsupported(cls.neutral, values)
        return values

    @field_validator("logit_bias")
    @classmethod
    def _few_and_keyed_by_token_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value and len(value) > MAX_BIASES:
            raise ValueError(f"has {len(value):,} entries, at most {MAX_BIASES:,} are accepted")
        for key in value or ():
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise ValueError(f"its keys are token ids as decimal strings; one is {key[:20]!r}")
        return value

    @property
    def answers(self) -> int:
        """Number of answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def wanted_tokens(self) -> int | None:
        """Greatest length of an answer; None: all that the prompt leaves."""
        return limited(self.max_tokens)

    @property
    def may_be_cut(self) -> bool:
        """True if an answer ends at the model's length; if False, a `max_tokens` beyond it is refused."""
        return False

    @property
    def wanted_logprobs(self) -> int | None:
        """Number of likely tokens to return at each token; None: no log probabilities."""
        return None

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        """Number of likely tokens to return at each token of the prompt; None: the prompt is not scored."""
        return None

    @property
    def salt(self) -> str:
        """Namespace of the cache."""
        return current_namespace(self.cache_salt)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def include_progress(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_progress)

    @property
    def ended(self) -> bool:
        """True if the client says that its conversation ends with this request."""
        return self.cache_hints is not None and bool(self.cache_hints.conversation_ended)

    @property
    def cache_priority(self) -> int:
        """Priority of the cached content that the request uses, as the engine has it."""
        return PRIORITIES[(self.cache_hints and self.cache_hints.priority) or "normal"]

    @property
    def predicted_text(self) -> str:
        """Text of the answer that the client expects; empty: none."""
        return ""

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        return tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items())

    def params(self, defaults: dict[str, Any], max_tokens: int, logprobs: int | None) -> SamplingParams:
        """Return the engine's sampling parameters; absent fields take the model's defaults, then OpenAI's."""

        def chosen(name: str, otherwise: float) -> Any:
            offered = (getattr(self, name), defaults.get(name), otherwise)
            return next(value for value in offered if value is not None)

        greedy = self.temperature is None and defaults.get("do_sample") is False
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0 if greedy else chosen("temperature", 1.0),
            top_k=max(0, chosen("top_k", 0)),
            top_p=chosen("top_p", 1.0),
            min_p=chosen("min_p", 0.0),
            seed=self.seed,
            stop=tuple(s for s in self.stop or () if s),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            min_tokens=self.min_tokens or 0,
            logprobs=logprobs,
            repetition_penalty=chosen("repetition_penalty", 1.0),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self.biases,
        )


class Lengths:
    """Lengths that the engine accepts: at most `max_model_len` tokens of prompt and answer together."""

    def __init__(self, engine: ServedEngine, config: ServeConfig) -> None:
        self._engine = engine
        self._answers = config.max_running + config.max_waiting

    def check_answers(self, prompts: int, n: int) -> None:
        """Raise BadRequest for more answers than the server takes, before any work goes into them."""
        if prompts * n > self._answers:
            wanted = f"{prompts:,} prompts with n {n:,} are {prompts * n:,} answers"
            raise BadRequest(f"{wanted}, the server takes {self._answers:,} at once", "n")

    def check_max_tokens(self, max_tokens: int | None, scores_prompt: bool) -> None:
        """Raise BadRequest for a request of 0 tokens, unless it scores its prompt."""
        if max_tokens == 0 and not scores_prompt:
            unless = "unless echo and logprobs, or prompt_logprobs, are set"
            raise BadRequest(f"max_tokens is 0, at least 1 is needed {unless}", "max_tokens")

    def check_min_tokens(self, min_tokens: int, max_tokens: int) -> None:
        """Raise BadRequest for an answer whose minimal length exceeds its maximal length."""
        if min_tokens > max_tokens:
            both = f"min_tokens is {min_tokens:,}, and the answer has at most {max_tokens:,} tokens"
            raise BadRequest(both, "min_tokens")

    def max_tokens(self, prompt: int, segments: int, wanted: int | None, may_be_cut: bool) -> int:
        """Return the answer's maximal length: `wanted`, or all that the prompt of this many tokens leaves.

        By default that is what the model is made for, unless the prompt is already longer. `may_be_cut`: a greater
        `wanted` length is reduced to all that is left, and not refused. Raises RequestTooLarge if prompt and answer are
        too long, BadRequest for an empty prompt or too many segments.
        """
        limit = self._engine.max_model_len
        of_model = min(limit, self._engine.spec.max_length)
        if prompt == 0:
            raise BadRequest("prompt has 0 tokens, at least 1 is needed", "prompt")
        if prompt >= limit:
            raise RequestTooLarge(f"prompt has {prompt:,} tokens, the server's memory takes {limit:,} with the answer")
        left = limit - prompt
        max_tokens = left if may_be_cut and wanted and wanted > left else wanted
        if max_tokens is None:
            max_tokens = of_model - prompt if prompt < of_model else left
        if prompt + max_tokens > limit:
            raise RequestTooLarge(
                f"prompt has {prompt:,} tokens and its answer may have {max_tokens:,}, together "
                f"{prompt + max_tokens:,}; the server's memory takes {limit:,}"
            )
        if segments > MAX_SEGMENTS:
            raise BadRequest(f"prompt has {segments:,} segments, at most {MAX_SEGMENTS:,} are accepted", "prompt")
        return max_tokens

    def check_segment(self, number: int, tokens: int) -> None:
        """Raise RequestTooLarge for a text to be stored as a segment that no prompt could hold."""
        limit = self._engine.max_model_len
        if tokens >= limit:
            raise RequestTooLarge(f"text {number} has {tokens:,} tokens, the server takes {limit:,} with an answer")
