"""Sequences: tokens that are prefilled leg by leg. Their types, in `schedule/kinds/`, say for what purpose."""

from __future__ import annotations

import struct
from collections.abc import Sequence as Pages
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import ClassVar, Protocol

from headwater.cache.placement.base import Placed, Placement, PlacementQuery
from headwater.cache.segments.compose import marked
from headwater.cache.segments.store import StoredSegment
from headwater.plan import Match, Plan
from headwater.request import Generation, Span
from headwater.schedule.limits import Budget

TOKEN_BYTES = 4  # of a token id in a key


class Phase(Enum):
    """Progress of a sequence. Preemption leads back to WAITING."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


class Purpose(StrEnum):
    """Purpose of a computed token."""

    PROMPT = "prompt"
    DECODE = "decode"
    ANSWER = "answer"  # recomputed so that the next turn resumes after a finished answer
    SEGMENT = "segment"  # computed so that segments can be composed
    HEALING = "healing"  # recomputed exactly after an answer from composed states


class Legs(Protocol):
    """The planner, as far as a sequence needs it."""

    def next_leg(self, seq: Sequence, budget: Budget) -> Plan | None: ...


def key_of(tokens: list[int] | tuple[int, ...]) -> bytes:
    """Encode token ids as the index compares them: TOKEN_BYTES each, so a page of 64 is a unit of 256 bytes."""
    return struct.pack(f"{len(tokens)}i", *tokens)  # 51 us for 8,192 of them; an array takes 130


def tokens_of(key: bytes) -> tuple[int, ...]:
    """Return the token ids of a key. Raises struct.error for a part of one."""
    return struct.unpack(f"{-(-len(key) // TOKEN_BYTES)}i", key)


@dataclass(eq=False)
class Sequence:
    """Tokens to prefill, and the progress made so far. The scheduler moves it from phase to phase."""

    purpose: ClassVar[Purpose]  # of its prefill
    counts_as_hit: ClassVar[bool] = False  # whether resuming from a cached prefix is a hit of the cache

    id: int  # ids grow with arrival
    generation: Generation
    tokens: list[int] = field(default_factory=list)  # the prompt, then the generated tokens
    key: bytes = b""  # of the prompt
    exact_key: bytes = b""  # the same without marks
    phase: Phase = Phase.WAITING
    slot: int | None = None  # row of the state memory
    computed: int = 0  # tokens whose KV is in place, and states but for the drafts that were accepted last
    accepted: int = 0  # drafts that were accepted last: the next step's rows of the sequence begin with their states
    planned: int = 0  # one past the last token of the leg that is reserved or running
    table: Pages[int] = ()  # page ids of [0, computed), and of the reserved tokens beyond
    checkpoints: tuple[int, ...] = ()  # positions ahead at which the prefill saves its state
    speculative: tuple[int, ...] = ()
    tails: tuple[int, ...] = ()  # ends of tails that the prefill keeps
    learned: tuple[int, ...] = ()  # of the checkpoints, those at learned positions
    optional: frozenset[int] = frozenset()  # these and others that are given up first where pages are short
    placed_until: int = 0  # the deepest checkpoint that the prompt has or takes
    marked_from: int | None = None  # position from which cached states are approximate and the key is marked
    match: Match | None = None  # of the prompt, as it was last looked up, until the first leg is reserved
    whole: tuple[Span, ...] | None = None  # segments that are computed whole, once chosen

    def __post_init__(self) -> None:
        self.tokens = list(self.generation.prompt)
        self.key = self.exact_key = key_of(self.generation.prompt)

    # -- tokens and keys

    @property
    def namespace(self) -> str:
        return self.generation.namespace

    @property
    def tenant(self) -> str:
        """Name under which requests share slots and steps: that of the API key, or the namespace."""
        return self.generation.key or self.generation.namespace

    @property
    def n_prompt(self) -> int:
        """Tokens to prefill."""
        return len(self.generation.prompt)

    @property
    def known_tokens(self) -> int:
        """Number of tokens of prompt and output whose ids are known, so that they can be cached."""
        return len(self.tokens)

    @property
    def uncomputed(self) -> int:
        """Number of tokens that are not computed yet: in decode 1, unless an answer is replayed after preemption."""
        return len(self.tokens) - self.computed

    @property
    def n_output(self) -> int:
        return len(self.tokens) - self.n_prompt

    def key_until(self, end: int) -> bytes:
        """Return the key of the first `end` tokens, output included."""
        key = key_of(self.tokens[:end])
        return key if self.marked_from is None else self.marked_key(key, self.marked_from)

    def marked_key(self, key: bytes, start: int) -> bytes:
        """Mark `key` as approximate from position `start` on, by this sequence's fidelity and segments."""
        return marked(key, start, self.generation.fidelity, self.whole or ())

    @property
    def may_start_in_mid_page(self) -> bool:
        """True if the prefill may resume at any token that is cached: no part of the prompt is a segment."""
        return not self.generation.segments and self.marked_from is None

    @property
    def exact_until(self) -> int:
        """Position up to which the prefill may resume at any token that is cached, and keep tails."""
        return self.n_prompt if self.marked_from is None else 0

    def resumes_at(self, match: Match) -> int:
        """Return the position at which cached content lets the prefill resume."""
        return match.resumed_tokens if match.resumed_tokens <= self.exact_until else match.checkpoint_tokens

    @property
    def is_answered(self) -> bool:
        """True if an answer will be cached after it."""
        return False

    # -- placing checkpoints: overridden by kinds whose prefixes are placed by a policy

    @property
    def last_resumable(self) -> int:
        """The deepest position at which the sequence could resume."""
        return self.n_prompt

    def place(self, placement: Placement, query: PlacementQuery) -> Placed:
        """Ask the policy for checkpoint positions."""
        return Placed(self.checkpoints, self.speculative)

    def begun(self, match: Match, start: int, placement: Placement, query: PlacementQuery | None) -> None:
        """Note that the first leg is reserved from position `start`. `query`: None if no checkpoints were placed."""

    # -- legs

    def next_leg(self, legs: Legs, budget: Budget) -> Plan | None:
        """Reserve the next leg. None: the budget is too small for one, or nothing is left. Raises OutOfPages."""
        return legs.next_leg(self, budget)

    def leg_end(self, start: int, end: int, unit: int) -> int:
        """Return the end of a leg from `start` that may reach `end`. `unit`: the grid of positions."""
        return end

    def may_stop_at(self, position: int, unit: int) -> bool:
        """Return whether a leg that is not planned yet could end at `position`, with a checkpoint there."""
        return self.planned < position

    def composed_from(self, end: int) -> int | None:
        """Return where composed segments begin in a leg that ends at `end`; None if it has none."""
        return None

    def complete(self, plan: Plan) -> Plan:
        """Add to a reserved plan what the cache does not know of."""
        return plan

    def segments_of(self, plan: Plan) -> tuple[StoredSegment, ...]:
        """Return the stored segments that a committed leg completed, or reused."""
        return ()

    def leg_ended(self, plan: Plan) -> None:
        """Note that the leg was committed."""
        self.computed = plan.end
        self.checkpoints = tuple(c for c in self.checkpoints if c > self.computed)
        self.speculative = tuple(c for c in self.speculative if c > self.computed)

    def release_segments(self) -> bool:
        """Unpin the stored segments that the sequence was to be composed of. False: there are none."""
        return False

    def compute_segments(self) -> bool:
        """Compute the remaining segments as plain text, for want of memory to hold them. False: there are none."""
        return False

    # -- ends

    def prefill_ended(self) -> Phase:
        """Do what follows the last leg, and return the next phase: DECODE or DONE."""
        return Phase.DONE

    def ended(self) -> None:
        """Note that the sequence is done, or was cancelled."""

    @property
    def charged_to(self) -> str | None:
        """The tenant whose share pays for its tokens; None: they are free."""
        return self.tenant

    # -- logits

    @property
    def scores_prompt(self) -> bool:
        """True if the logits of every prompt token are requested."""
        return False

    def wants_token_after(self, end: int) -> bool:
        """Return whether a token is sampled from the logits of a leg that ends at `end`."""
        return False
