"""Frozen values that travel between layers. Integers, strings and tuples only: no torch, no clock.

Page ids come as the pool hands them out, in arrays that nobody changes: a tuple of them costs more than all else.

All positions and lengths are in tokens, all page ids index the arena, unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Reason(StrEnum):
    """Why a request resumed where it did and not deeper. A closed list."""

    FULL = "full"  # everything but the last page was cached: not a miss
    COLD = "cold"  # nothing in this namespace begins like this prompt
    OTHER_NAMESPACE = "other_namespace"  # this namespace is empty, and others are not
    DIVERGED = "diverged"  # resumed at the page where the prompt leaves what is cached
    NO_CHECKPOINT = "no_checkpoint"  # KV is cached deeper, but no state was kept there
    EVICTED = "evicted"  # what would have matched deeper was given up for memory
    TOO_SHORT = "too_short"  # the prompt has no full page before its last token
    NO_MEMORY = "no_memory"  # a match was there, but could not be held beside the request
    CACHE_OFF = "cache_off"  # the server runs without a cache
    PROMPT_LOGPROBS = "prompt_logprobs"  # those of the prompt's tokens were asked for, so each was computed


@dataclass(frozen=True, slots=True)
class PrefillFlops:
    """FLOPs of a prefill without its row of logits: `linear` a token, and `quadratic` times the length squared."""

    linear: float = 1.0
    quadratic: float = 0.0

    def between(self, start: float, end: float) -> float:
        """FLOPs to prefill tokens [start, end) after a prefix of `start`. Arrays are taken, too."""
        return (end - start) * (self.linear + self.quadratic * (end + start))


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The sizes that index and pool need to know of a model and a memory budget."""

    n_pages: int  # of the whole arena
    page_size: int = 64  # tokens a page
    unit_tokens: int = 64  # tokens a unit of the index (page_size, or a recorded block's length)
    unit_bytes: int = 256  # bytes of a unit in a key
    kv_pages_per_unit: int = 1  # for each page of the unit: 0 for a model without attention, else 1
    checkpoint_pages: int = 1  # pages that one checkpoint takes; 0 for a model without recurrent layers
    slot_pages: int = 1  # pages that back one running sequence's states
    transition_pages: int = 0  # pages that a segment's transitions take
    resumable: str = "checkpoints"  # "every_page" for a model without recurrent layers
    state_fraction: float | None = None  # None: one unified pool; else the share of pages that only states may use
    elastic_pages: int = 0  # pages that the two pools of a state fraction trade at once; 0: their sizes are fixed
    flops: PrefillFlops = PrefillFlops()  # what a hit saves


@dataclass(frozen=True, slots=True)
class Match:
    """What the index knows of a prompt. Asking changes nothing."""

    kv_tokens: int  # KV is cached up to here (a page multiple, at most the prompt less one token)
    checkpoint_tokens: int  # the deepest checkpoint at or before kv_tokens: where work can resume
    branch_tokens: int  # where the prompt leaves the tree; more than kv_tokens only where edges outlive their pages
    reason: Reason

    @property
    def stranded_tokens(self) -> int:
        """KV beyond the deepest checkpoint: it saves no prefill."""
        return self.kv_tokens - self.checkpoint_tokens


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Token positions of a prompt's known parts (not yet floored to pages); None where unknown."""

    system_end: int | None = None  # one past system prompt and tools
    query_start: int | None = None  # first token of the last real user query
    query_end: int | None = None  # one past the last real user query: what the next turn keeps
    extra: tuple[int, ...] = ()  # asked for by the client

    @property
    def known(self) -> bool:
        return bool(self.extra) or any(b is not None for b in (self.system_end, self.query_start, self.query_end))


@dataclass(frozen=True, slots=True)
class Draft:
    """A leg in counts and positions, before it owns anything."""

    request: int  # id of the request: its legs share one lease
    namespace: str
    key: bytes  # token ids of the request so far, `unit_bytes` a unit; may end in a partial unit
    start: int  # first token to compute; on a first leg a checkpoint's depth or 0, later the last leg's end
    end: int  # one past the last token to compute
    checkpoints: tuple[int, ...] = ()  # ascending page multiples in (start, end]
    speculative: tuple[int, ...] = ()  # likewise; taken from free pages only, first to be evicted
    slot: bool = False  # take the pages that back a slot, if the lease has none
    publish: int = 0  # KV of the pages before this page multiple goes to the index at commit; the rest is private
    replaces: int | None = None  # a rolling checkpoint at this position is given up when this leg commits
    reuse: bool = True  # False: no match is held; all of [0, end) is in pages of its own
    counts: bool = True  # False: finding its prefix here is no hit (the prefill of a finished answer)
    hold_checkpoint: bool = True  # False: the matched checkpoint is unpinned as soon as it is restored


@dataclass(frozen=True, slots=True)
class Save:
    """Scatter the state after exactly `position` tokens into these pages (or, in a split pool, this slot)."""

    position: int
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent tokens [start, end) of a prompt that are computed, after some of its segments were composed."""

    start: int
    end: int
    composed: tuple[int, ...]  # which of the prompt's segments, whose interiors come just before, in their order


@dataclass(frozen=True, slots=True)
class Composed:
    """A stored segment as a request takes it."""

    at: int  # position of its first token in the request's prompt
    start: int  # its interior, in tokens from its own first
    end: int
    table: Sequence[int]  # pages of its KV, keys rotated from its own first token
    state: Sequence[int]  # pages of its zero-start states, and of its windows
    transition: Sequence[int]  # pages of its transitions; () = none is applied


@dataclass(frozen=True, slots=True)
class Making:
    """What a leg that makes a segment leaves besides its KV: from the head on, transitions move on."""

    head: int  # tokens before the interior
    state: Sequence[int]  # pages: of the state after the head until the last leg, then of zero-start states
    transition: Sequence[int]  # pages, written by the last leg
    is_last: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """The frozen order for one leg. The executor needs nothing else."""

    id: int
    request: int
    start: int
    end: int
    restore: Sequence[int]  # pages of the checkpoint to gather before computing; () = go on from the slot, or zero
    table: Sequence[int]  # page ids that hold KV of tokens [0, end), in order; none for models without attention
    write_from: int  # index into `table`: pages before it are read-only for this leg (their bits are there already)
    saves: tuple[Save, ...]
    lent: Sequence[int] = ()  # pages that back the request's slot from now on: nobody reads or writes them
    composed: tuple[Composed, ...] = ()  # of a leg around segments: these
    runs: tuple[Run, ...] = ()  # and what it computes; otherwise that is [start, end)
    making: Making | None = None  # where the leg makes a segment

    @property
    def computed_tokens(self) -> int:
        return sum(run.end - run.start for run in self.runs) if self.runs else self.end - self.start


@dataclass(frozen=True, slots=True)
class CacheAccount:
    """What the cache did for one request; goes out with its response and into the log."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens that were not computed, neither here nor in segments made for this
    resumed_at: int  # position at which prefill began
    stranded_tokens: int
    reason: Reason
    waited_for_leader: bool = False  # another request was computing the same prefix
    preemptions: int = 0
    segments: int = 0  # stored ones that the prompt was composed of
    composed_tokens: int = 0  # their interiors
    cold_tokens: int = 0  # of `composed_tokens`: of cold segments, made for this request; all others are cached ones
    recomputed_tokens: int = 0  # of the prompt's segments, what was computed all the same: seams, and those not reused
    approximate_tokens: int = 0  # of `cached_tokens`: prefixes that were themselves composed

    def as_dict(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "resumed_at": self.resumed_at,
            "stranded_tokens": self.stranded_tokens,
            "reason": str(self.reason),
            "waited_for_leader": self.waited_for_leader,
            "preemptions": self.preemptions,
            "segments": self.segments,
            "composed_tokens": self.composed_tokens,
            "cold_tokens": self.cold_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "approximate_tokens": self.approximate_tokens,
        }


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an output must be: every token that could not lead there is ruled out before sampling."""

    kind: str  # "json_schema" (a schema's JSON), "regex", or "lark" (a grammar in llguidance's dialect of Lark)
    source: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and penalties 1, 0, 0 are off.

    With max_tokens 0 none are chosen: a prompt is scored.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k: the chosen token's and the k most likely
    repetition_penalty: float = 1.0  # of tokens in the prompt or the output (Keskar et al. 2019, section 4.1)
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the output, as OpenAI does
    frequency_penalty: float = 0.0  # likewise, times the number of times each is there
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, added to its logit)
    prompt_logprobs: int | None = None  # likewise of each token of the prompt, which is then computed as a whole
    constraint: Constraint | None = None
    shown_tokens: tuple[int, ...] = ()  # special tokens whose text is shown all the same


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of a prompt that were tokenised on their own: a segment."""

    start: int
    end: int


class Fidelity(StrEnum):
    """How much of a prompt made of segments is computed anew."""

    FAST = "fast"  # the seams alone, eight tokens on each side (HYPIC, section 4.3)
    BALANCED = "balanced"  # and a few segments that are asked about, whole
    HIGH = "high"  # and more of them, with wider seams
    NAIVE = "naive"  # for studies, as all that follow: states are added, nothing is computed anew (section 3.1)
    W0 = "w0"  # no seams, but what warms a convolution up (section 4.2)
    W4 = "w4"  # seams of four tokens
    W16 = "w16"
    W32 = "w32"


class SegmentEviction(StrEnum):
    """Which unpinned segment goes first."""

    LRU = "lru"  # the one whose last use is longest ago
    COST = "cost"  # the one that saved least a page: GDSF (Cherkasova 1998), with FLOPs of its prefill as the cost


class Healing(StrEnum):
    """When the exact states are computed of what was answered from composed ones."""

    OFF = "off"  # never
    IDLE = "idle"  # while nothing else runs
    ALWAYS = "always"  # behind running requests, too, in what they leave of a step


@dataclass(frozen=True, slots=True)
class Generation:
    """A request as the engine takes it."""

    prompt: tuple[int, ...]
    params: SamplingParams
    namespace: str = ""
    boundaries: Boundaries = field(default_factory=Boundaries)
    keep_output: bool = True  # False: the next turn's template will strip the output, so none of it is cached
    deadline: float | None = None  # seconds from its submission until it fails with DeadlineExceeded; None: never
    segments: tuple[Span, ...] = ()  # of the prompt, ascending and disjoint; none: the answer is to be exact
    fidelity: Fidelity = Fidelity.BALANCED  # where there are segments


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token. `text` is what may be shown now: whole characters, nothing that may begin a stop string."""

    token: int
    text: str
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """The prompt's tokens with their log probabilities, before the first token; told where they were asked for.

    The first has none, nothing being before it. Texts are left empty.
    """

    tokens: tuple[TokenEvent, ...]


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    finish_reason: str  # "stop" | "length"
    text: str  # what was held back and may be shown after all
    account: CacheAccount
    output_tokens: int
    stop: str | int | None = None  # the stop string or token that ended it
    queued_seconds: float | None = None  # from its submission until its first leg ran; None: not told


@dataclass(frozen=True, slots=True)
class FailedEvent:
    error: Exception


Event = PromptEvent | TokenEvent | FinishedEvent | FailedEvent
