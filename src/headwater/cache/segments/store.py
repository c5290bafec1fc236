"""Stored segments: which there are, which of them are in use, and which goes when memory is short. Integers only."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from headwater.cache.pool import Pool
from headwater.cache.segments.compose import Widths
from headwater.errors import ConfigError, OutOfPages
from headwater.plan import CacheLayout
from headwater.request import SegmentEviction


@dataclass(frozen=True, slots=True)
class SegmentKey:
    """What makes two segments the same. The model is the server's."""

    namespace: str
    ids: bytes  # token ids, four bytes each
    widths: Widths

    @property
    def tokens(self) -> int:
        return len(self.ids) // 4

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(array("i", self.ids))


@dataclass(slots=True, eq=False)
class StoredSegment:
    """One segment and the pages that hold it, or are going to."""

    key: SegmentKey
    kv: array[int]  # of tokens [0, L − tail), keys rotated from position 0
    state: array[int]  # zero-start states of the interior, laid out as a checkpoint
    transition: array[int]  # of the interior, all recurrent layers
    lent: array[int] = field(default_factory=lambda: array("i"))  # back the slot of the sequence that makes it
    ready: bool = False  # all of it is written
    pins: int = 0  # requests that wait for it or read it, and the one that makes it
    used: int = 0  # tick of its last use
    uses: int = 0
    worth: float = 0.0  # GDSF's, at its last use

    @property
    def pages(self) -> int:
        return len(self.kv) + len(self.state) + len(self.transition)


@dataclass
class SegmentStore:
    """All segments of a cache. The pool is the prefix cache's; who calls `open` has seen to it that there is room.

    `budget` is the share of all pages up to which segments may grow at the expense of prefixes, and beyond which they
    go before prefixes do. Where the pool is split in two of fixed size it is never exceeded.
    """

    layout: CacheLayout
    pool: Pool
    budget: float = 0.5
    eviction: SegmentEviction = SegmentEviction.COST
    _stored: dict[SegmentKey, StoredSegment] = field(default_factory=dict)
    pages: int = 0  # of all segments
    evicted: int = 0
    uses: int = 0
    _clock: float = 0.0  # GDSF's: the worth of what was evicted last

    def __post_init__(self) -> None:
        if not 0.0 <= self.budget <= 1.0:
            raise ConfigError(f"the share of memory for segments is {self.budget}, must be between 0 and 1")

    # -- what is there

    def find(self, key: SegmentKey) -> StoredSegment | None:
        """The segment, complete or still being made."""
        return self._stored.get(key)

    def __iter__(self) -> Iterator[StoredSegment]:
        return iter(self._stored.values())

    def __len__(self) -> int:
        return len(self._stored)

    # -- room

    @property
    def budget_pages(self) -> int:
        return round(self.layout.n_pages * self.budget)

    @property
    def is_hard(self) -> bool:
        return self.layout.state_fraction is not None and not self.layout.elastic_pages

    def needs(self, key: SegmentKey) -> tuple[int, int]:
        """Pages of KV, and of states and transitions, that this segment takes."""
        layout = self.layout
        kv = -(-(key.tokens - key.widths.tail) // layout.page_size) * layout.kv_pages_per_unit
        return kv, layout.checkpoint_pages + layout.transition_pages

    @property
    def evictable(self) -> tuple[int, int]:
        """Pages of KV, and of states and transitions, of segments that nobody uses."""
        idle = [s for s in self if not s.pins]
        return sum(len(s.kv) for s in idle), sum(len(s.state) + len(s.transition) for s in idle)

    @property
    def goes_first(self) -> bool:
        """Whether a segment goes before a prefix does."""
        return self.pages > self.budget_pages and self._victim() is not None

    def evict(self) -> bool:
        """Give up one segment that nobody uses; False if there is none."""
        victim = self._victim()
        if victim is None:
            return False
        self._clock = max(self._clock, victim.worth)
        self.evicted += 1
        self._remove(victim)
        return True

    def _victim(self) -> StoredSegment | None:
        idle = (s for s in self if not s.pins)
        if self.eviction is SegmentEviction.COST:
            return min(idle, key=lambda s: (s.worth, s.used), default=None)
        return min(idle, key=lambda s: s.used, default=None)

    def make_way(self, pages: int) -> None:
        """Where the budget is never exceeded: evict until so many pages more are within it. Else nothing.

        Raises OutOfPages, with nothing changed, if they would not be.
        """
        if not self.is_hard or self.pages + pages <= self.budget_pages:
            return
        evictable = sum(self.evictable)
        if self.pages - evictable + pages > self.budget_pages:
            raise OutOfPages(pages, max(0, self.budget_pages - self.pages), evictable)
        while self.pages + pages > self.budget_pages:
            self.evict()

    # -- making, using, giving up

    def open(self, key: SegmentKey) -> StoredSegment:
        """Take the pages of a segment that is to be made, and pin it. ValueError if it is there already."""
        if key in self._stored:
            raise ValueError(f"a segment of {key.tokens:,} tokens is stored or being made already")
        kv, states = self.needs(key)
        take = self.pool.states.take
        made = StoredSegment(
            key,
            self.pool.kv.take(kv),
            take(self.layout.checkpoint_pages),
            take(states - self.layout.checkpoint_pages),
            take(self.layout.slot_pages),
            pins=1,
        )
        self._stored[key] = made
        self.pages += made.pages
        return made

    def publish(self, made: StoredSegment, now: int) -> None:
        """All of it is written: from now on requests may use it."""
        made.ready = True
        self._give_slot(made)
        self._note(made, now)
        self.unpin(made)

    def drop(self, made: StoredSegment) -> None:
        """It will not be made: half a segment is never used."""
        if made.ready:
            raise ValueError("a segment that is complete is evicted, not dropped")
        self._give_slot(made)
        self._remove(made)

    def _give_slot(self, made: StoredSegment) -> None:
        self.pool.states.give(made.lent)
        made.lent = array("i")

    def pin(self, stored: StoredSegment) -> None:
        stored.pins += 1

    def unpin(self, stored: StoredSegment) -> None:
        stored.pins -= 1

    def use(self, stored: StoredSegment, now: int) -> None:
        """A request is composed of it. ValueError if it is not complete."""
        if not stored.ready:
            raise ValueError("a segment that is being made cannot be used")
        stored.uses += 1
        self.uses += 1
        self._note(stored, now)

    def expect(self, stored: StoredSegment, now: int) -> None:
        """A request waits to be composed of it: no use yet, but it is as young as with one."""
        self._note(stored, now)

    def _note(self, stored: StoredSegment, now: int) -> None:
        stored.used = now
        saved = self.layout.flops.between(stored.key.widths.head, stored.key.tokens - stored.key.widths.tail)
        asked = max(1, stored.uses)  # whoever had it made is its first use: until then it is worth as much as after
        stored.worth = self._clock + asked * saved / max(1, stored.pages)

    def _remove(self, gone: StoredSegment) -> None:
        del self._stored[gone.key]
        self.pages -= gone.pages
        self.pool.kv.give(gone.kv)
        self.pool.states.give(gone.state)
        self.pool.states.give(gone.transition)

    def check(self) -> None:
        """Verify what must hold of it alone: AssertionError says what is broken."""
        assert self.pages == sum(s.pages for s in self), f"{self.pages} pages counted, {sum(s.pages for s in self)} are"
        for key, stored in self._stored.items():
            assert stored.key == key, "a segment stands under another's key"
            assert stored.pins >= (not stored.ready), f"a segment of {key.tokens} tokens has {stored.pins} pins"
            pages = len(stored.kv), len(stored.state) + len(stored.transition)
            assert pages == self.needs(key), f"{pages} pages of KV and of states, not {self.needs(key)}"
