"""Requests as the engine takes them. Integers, strings and tuples only; positions and lengths are in tokens."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from enum import StrEnum

from headwater.plan import Retention

PRIORITIES = {"low": -1, "normal": 0, "high": 1}  # by the values of `priority` in cache_hints
TIMES_TO_LIVE = {"5m": 300.0, "1h": 3600.0}  # seconds, by the values of `ttl` in Anthropic's cache_control


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Token positions of a prompt's known parts (not yet floored to pages); None where unknown."""

    system_end: int | None = None  # one past system prompt and tools
    query_start: int | None = None  # first token of the last real user query
    query_end: int | None = None  # one past the last real user query: the next turn keeps the prompt up to here
    extra: tuple[int, ...] = ()  # requested by the client
    retained: tuple[Retention, ...] = ()  # those of them that have a time to live

    @property
    def known(self) -> bool:
        return bool(self.extra) or any(b is not None for b in (self.system_end, self.query_start, self.query_end))


@dataclass(frozen=True, slots=True)
class Constraint:
    """Constraint on an output: before sampling, tokens that violate it are masked."""

    kind: str  # "json_schema" (a schema's JSON), "regex", or "lark" (a grammar in llguidance's dialect of Lark)
    source: str
    param: str | None = field(default=None, compare=False)  # field of the client's request that asks for it
    fallback: Constraint | None = None  # weaker constraint for use if this one cannot be compiled


@dataclass(frozen=True, slots=True)
class Thought:
    """Reasoning before an answer, between tags: stop strings are not looked for in it."""

    open: str
    close: str
    begun: bool  # by the prompt; otherwise an output that begins with `open` has begun it


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters. temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and penalties 1, 0, 0 are off.

    With max_tokens 0 no token is generated: the prompt is scored.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    choice: int = 0  # number of the answer among those to one prompt: each is drawn with numbers of its own
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0  # tokens before which no end token, stop token or stop string ends the output
    logprobs: int | None = None  # None: none; k: the chosen token's and the k most likely
    repetition_penalty: float = 1.0  # of tokens in the prompt or the output (Keskar et al. 2019, section 4.1)
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the output, as OpenAI does
    frequency_penalty: float = 0.0  # the same, times the number of occurrences
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, added to its logit)
    prompt_logprobs: int | None = None  # the same for each prompt token; the prompt is then computed whole
    constraint: Constraint | None = None
    shown_tokens: tuple[int, ...] = ()  # special tokens whose text is part of the answer
    thought: Thought | None = None  # without stop strings in it


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of a prompt that were tokenised on their own: a segment."""

    start: int
    end: int


class Fidelity(StrEnum):
    """Amount of a composed prompt that is recomputed."""

    FAST = "fast"  # only the seams, eight tokens on each side (HYPIC, section 4.3)
    BALANCED = "balanced"  # and a few segments relevant to the question, whole
    HIGH = "high"  # and more of them, with wider seams
    NAIVE = "naive"  # baseline, as all below: states are added, nothing is recomputed (section 3.1)
    W0 = "w0"  # no seams, only the first inputs of a convolution (section 4.2)
    W4 = "w4"  # seams of four tokens
    W16 = "w16"
    W32 = "w32"


class SegmentEviction(StrEnum):
    """Order of eviction among unpinned segments."""

    LRU = "lru"  # least recently used first
    COST = "cost"  # least saved FLOPs per page first: GDSF (Cherkasova 1998), with prefill FLOPs as the cost


class Healing(StrEnum):
    """Time of healing: exact recomputation of sessions that were answered from composed states."""

    OFF = "off"  # never
    IDLE = "idle"  # while no request runs
    ALWAYS = "always"  # also during running requests, in the unused part of their steps


@dataclass(frozen=True, slots=True)
class Drafting:
    """Drafts that a request asks for. They change no bit of its answer."""

    drafter: str | None = None  # one of `--speculation`; None: the server's
    tokens: int | None = None  # drafts of a step, at most; None: as many as pay
    prediction: tuple[int, ...] = ()  # tokens of the answer that the client expects


@dataclass(frozen=True, slots=True)
class Generation:
    """A request as the engine takes it."""

    prompt: tuple[int, ...]
    params: SamplingParams
    namespace: str = ""
    boundaries: Boundaries = field(default_factory=Boundaries)
    keep_output: bool = True  # False: the next turn's template will strip the output, so none of it is cached
    deadline: float | None = None  # seconds from its submission until it fails with DeadlineExceeded; None: never
    deadline_of: str = "timeout"  # the limit that it is from: the request's timeout, or the server's request_timeout
    segments: tuple[Span, ...] = ()  # of the prompt, ascending and disjoint; empty: exact answer
    fidelity: Fidelity = Fidelity.BALANCED  # used if there are segments
    drafting: Drafting = field(default_factory=Drafting)
    ended: bool = False  # hint of a client: its conversation ends with this request
    priority: int = 0  # hint of a client, of PRIORITIES: of what this request uses, among what its namespace has
    request_id: str = field(default="", compare=False)  # of the client's request, for logs
    key: str = ""  # name of the client's API key, to which the computation is charged; empty: to the namespace
    share: float = 1.0  # of the computation, in proportion to the shares of other keys and namespaces
    messages: tuple[tuple[int, int], ...] = ()  # of a conversation: position and the client's number of each, ascending

    def message_at(self, position: int) -> int | None:
        """Return the client's number of the message at a token; None before the first, and without a conversation."""
        at = bisect_right(self.messages, position, key=lambda place: place[0])
        return self.messages[at - 1][1] if at else None
