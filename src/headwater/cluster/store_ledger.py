"""Parts that a store holds for its server, published: from changes to events with the store's medium, and a snapshot.

Runs of KV overlap where prefixes end within one: a block is there as long as one of its runs is. A state has a block
in the group of states for every model, also for those whose memory needs none: without that part nothing is loaded.

A store of several servers is not published: none of them knows the others' evictions, and each would publish each part.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from headwater.cache.segments.store import SegmentKey
from headwater.cluster.messages import KINDS, KV, SEGMENTS, STATES, BlockRemoved, BlockStored, Digests
from headwater.plan import CacheLayout
from headwater.threads import run_again
from headwater.tiers.catalog import digest_of
from headwater.tiers.changes import (
    AllForgotten,
    BlocksStored,
    Change,
    PartsRemoved,
    PrefixStored,
    SegmentsStored,
    StoreChanges,
    StoreLog,
)
from headwater.tiers.names import RUN, SEGMENT, STATE, Names, is_name, tag_of
from headwater.tiers.part import HEADER, key_bytes_of
from headwater.tiers.store import OwnStore, StoreError

GROUPS = {RUN: KV, STATE: STATES, SEGMENT: SEGMENTS}  # by the first letter of a part's name
MAX_EVENT_BLOCKS = 4096  # in one removal
LOOK_SECONDS = 1.0  # between checks whether others have the store
NO_NAMESPACE = ""

log = logging.getLogger("headwater.events")


def units_of(run: str) -> int:
    """Return the units of a run of KV with this name."""
    return int(run.rpartition("-")[2])


@dataclass(frozen=True, slots=True)
class Blocks:
    """A part as blocks. `end`: in units of the index; of a segment, which is one block, its tokens."""

    group: int
    end: int
    parent: int | None
    digests: array[int]


class StoreLedger:
    """Record of a store's parts, by name."""

    def __init__(self, medium: str, digests: Digests, unit_tokens: int) -> None:
        self.medium = medium
        self._digests, self._unit = digests, unit_tokens
        self._parts: dict[str, Blocks] = {}
        self._runs: Counter[int] = Counter()  # runs that have each block of KV

    def events(self, changes: Iterable[Change]) -> Iterator[BlockStored | BlockRemoved]:
        """Apply changes and yield their events."""
        for change in changes:
            if isinstance(change, PrefixStored):
                yield from self._store_prefix(change)
            elif isinstance(change, SegmentsStored):
                for name, key in zip(change.names, change.keys, strict=True):
                    digests = array("Q", [self._digests.segment(key.as_change)])
                    yield from self._store(name, Blocks(SEGMENTS, key.tokens, None, digests))
            elif isinstance(change, BlocksStored):
                group = GROUPS[change.name[0]]
                yield from self._store(
                    change.name, Blocks(group, change.end, change.parent, array("Q", change.digests))
                )
            elif isinstance(change, PartsRemoved):
                yield from self._remove(change.names)
            else:
                assert isinstance(change, AllForgotten), f"{change} is not a change"
                yield from self._remove(list(self._parts))

    def contents(self) -> Iterator[BlockStored]:
        """Yield all that is held, parents before children."""
        for blocks in sorted(self._parts.values(), key=lambda blocks: (blocks.group, blocks.end)):
            yield self._stored(blocks)

    def _store_prefix(self, change: PrefixStored) -> Iterator[BlockStored]:
        names = [name for name in change.names if name[0] in GROUPS]
        if all(name in self._parts for name in names):
            return
        digests, end = self._digests.prefix(change.namespace, change.key), 0
        for name in names:
            start, end = (end, end + units_of(name)) if name[0] == RUN else (len(digests) - 1, len(digests))
            parent = digests[start - 1] if start else None
            yield from self._store(name, Blocks(GROUPS[name[0]], end, parent, array("Q", digests[start:end])))

    def _store(self, name: str, blocks: Blocks) -> Iterator[BlockStored]:
        if name not in self._parts:
            self._parts[name] = blocks
            if blocks.group == KV:
                self._runs.update(blocks.digests)
            yield self._stored(blocks)

    def _stored(self, blocks: Blocks) -> BlockStored:
        is_segment = blocks.group == SEGMENTS
        size = blocks.end if is_segment else self._unit
        stored = BlockStored(list(blocks.digests), blocks.parent, [], size, None, self.medium)
        stored.lora_name, stored.group_idx, stored.kv_cache_spec_kind = None, blocks.group, KINDS[blocks.group]
        stored.position = None if is_segment else blocks.end * self._unit
        return stored

    def _remove(self, names: Iterable[str]) -> Iterator[BlockRemoved]:
        removed: dict[int, list[int]] = {group: [] for group in GROUPS.values()}
        for name in names:
            blocks = self._parts.pop(name, None)
            if blocks is not None:
                removed[blocks.group] += self._freed(blocks)
        for group, digests in removed.items():
            for at in range(0, len(digests), MAX_EVENT_BLOCKS):
                yield BlockRemoved(digests[at : at + MAX_EVENT_BLOCKS], self.medium, group)

    def _freed(self, blocks: Blocks) -> list[int]:
        """Return the blocks of a part that was removed, without those that other runs have."""
        if blocks.group != KV:
            return list(blocks.digests)
        freed = []
        for digest in blocks.digests:
            self._runs[digest] -= 1
            if not self._runs[digest]:
                del self._runs[digest]
                freed.append(digest)
        return freed


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
        def watch() -> None:
            try:
                self.look()
                while not self._ends.wait(LOOK_SECONDS):
                    self.look()
            except Exception:
                self.log.close()  # readers forget what the store holds, until it is read again
                raise

        run_again(watch, self._ends.is_set)

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
