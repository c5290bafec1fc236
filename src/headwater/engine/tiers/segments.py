"""Segments in an engine's tiers: looked up and read on threads of their own, and laid out as parts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Protocol

from headwater.account import TierOutcome
from headwater.cache.segments.store import SegmentKey, StoredSegment
from headwater.engine.runner import Runner
from headwater.engine.tiers.tier import NamedPart, Tier, patience
from headwater.schedule.scheduler import Scheduler
from headwater.schedule.segment_loads import Awaited, SegmentLoad, SegmentLoads
from headwater.tiers.names import SEGMENT, Names
from headwater.tiers.part import Part
from headwater.tiers.store import PeerStore, StoreError

MAX_EXPECTED_SEGMENTS = 1024  # that peers are reported to have

log = logging.getLogger("headwater.engine")


class Owner(Protocol):
    """Methods of the engine's tiers that segments need."""

    def prefill_seconds(self, tokens: int) -> float | None:
        """Return the expected seconds to prefill `tokens` tokens; None before any was measured."""

    def segment_loaded(self, tokens: int) -> None:
        """Note that a segment was published, of which requests need not compute `tokens` tokens."""


class SegmentIO:
    """Reads segments. Methods without another word are called with the engine's lock held."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        names: Names,
        scheduler: Scheduler,
        runner: Runner,
        changed: threading.Condition,
        timeout: float,
        owner: Owner,
    ) -> None:
        """`runner`: with the arena; `changed`: the engine's lock; `timeout`: of a lookup, in seconds."""
        self._tiers, self._names, self._scheduler = list(tiers), names, scheduler
        self._stores = tuple(tiers)
        self._peers: tuple[Tier, PeerStore] | None = None
        self._expected: dict[SegmentKey, None] = {}  # that peers are reported to have, the oldest first
        self._pages = runner.arena.bytes
        self._changed, self.timeout, self._owner = changed, timeout, owner
        self._cache, self._layout = scheduler.cache, scheduler.layout
        self.loads = SegmentLoads(scheduler.cache, self, scheduler.new_id)
        self._until: dict[SegmentKey, float] = {}  # when a lookup or a load is late

    # -- other workers of a cluster

    def join_peers(self, tier: Tier, store: PeerStore) -> None:
        """Pull segments from other workers, too: those that `expect` names."""
        self._peers = tier, store
        self._tiers.append(tier)

    def expect(self, key: SegmentKey, peers: Sequence[bytes]) -> None:
        """Record that other workers are reported to have a segment."""
        if self._peers is None or not peers:
            return
        tier, store = self._peers
        store.expect(peers, key.encoded, tier.names.segment(key.encoded))
        self._expected[key] = None
        while len(self._expected) > MAX_EXPECTED_SEGMENTS:
            del self._expected[next(iter(self._expected))]

    def may_hold(self, key: SegmentKey) -> bool:
        """Return whether some tier may have a segment."""
        return bool(self._stores) or key in self._expected

    def __len__(self) -> int:
        """Return how many lookups and loads are in progress."""
        return len(self.loads)

    def hold_back(self, awaited: Awaited, keys: Iterable[SegmentKey]) -> set[SegmentKey]:
        """Return those of the missing segments `keys` that their requester is to wait for; begin loads that pay."""
        return self.loads.hold_back(awaited, keys)

    def give_up(self) -> list[SegmentLoad]:
        """Give up all loads in progress, and return them."""
        return self.loads.give_up()

    def take_late(self, now: float) -> None:
        """Let segments be built that were waited for too long."""
        for key in [key for key, until in self._until.items() if now > until]:
            del self._until[key]
            if self.loads.stop_waiting(key):
                self._until[key] = now + self.timeout  # unless its requester has gone, it begins the load before

    # -- lookups

    def look_up_segments(self, keys: Sequence[SegmentKey]) -> Set[int]:
        self._until |= dict.fromkeys(keys, time.monotonic() + self.timeout)
        expected = not self._expected.keys().isdisjoint(keys)
        asked = [tier for tier in self._tiers if tier.usable and (expected or tier in self._stores)]
        for tier in asked:
            tier.lookups.submit(self._look_up, tier, keys)
        return {tier.number for tier in asked}

    def _look_up(self, tier: Tier, keys: Sequence[SegmentKey]) -> None:
        """Ask a store for segments (on its thread)."""
        found = [False] * len(keys)
        try:
            if tier.usable:
                found = tier.store.has([tier.names.segment(key.encoded) for key in keys])
        except StoreError as error:
            tier.failed(error)
        except Exception:
            log.exception("tiers cannot be asked for segments")
        with self._changed:
            for key, there in zip(keys, found, strict=True):
                self.loads.answered(key, tier.number, there)
            self._changed.notify_all()

    # -- costs

    def prefill_seconds(self, tokens: int) -> float | None:
        return self._owner.prefill_seconds(tokens)

    def segment_seconds(self, tier: int, key: SegmentKey) -> float:
        return self._tiers[tier].seconds(self._bytes(key))

    def _bytes(self, key: SegmentKey) -> int:
        return sum(self._cache.segments.needs(key)) * self._pages.page_bytes

    # -- loads

    def begin_segment(self, load: SegmentLoad) -> None:
        self._tiers[load.tier].waiting += self._bytes(load.key)
        late = self.timeout + patience(load.expected, self.prefill_seconds(load.key.tokens))
        self._until[load.key] = time.monotonic() + late
        self._tiers[load.tier].parts.submit(self._load, load, time.perf_counter())

    def _load(self, load: SegmentLoad, begun: float) -> None:
        """Fill the pages of a load (on a reader's thread). They are its own until its commit."""
        tier, key, build = self._tiers[load.tier], load.key, load.plan.build
        assert build is not None, "a load of a segment has the plan of a build"
        load.tiers = tier.store.kind
        try:
            encoded, pages = key.encoded, (*load.plan.table, *build.state, *build.transition)
            name, end = tier.names.segment(encoded), load.plan.end
            no_memory = TierOutcome.NO_MEMORY if load.given_up else None
            load.failed = no_memory or self._pages.fill(
                pages, lambda views: tier.read(name, SEGMENT, end, encoded, views)
            )
        except Exception:
            log.exception("a load of a segment failed")
            load.failed = TierOutcome.FAILED
        load.seconds = time.perf_counter() - begun
        with self._changed:
            tier.waiting -= self._bytes(key)
            self.loads.finished(load)
            self._scheduler.room_was_made()
            if load.failed is None:
                self._owner.segment_loaded(key.widths.interior(key.tokens))
            self._changed.notify_all()

    # -- copies

    def parts(self, stored: Iterable[StoredSegment]) -> list[NamedPart]:
        """Return names and parts of segments whose pages do not change meanwhile (on the writer's thread)."""
        return [(self._names.segment(one.key.encoded), self.part_of(one)) for one in stored]

    def part_of(self, stored: StoredSegment) -> Callable[[], Part]:
        """Return a function that makes the part of a segment whose pages do not change meanwhile."""

        def make() -> Part:
            key, pages = stored.key, (*stored.kv, *stored.state, *stored.transition)
            start, end = key.widths.head, key.tokens - key.widths.tail
            seconds = self._owner.prefill_seconds(end) or 0.0
            return Part(SEGMENT, start, end, key.encoded, self._pages.views(pages), seconds)

        return make
