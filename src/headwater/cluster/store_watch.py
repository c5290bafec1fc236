"""Watch over one store of a server: it is published while no other server has it, with earlier servers' parts.

A store of several servers is not published: none of them knows the others' evictions, and each would publish each part.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Protocol

from headwater.cache.segments.store import SegmentKey
from headwater.cluster.digests import Digests
from headwater.cluster.store_ledger import units_of
from headwater.plan import CacheLayout
from headwater.tiers.catalog import digest_of
from headwater.tiers.changes import BlocksStored, PartsRemoved, StoreChanges, StoreLog
from headwater.tiers.names import RUN, SEGMENT, STATE, Names, is_name, tag_of
from headwater.tiers.part import HEADER, key_bytes_of
from headwater.tiers.store import OwnStore, StoreError

LOOK_SECONDS = 1.0  # between checks whether others have the store
NO_NAMESPACE = ""

log = logging.getLogger("headwater.events")


class PublishedTier(Protocol):
    """Tier of an engine whose content may be published."""

    @property
    def names(self) -> Names: ...

    @property
    def own_store(self) -> OwnStore: ...

    def publish(self, changes: StoreChanges) -> None: ...


class StoreWatch:
    """Opens a store's log while only this server has the store, and adds the parts that it held before."""

    def __init__(self, tier: PublishedTier, digests: Digests, layout: CacheLayout) -> None:
        self.log = StoreLog()
        self._tier, self._digests, self._layout = tier, digests, layout
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwater-store-watch", daemon=True)

    def start(self) -> None:
        """Watch the store from now on."""
        self._tier.publish(self.log)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join(LOOK_SECONDS)

    def _run(self) -> None:
        try:
            self.look()
            while not self._ends.wait(LOOK_SECONDS):
                self.look()
        except Exception:
            log.exception("a store is not published any more")
            self.log.close()

    def look(self) -> None:
        """Begin to publish the store if only this server has it, or stop if others have it."""
        store, is_private = self._tier.own_store, self._tier.own_store.is_private()
        if is_private and not self.log.is_open:
            self.log.open()
            found = [self._put(change) for change in self._found()]
            there = store.has(found)
            self.log.put(PartsRemoved([name for name, known in zip(found, there, strict=True) if not known]))
        elif self.log.is_open and not is_private:
            log.info("%s is not published any more: another server has it, too", store.shown)
            self.log.close()

    def _put(self, change: BlocksStored) -> str:
        self.log.put(change)
        return change.name

    # -- parts of earlier servers

    def _found(self) -> Iterator[BlocksStored]:
        """Yield the parts that this server could load: segments, and prefixes without a namespace.

        Parts of prefixes have the tokens, and not the namespace, without which their digests cannot be computed. Runs
        come before the states on them.
        """
        try:
            entries = dict(self._tier.own_store.catalog().entries)
        except StoreError as error:
            log.warning("%s", error)
            return
        own = self._tier.names.tag
        yield from self._segments(name for name in entries if name.startswith(SEGMENT) and tag_of(name) == own)
        states = {digest_of(name): name for name in entries if name.startswith(STATE)}
        if not self._layout.kv_pages_per_unit:
            yield from self._whole(states.values())
            return
        above = defaultdict[str, list[str]](list)  # runs by the end of the one that they continue
        for name, entry in entries.items():
            if name.startswith(RUN) and is_name(name) and "-" in name:
                above[entry.below].append(name)
        (begin,) = self._tier.names.digests(NO_NAMESPACE, b"")
        ends: list[tuple[str, int, int | None]] = [(begin, 0, None)]
        while ends:
            below, start, parent = ends.pop()
            for name in above.pop(below, ()):
                digests = self._digests_of(name, start, parent)
                if not digests:
                    continue
                end, at = start + len(digests), digest_of(name)
                yield BlocksStored(name, end, parent, digests)
                if at in states:
                    before = digests[-2] if len(digests) > 1 else parent
                    yield BlocksStored(states.pop(at), end, before, digests[-1:])
                ends.append((at, end, digests[-1]))

    def _digests_of(self, run: str, start: int, parent: int | None) -> list[int]:
        """Return the digests of a run's blocks, for which only its tokens are read; none if it is gone."""
        width, units = self._layout.unit_bytes, units_of(run)
        edge = self._tier.own_store.piece(run, HEADER.size + start * width, units * width)
        before = self._digests.root(NO_NAMESPACE) if parent is None else parent
        return self._digests.after(before, edge) if len(edge) == units * width else []

    def _whole(self, states: Iterable[str]) -> Iterator[BlocksStored]:
        """Yield states of a model without attention, each of which has the only copy of its prefix."""
        for name in states:
            key = self._key_of(name)
            if key and self._tier.names.digests(NO_NAMESPACE, key)[-1] == digest_of(name):
                *before, digest = self._digests.prefix(NO_NAMESPACE, key)
                yield BlocksStored(name, len(before) + 1, before[-1] if before else None, [digest])

    def _segments(self, names: Iterable[str]) -> Iterator[BlocksStored]:
        for name in names:
            encoded = self._key_of(name)
            if encoded and self._tier.names.segment(encoded) == name:  # else it is damaged
                key = SegmentKey.decoded(encoded)
                yield BlocksStored(name, key.tokens, None, [self._digests.segment(key.as_change)])

    def _key_of(self, name: str) -> bytes:
        """Return the key in a part's header; empty if it is gone, or is not a part."""
        header = self._tier.own_store.piece(name, 0, HEADER.size)
        return self._tier.own_store.piece(name, HEADER.size, key_bytes_of(header))
