"""Stored segments: building, pages, use, and eviction order. Integers only."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from headwater.cache.changes import IGNORED, Changes, SegmentStored
from headwater.cache.pool import Pool
from headwater.cache.segments.compose import Widths
from headwater.errors import ConfigError, OutOfPages, PlanClosed
from headwater.plan import Build, CacheLayout, Plan
from headwater.request import SegmentEviction

ENCODED = struct.Struct("<QQQ")  # bytes of the namespace, widths of head and tail


@dataclass(frozen=True, slots=True)
class SegmentKey:
    """Identity of a segment within one model: equal keys are equal segments."""

    namespace: str
    ids: bytes  # token ids, four bytes each
    widths: Widths

    @property
    def tokens(self) -> int:
        return len(self.ids) // 4

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(array("i", self.ids))

    @property
    def encoded(self) -> bytes:
        """The key as bytes, equal only for equal keys."""
        namespace = self.namespace.encode()
        return ENCODED.pack(len(namespace), self.widths.head, self.widths.tail) + namespace + self.ids

    @classmethod
    def decoded(cls, encoded: bytes) -> SegmentKey:
        """Return the key with these bytes. Raises ValueError or struct.error for bytes of no key."""
        length, head, tail = ENCODED.unpack_from(encoded)
        ids = encoded[ENCODED.size + length :]
        if len(ids) % 4:
            raise ValueError(f"a segment's token ids have {len(ids)} bytes, which are four each")
        return cls(encoded[ENCODED.size : ENCODED.size + length].decode(), ids, Widths(head, tail))

    @property
    def as_change(self) -> SegmentStored:
        """The change that is published when it is stored, with page 0."""
        return SegmentStored(0, self.namespace, self.ids, self.widths.head, self.widths.tail)


@dataclass(slots=True, eq=False)
class StoredSegment:
    """One segment, complete, being built or being loaded, and the pages that hold it."""

    key: SegmentKey
    kv: array[int]  # of tokens [0, L − tail), keys rotated from position 0
    state: array[int]  # zero-start states of the interior, laid out as a checkpoint
    transition: array[int]  # of the interior, all recurrent layers
    lent: array[int] = field(default_factory=lambda: array("i"))  # pages behind the slot of the sequence that builds it
    ready: bool = False  # complete: all pages are written
    pins: int = 0  # requests that wait for it or read it, its build or load, and copies of it
    used: int = 0  # tick of its last use
    uses: int = 0
    worth: float = 0.0  # GDSF's H, at its last use

    @property
    def pages(self) -> int:
        return len(self.kv) + len(self.state) + len(self.transition)

    @property
    def first_page(self) -> int:
        return self.kv[0] if self.kv else self.state[0]

    @property
    def as_change(self) -> SegmentStored:
        """The change that is published when it is stored."""
        return replace(self.key.as_change, page=self.first_page)


@dataclass
class SegmentStore:
    """All segments of a cache. The pool is shared with the prefix cache; `begin` needs enough free pages.

    `budget` is a share of all pages: below it segments may displace prefixes, above it segments are evicted before
    prefixes. In a pool of two regions of fixed size the budget is never exceeded.
    """

    layout: CacheLayout
    pool: Pool
    budget: float = 0.5
    eviction: SegmentEviction = SegmentEviction.COST
    changes: Changes = IGNORED
    _stored: dict[SegmentKey, StoredSegment] = field(default_factory=dict)
    _builds: dict[int, StoredSegment] = field(default_factory=dict)  # by the request that builds or loads it
    _plans: dict[int, int] = field(default_factory=dict)  # id of an open plan: its request
    _ids: int = 0
    pages: int = 0  # of all segments
    evicted: int = 0
    uses: int = 0
    _clock: float = 0.0  # GDSF's L: the worth of the last victim

    def __post_init__(self) -> None:
        if not 0.0 <= self.budget <= 1.0:
            raise ConfigError(f"the share of memory for segments is {self.budget}, must be between 0 and 1")

    # -- finding

    def find(self, key: SegmentKey) -> StoredSegment | None:
        """Return the segment, complete or being built; None if there is none."""
        return self._stored.get(key)

    def __iter__(self) -> Iterator[StoredSegment]:
        """Yield all segments with pages, also those that are being loaded, which `find` does not return."""
        yield from self._stored.values()
        yield from (loaded for loaded in self._builds.values() if self._stored.get(loaded.key) is not loaded)

    def __len__(self) -> int:
        """Return the number of segments that `find` returns."""
        return len(self._stored)

    def contents(self, changes: Changes) -> None:
        """Report all complete segments to `changes`, as if they were stored now."""
        for stored in self:
            if stored.ready:
                changes.segment_stored(stored.as_change)

    # -- room

    @property
    def budget_pages(self) -> int:
        """The budget in pages."""
        return round(self.pool.size * self.budget)

    @property
    def is_hard(self) -> bool:
        """True if the budget may never be exceeded."""
        return self.layout.state_fraction is not None and not self.layout.elastic_pages

    def needs(self, key: SegmentKey) -> tuple[int, int]:
        """Return the pages of KV, and of states and transitions, that this segment takes."""
        layout = self.layout
        kv = -(-(key.tokens - key.widths.tail) // layout.page_size) * layout.kv_pages_per_unit
        return kv, layout.checkpoint_pages + layout.transition_pages

    @property
    def evictable(self) -> tuple[int, int]:
        """Pages of KV, and of states and transitions, of segments that are not pinned."""
        idle = [s for s in self if not s.pins]
        return sum(len(s.kv) for s in idle), sum(len(s.state) + len(s.transition) for s in idle)

    @property
    def is_evicted_first(self) -> bool:
        """True if a segment is evicted next, rather than a prefix."""
        return self.pages > self.budget_pages and self._victim() is not None

    def evict(self) -> bool:
        """Evict one segment that is not pinned; return False if there is none."""
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
        """Evict until `pages` more are within a hard budget; do nothing for another budget.

        Raises OutOfPages, with nothing changed, if evicting all unpinned segments is not enough.
        """
        if not self.is_hard or self.pages + pages <= self.budget_pages:
            return
        evictable = sum(self.evictable)
        if self.pages - evictable + pages > self.budget_pages:
            raise OutOfPages(pages, max(0, self.budget_pages - self.pages), evictable)
        while self.pages + pages > self.budget_pages:
            self.evict()

    # -- building: its legs are plans that are committed or abandoned like all others

    def is_building(self, request: int) -> bool:
        """Return whether `request` builds or loads a segment."""
        return request in self._builds

    def begin(self, request: int, key: SegmentKey) -> StoredSegment:
        """Take the pages of a segment that `request` will build, and pin it; room for them has been made."""
        segment = self._stored[key] = self.begin_load(request, key)
        segment.lent = self.pool.states.take(self.layout.slot_pages)
        return segment

    def begin_load(self, request: int, key: SegmentKey) -> StoredSegment:
        """Take the pages of a segment that will be read under the id `request`, and pin it.

        Until it is published `find` does not return it: the same segment may be built meanwhile.
        """
        kv, states = self.needs(key)
        take, checkpoint = self.pool.states.take, self.layout.checkpoint_pages
        segment = StoredSegment(key, self.pool.kv.take(kv), take(checkpoint), take(states - checkpoint), pins=1)
        self._builds[request] = segment
        self.pages += segment.pages
        return segment

    def plan(self, request: int, start: int, end: int) -> Plan:
        """Return the plan that computes or reads tokens [start, end) of the segment.

        Raises ValueError if another plan is open.
        """
        self._require_closed(request)
        stored = self._builds[request]
        widths = stored.key.widths
        self._ids += 1
        self._plans[self._ids] = request
        return Plan(
            id=self._ids,
            request=request,
            start=start,
            end=end,
            restore=(),
            table=stored.kv,
            write_from=start // self.layout.page_size,
            saves=(),
            lent=stored.lent if start == 0 else (),
            build=Build(widths.head, stored.state, stored.transition, end == stored.key.tokens - widths.tail),
        )

    def close(self, plan: Plan) -> StoredSegment:
        """Close the plan: it is abandoned unless `publish` follows. Raises PlanClosed if it is not open."""
        if plan.id not in self._plans:
            raise PlanClosed(f"plan {plan.id} of request {plan.request} is not open")
        return self._builds[self._plans.pop(plan.id)]

    def publish(self, stored: StoredSegment, now: int) -> None:
        """Mark the segment as complete: from now on requests may use it.

        If it was built and loaded at the same time, the first stays: the other is dropped when its request is released.
        """
        if self._stored.setdefault(stored.key, stored) is not stored:
            return
        stored.ready = True
        self._give_slot(stored)
        self.refresh(stored, now)
        self.unpin(stored)
        self.changes.segment_stored(stored.as_change)

    def release(self, request: int) -> None:
        """Forget the request, and drop an incomplete segment. Raises ValueError if a plan is open."""
        self._require_closed(request)
        stored = self._builds.pop(request)
        if not stored.ready:
            self._give_slot(stored)
            self._remove(stored)

    def _require_closed(self, request: int) -> None:
        if request in self._plans.values():
            raise ValueError(f"request {request} has a plan open")

    def _give_slot(self, segment: StoredSegment) -> None:
        self.pool.states.give(segment.lent)
        segment.lent = array("i")

    # -- using, removing

    def pin(self, stored: StoredSegment) -> None:
        stored.pins += 1

    def unpin(self, stored: StoredSegment) -> None:
        stored.pins -= 1

    def use(self, stored: StoredSegment, now: int) -> None:
        """Count a request that is composed of the segment. Raises ValueError if it is not complete."""
        if not stored.ready:
            raise ValueError("a segment that is being built cannot be used")
        stored.uses += 1
        self.uses += 1
        self.refresh(stored, now)

    def refresh(self, stored: StoredSegment, now: int) -> None:
        """Note that a request needs the segment at tick `now`. This does not count as a use."""
        stored.used = now
        saved = self.layout.flops.between(stored.key.widths.head, stored.key.tokens - stored.key.widths.tail)
        uses = max(1, stored.uses)  # the request that it was built for counts as one use from the beginning
        stored.worth = self._clock + uses * saved / max(1, stored.pages)

    def _remove(self, gone: StoredSegment) -> None:
        if self._stored.get(gone.key) is gone:
            del self._stored[gone.key]
            if gone.ready:
                self.changes.removed((gone.first_page,), 1)
        self.pages -= gone.pages
        self.pool.kv.give(gone.kv)
        self.pool.states.give(gone.state)
        self.pool.states.give(gone.transition)

    def check(self) -> None:
        """Verify the store's own invariants. Raises AssertionError, which names the broken one."""
        assert self.pages == sum(s.pages for s in self), f"{self.pages} pages counted, {sum(s.pages for s in self)} are"
        for key, stored in self._stored.items():
            assert stored.key == key, "a segment is stored under another key"
            assert stored.pins >= (not stored.ready), f"a segment of {key.tokens} tokens has {stored.pins} pins"
            pages = len(stored.kv), len(stored.state) + len(stored.transition)
            assert pages == self.needs(key), f"{pages} pages of KV and of states, not {self.needs(key)}"
