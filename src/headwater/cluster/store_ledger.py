"""Ledger of what one store holds for its server: from changes to events with the store's medium, and to a snapshot.

Runs of KV overlap where prefixes end within one: a block is there as long as one of its runs is. A state has a block
in the group of states for every model, also for those whose memory needs none: without that part nothing is loaded.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from headwater.cluster.digests import Digests
from headwater.cluster.messages import KINDS, KV, SEGMENTS, STATES, BlockRemoved, BlockStored
from headwater.tiers.changes import AllForgotten, BlocksStored, Change, PartsRemoved, PrefixStored, SegmentsStored
from headwater.tiers.names import RUN, SEGMENT, STATE

GROUPS = {RUN: KV, STATE: STATES, SEGMENT: SEGMENTS}  # by the first letter of a part's name
MAX_EVENT_BLOCKS = 4096  # in one removal


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
