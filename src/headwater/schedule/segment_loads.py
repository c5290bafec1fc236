"""Segments that tiers hold: a segment that a request needs is loaded instead of built, if that is faster.

A load is a leg that nothing computes, as is that of a prefix. All requests that need the segment wait for one lookup
and one load. If no store has it, or the load fails or is late, it is built as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from headwater.account import TierOutcome
from headwater.cache.prefix_cache import PrefixCache
from headwater.cache.segments.store import SegmentKey
from headwater.errors import OutOfPages
from headwater.schedule.tier_load import OpenLoad


@dataclass(eq=False, slots=True)
class SegmentLoad(OpenLoad):
    """Load of a segment from one tier."""

    key: SegmentKey
    tier: int


@dataclass(eq=False, slots=True)
class Awaited:
    """Segments that one requester waited for in tiers. One that has an outcome is not loaded for it again."""

    outcomes: dict[SegmentKey, TierOutcome] = field(default_factory=dict)
    loaded: dict[SegmentKey, SegmentLoad] = field(default_factory=dict)

    def note(self, key: SegmentKey, outcome: TierOutcome, load: SegmentLoad | None = None) -> None:
        """Note that the wait has ended."""
        self.outcomes[key] = outcome
        if load is not None:
            self.loaded[key] = load

    def forget_all_but(self, keys: Set[SegmentKey]) -> None:
        """Forget the segments that are not among `keys`."""
        for key in [key for key in self.outcomes if key not in keys]:
            self.forget(key)

    def forget(self, key: SegmentKey) -> None:
        """Forget a segment."""
        self.outcomes.pop(key, None)
        self.loaded.pop(key, None)


class SegmentReader(Protocol):
    """Reader of segments in tiers."""

    def look_up_segments(self, keys: Sequence[SegmentKey]) -> Set[int]:
        """Begin to ask tiers, and return their numbers; `SegmentLoads.answered` is called when one has answered."""

    def begin_segment(self, load: SegmentLoad) -> None:
        """Begin to fill the pages of a load, and call `SegmentLoads.finished` when that has succeeded or failed."""

    def segment_seconds(self, tier: int, key: SegmentKey) -> float:
        """Return the expected seconds to read a segment, the tier's queue included."""

    def prefill_seconds(self, tokens: int) -> float | None:
        """Return the expected seconds to prefill `tokens` tokens; None before any was measured."""


@dataclass(eq=False, slots=True)
class _Sought:
    """A segment that requesters wait for."""

    waiting: list[Awaited] = field(default_factory=list)
    unanswered: set[int] = field(default_factory=set)  # numbers of tiers
    tiers: list[int] = field(default_factory=list)  # that have it
    load: SegmentLoad | None = None


class SegmentLoads:
    """Lookups and loads of segments. Guarded by the scheduler's lock."""

    def __init__(self, cache: PrefixCache, reader: SegmentReader, new_id: Callable[[], int]) -> None:
        self._cache, self._reader, self._new_id = cache, reader, new_id
        self._sought: dict[SegmentKey, _Sought] = {}
        self.open: set[SegmentLoad] = set()  # late ones are among them

    def __len__(self) -> int:
        """Return how many lookups and loads are in progress."""
        return len(self.open) + sum(bool(sought.unanswered) for sought in self._sought.values())

    def hold_back(self, awaited: Awaited, keys: Iterable[SegmentKey]) -> set[SegmentKey]:
        """Return those of the missing segments `keys` that their requester is to wait for; begin loads that pay."""
        keys, held = [key for key in dict.fromkeys(keys) if key not in awaited.outcomes], set[SegmentKey]()
        self._look_up([key for key in keys if key not in self._sought])
        building: float | None = 0.0  # seconds until a segment is there if it and those before it are built
        for key in keys:
            sought = self._sought[key]
            if awaited not in sought.waiting:
                sought.waiting.append(awaited)
            if not sought.unanswered and sought.load is None:
                seconds = self._reader.prefill_seconds(key.tokens - key.widths.tail)
                building = None if seconds is None or building is None else building + seconds
                outcome = self._begin(sought, key, building)
                if outcome is not None:
                    self._end(key, outcome)
                    continue
            held.add(key)
        return held

    def _look_up(self, keys: Sequence[SegmentKey]) -> None:
        if keys:
            tiers = self._reader.look_up_segments(keys)
            self._sought |= {key: _Sought(unanswered=set(tiers)) for key in keys}

    def _begin(self, sought: _Sought, key: SegmentKey, building: float | None) -> TierOutcome | None:
        """Begin to load a segment; return why not, if it is to be built."""
        if not sought.tiers:
            return TierOutcome.MISS
        tier = min(sorted(sought.tiers), key=lambda number: self._reader.segment_seconds(number, key))
        seconds = self._reader.segment_seconds(tier, key)
        if building is not None and seconds >= building:
            return TierOutcome.COMPUTING_IS_FASTER
        id = self._new_id()
        try:
            plan = self._cache.reserve_loaded_segment(id, key)
        except OutOfPages:
            return TierOutcome.NO_MEMORY
        sought.load = SegmentLoad(id, plan, seconds, key, tier)
        self.open.add(sought.load)
        self._reader.begin_segment(sought.load)
        return None

    def _end(self, key: SegmentKey, outcome: TierOutcome, load: SegmentLoad | None = None) -> None:
        """Let requesters go on that wait for a segment."""
        for awaited in self._sought.pop(key).waiting:
            awaited.note(key, outcome, load)

    def answered(self, key: SegmentKey, tier: int, has: bool) -> None:
        """Take a tier's answer, unless it was not waited for."""
        sought = self._sought.get(key)
        if sought is not None and tier in sought.unanswered:
            sought.unanswered.remove(tier)
            sought.tiers += [tier] * has

    def stop_waiting(self, key: SegmentKey) -> bool:
        """Let a segment be built that is late. Its load goes on, for later requests.

        If a tier has answered that has it, no other is waited for. True: the segment is still sought there.
        """
        sought = self._sought.get(key)
        if sought is None:
            return False
        if sought.unanswered and sought.tiers:
            sought.unanswered.clear()
            return True
        if sought.unanswered or sought.load is not None:
            self._end(key, TierOutcome.SLOW)
        else:  # the answer was not used in time: it may be another by now
            del self._sought[key]
        return False

    def give_up(self) -> list[SegmentLoad]:
        """Give up all loads in progress, and return them: their pages are free once they are finished."""
        for load in self.open:
            load.given_up = True
        return list(self.open)

    def finished(self, load: SegmentLoad) -> None:
        """Publish what was read, or give its pages back if it failed or was built meanwhile."""
        self.open.remove(load)
        try:
            load.close(self._cache)
        finally:
            sought = self._sought.get(load.key)
            if sought is not None and sought.load is load:
                is_loaded = load.failed is None
                self._end(load.key, load.failed or TierOutcome.LOADED, load if is_loaded else None)
