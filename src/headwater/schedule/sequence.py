"""A request on its way through the engine: a small object that the scheduler moves from phase to phase."""

from __future__ import annotations

from array import array
from collections.abc import Container
from collections.abc import Sequence as Pages
from dataclasses import dataclass, field, replace
from enum import Enum

from headwater.account import CacheAccount
from headwater.cache.segments.compose import Widths, marked
from headwater.cache.segments.store import SegmentKey, StoredSegment
from headwater.plan import Match
from headwater.request import Generation, Span


class Phase(Enum):
    """Where a sequence is. Preemption leads back to WAITING."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


def key_of(tokens: list[int] | tuple[int, ...]) -> bytes:
    """Token ids as the index compares them: 4 bytes each, so a page of 64 is a unit of 256 bytes."""
    return array("i", tokens).tobytes()


@dataclass(frozen=True, slots=True)
class Composition:
    """Stored segments that a request is going to be composed of, pinned, and where they stand in its prompt."""

    spans: tuple[Span, ...]
    stored: tuple[StoredSegment, ...]
    widths: Widths

    @property
    def interiors(self) -> int:
        """Tokens that are not computed."""
        return sum(self.widths.interior(span.end - span.start) for span in self.spans)

    def interiors_of(self, keys: Container[SegmentKey]) -> int:
        """Of those, tokens of the segments that have one of these keys."""
        return sum(self.widths.interior(stored.key.tokens) for stored in self.stored if stored.key in keys)

    @property
    def tail_start(self) -> int:
        """Where what comes after the last interior begins."""
        return self.spans[-1].end - self.widths.tail


@dataclass(eq=False)
class Sequence:
    """One request. With `samples` false the prefill of a finished answer, so that its next turn finds it, or `made`."""

    id: int
    generation: Generation
    samples: bool = True
    tokens: list[int] = field(default_factory=list)  # the prompt, then what was generated
    key: bytes = b""  # of the prompt
    phase: Phase = Phase.WAITING
    slot: int | None = None  # row of the state memory
    computed: int = 0  # tokens whose KV and states are in place
    planned: int = 0  # one past the last token of the leg that is reserved or running
    table: Pages[int] = ()  # page ids of [0, computed), and of what is reserved beyond
    checkpoints: tuple[int, ...] = ()  # positions still ahead at which the prefill saves its state
    speculative: tuple[int, ...] = ()
    placed_until: int = 0  # the deepest checkpoint that the prompt has or takes
    account: CacheAccount | None = None
    waited: bool = False
    preemptions: int = 0
    started_over: bool = False  # being alone, for want of memory
    composition: Composition | None = None  # until its composed leg ran
    marked_from: int | None = None  # where what is cached of it begins to be approximate, and its key to be marked
    anew: tuple[Span, ...] | None = None  # its segments that are computed whole for what is asked, once chosen
    asked: set[SegmentKey] = field(default_factory=set)  # segments that it had made, or tried to, or waited for
    had_made: set[SegmentKey] = field(default_factory=set)  # of these, those that nobody else had asked for
    plain: bool = False  # its segments could not be held beside it: it does without
    made: StoredSegment | None = None  # the segment that this makes

    def __post_init__(self) -> None:
        self.tokens = list(self.generation.prompt)
        self.key = key_of(self.generation.prompt)

    def cut(self, end: int) -> None:
        """Only the first `end` tokens of its prompt are to be computed; it has not begun."""
        self.generation = replace(self.generation, prompt=self.generation.prompt[:end])
        self.__post_init__()

    def answer_end(self, unit: int) -> int | None:
        """Up to where its answer is to be prefilled, so that the next turn resumes there. `unit`: the grid.

        None where prompt and answer end on the same page, and the prompt's own last checkpoint does as well.
        """
        end = self.known_tokens // unit * unit
        if end > self.n_prompt // unit * unit:
            return end
        return None if self.placed_until >= (self.n_prompt - 1) // unit * unit else end or None

    @property
    def prompt_ids(self) -> bytes:
        """Token ids of the prompt, four bytes each."""
        return key_of(self.generation.prompt)

    @property
    def exact_key(self) -> bytes:
        """The key of the prompt, whatever of it is composed."""
        return self.prompt_ids

    def segment_ids(self, span: Span) -> bytes:
        """What tells one of its segments from others: the token ids, four bytes each."""
        return key_of(self.generation.prompt[span.start : span.end])

    def key_until(self, end: int) -> bytes:
        """The key of the first `end` tokens, output included."""
        key = key_of(self.tokens[:end])
        if self.marked_from is None:
            return key
        return marked(key, self.marked_from, self.generation.fidelity, self.anew or ())

    def answer(self, id: int, end: int) -> Sequence:
        """The prefill of its first `end` tokens, output included, once it is complete."""
        fidelity = self.generation.fidelity
        generation = Generation(tuple(self.tokens[:end]), self.generation.params, self.namespace, fidelity=fidelity)
        answer = Sequence(id, generation, samples=False, marked_from=self.marked_from, anew=self.anew)
        answer.key = self.key_until(end)
        return answer

    @property
    def n_prompt(self) -> int:
        return len(self.generation.prompt)

    @property
    def known_tokens(self) -> int:
        """Of prompt and output, what can be cached: all."""
        return len(self.tokens)

    @property
    def n_output(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def scores_prompt(self) -> bool:
        """Whether the logits of all of its prompt are wanted."""
        return self.samples and self.generation.params.prompt_logprobs is not None

    @property
    def composes(self) -> bool:
        """Whether stored segments may be part of it."""
        return bool(self.generation.segments) and not (self.plain or self.scores_prompt)

    @property
    def namespace(self) -> str:
        return self.generation.namespace

    def resumed(self, match: Match, at: int) -> None:
        """Note what the cache did for it. A preempted request keeps the account of its first start."""
        if self.account is None:
            composition, from_ = self.composition, self.n_prompt if self.marked_from is None else self.marked_from
            interiors = 0 if composition is None else composition.interiors
            made = 0 if composition is None else composition.interiors_of(self.had_made)
            ahead = sum(span.end - max(span.start, min(at, span.end)) for span in self.generation.segments)
            self.account = CacheAccount(
                prompt_tokens=self.n_prompt,
                cached_tokens=at + interiors - made,
                resumed_at=at,
                stranded_tokens=match.kv_tokens - at,
                reason=match.reason,
                waited_for_leader=self.waited,
                segments=0 if composition is None else len(composition.spans),
                composed_tokens=interiors,
                cold_tokens=made,
                recomputed_tokens=ahead - interiors,
                approximate_tokens=max(0, at - from_),
            )
