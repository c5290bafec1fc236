"""Plans: the frozen orders that the cache hands to an executor, and the drafts that they are made from.

Integers, strings and tuples only: no torch, no clock. Page ids stay in the arrays that the pool hands out, which are
never written to afterwards: tuples of them would cost more than the rest of a plan.

All positions and lengths are in tokens, all page ids index the arena, unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from headwater.account import Reason


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
    checkpoint_pages: int = 1  # pages that one checkpoint takes; 0 if work can resume at every page
    slot_pages: int = 1  # pages that back one running sequence's states
    transition_pages: int = 0  # pages that a segment's transitions take
    resumable: str = "checkpoints"  # "every_page" if the states are in pages, or there are none
    states_in_pages: bool = False  # each page of KV has the states after its last token
    state_fraction: float | None = None  # None: one unified pool; else the share of pages that only states may use
    elastic_pages: int = 0  # pages that the two pools of a state fraction trade at once; 0: their sizes are fixed
    flops: PrefillFlops = PrefillFlops()  # what a hit saves
    tail_pages: tuple[int, ...] = ()  # pages of the rows of a tail, by its tokens (0 to a page); (): no tails

    @property
    def every_page(self) -> bool:
        """True if work can resume at every page."""
        return self.resumable == "every_page"

    @property
    def is_stateless(self) -> bool:
        """True for a model without recurrent layers and windows: KV is all that its later tokens need."""
        return self.every_page and not self.states_in_pages

    @property
    def min_tail_tokens(self) -> int:
        """Tokens, at least, that are used of a longer tail, or kept where prompts part: fewer save little."""
        return max(1, self.unit_tokens // 8)

    @property
    def unit_pages(self) -> int:
        """Pages of KV of a unit."""
        return self.kv_pages_per_unit * (self.unit_tokens // self.page_size)


@dataclass(frozen=True, slots=True)
class Match:
    """Match of a prompt in the index. A lookup changes nothing."""

    kv_tokens: int  # KV is cached up to here (a page multiple, at most the prompt less one token)
    checkpoint_tokens: int  # the deepest checkpoint at or before kv_tokens: where work can resume
    branch_tokens: int  # where the prompt leaves the tree; more than kv_tokens only where edges outlive their pages
    reason: Reason
    version: int = field(default=0, compare=False)  # of the index, which every change of nodes or checkpoints raises
    is_first: bool = False  # no other known request left the tree here (see `placement.headwater`)
    tail_tokens: int = 0  # tokens after the checkpoint that a tail has, at most a page
    parted_tokens: int = 0  # tokens after `kv_tokens` that a cached page has: the prompt parts from it in mid-page

    @property
    def resumed_tokens(self) -> int:
        """Position at which work can resume."""
        return self.checkpoint_tokens + self.tail_tokens

    @property
    def stranded_tokens(self) -> int:
        """KV beyond the position at which work can resume: it saves no prefill."""
        return max(0, self.kv_tokens - self.resumed_tokens)


@dataclass(frozen=True, slots=True)
class Place:
    """A position in a key, in tokens."""

    namespace: str
    key: bytes
    at: int


@dataclass(frozen=True, slots=True, order=True)
class Retention:
    """Hint of a client: keep the checkpoint at a position for some time after each use."""

    position: int  # one past the last token of the prefix
    seconds: float


@dataclass(frozen=True, slots=True)
class Saving:
    """Checkpoints that a leg saves, at ascending page multiples after its start."""

    checkpoints: tuple[int, ...] = ()
    speculative: tuple[int, ...] = ()  # in free pages only, evicted first
    learned: tuple[int, ...] = ()  # of the checkpoints, those at learned positions
    replaces: int | None = None  # a rolling checkpoint at this position is given up when the leg commits
    tails: tuple[int, ...] = ()  # ends of tails, ascending: each begins at the last page boundary before its end
    ends: bool = False  # the leg ends a prompt or an answer: a tail that ends there has the hidden row
    is_passed: bool = False  # the session will have a later end: the last of the tails is kept in free pages only
    gap: int | None = None  # if states are in pages: beyond this position only a page at the leg's end gets them

    def until(self, end: int) -> Saving:
        """Return it without checkpoints and tails beyond `end`."""
        each = self.checkpoints, self.speculative, self.tails
        checkpoints, speculative, tails = (tuple(p for p in ps if p <= end) for ps in each)
        return replace(self, checkpoints=checkpoints, speculative=speculative, tails=tails)


@dataclass(frozen=True, slots=True)
class Sharing:
    """Use of cached content by a leg."""

    reuse: bool = True  # False: no match is held; all of [0, end) is in private pages
    counts: bool = True  # False: finding its prefix in the cache is not a hit (the prefill of a finished answer)
    hold_checkpoint: bool = True  # False: the matched checkpoint is unpinned as soon as it is restored


@dataclass(frozen=True, slots=True)
class Hints:
    """Hints of a client for the checkpoints on a leg's path, noted when it commits."""

    retained: tuple[Retention, ...] = ()
    priority: int = 0  # of the request, among those of its namespace: -1, 0 or 1


@dataclass(frozen=True, slots=True)
class Draft:
    """A leg in counts and positions, before it owns anything."""

    request: int  # id of the request: its legs share one lease
    namespace: str
    key: bytes  # token ids of the request so far, `unit_bytes` a unit; may end in a partial unit
    start: int  # first token to compute; on a first leg a checkpoint's depth, or a tail's end, or 0, later the last end
    end: int  # one past the last token to compute
    publish: int = 0  # KV of the pages before this page multiple goes to the index at commit; the rest is private
    saving: Saving = Saving()
    slot: bool = False  # take the pages that back a slot, if the lease has none
    sharing: Sharing = Sharing()
    hints: Hints = Hints()
    kept: int | None = None  # tokens before `start` that a tail has, on a first leg; None: it starts at a checkpoint
    spares: Place | None = None  # neither content beyond this place nor higher-ranked content is evicted for the leg

    @property
    def resumes_at(self) -> int:
        """Position of the checkpoint from which a first leg continues."""
        return self.start - (self.kept or 0)


@dataclass(frozen=True, slots=True)
class Held:
    """Pages of a cached prefix that stay as they are while they are copied."""

    table: Sequence[int]  # of its KV, in order
    state: Sequence[int]  # of the checkpoint at its end
    after: int  # position of the previous checkpoint of the prefix, or 0
    tails: Sequence[Tail] = ()  # after its end


@dataclass(frozen=True, slots=True)
class Save:
    """Scatter the state after exactly `position` tokens into these pages (or, in a split pool, this slot)."""

    position: int
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class Tail:
    """The tokens after a checkpoint, at most a page, with all that a leg needs to continue after them."""

    start: int  # position of the checkpoint, a page multiple
    end: int  # one past its last token that is used
    kv: Sequence[int]  # the page with their KV in its first rows; none for models without attention
    rows: Sequence[int]  # pages with the last hidden row, then the inputs of the recurrences and windows, by token
    has_hidden: bool = False  # the hidden row after `end`, from which the next token is sampled, is there, or written
    ids: bytes = field(default=b"", repr=False)  # its token ids, while it is held for a copy


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
class Build:
    """Output of a leg that builds a segment, besides its KV: transitions are computed from the head's end on."""

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
    restore: Sequence[int]  # pages of the checkpoint to gather before computing; () = continue from the slot, or zero
    table: Sequence[int]  # page ids that hold KV of tokens [0, end), in order; none for models without attention
    write_from: int  # index into `table`: pages before it are read-only for this leg (their bits are there already)
    saves: tuple[Save, ...]
    lent: Sequence[int] = ()  # pages that back the request's slot from now on: nothing reads or writes them
    composed: tuple[Composed, ...] = ()  # of a leg around segments: these
    runs: tuple[Run, ...] = ()  # and what it computes; otherwise that is [start, end)
    build: Build | None = None  # of a leg that builds a segment
    kept: Tail | None = None  # of a leg that starts in mid-page: the tail that it continues, up to `start`
    tails: tuple[Tail, ...] = ()  # that the leg writes; each begins in it, or where `kept` begins

    @property
    def intervals(self) -> Sequence[tuple[int, int]]:
        """Starts and ends of the tokens that are computed."""
        if self.start == self.end:
            return ()
        return [(run.start, run.end) for run in self.runs] or [(self.start, self.end)]

    @property
    def computed_tokens(self) -> int:
        return sum(end - start for start, end in self.intervals)
