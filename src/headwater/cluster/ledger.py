"""Ledger of a worker's cache, by page, and the stream of messages made from it: changes, replays, snapshots.

Columns with a row for each page of the arena, 21 bytes each. A unit, a checkpoint or a segment is in the row of its
first page.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from headwater.cache.changes import NONE, Change, CheckpointStored, KvStored, Removed, SegmentStored
from headwater.cache.segments.compose import is_marked
from headwater.cluster.messages import (
    KINDS,
    KV,
    MAX_REPLAY_BYTES,
    MAX_REPLAY_MESSAGES,
    MEDIUM,
    SEGMENTS,
    STATES,
    TOKEN_BYTES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Digests,
    Event,
    Message,
    encode,
)
from headwater.cluster.store_ledger import StoreLedger
from headwater.plan import CacheLayout
from headwater.tiers.changes import Change as StoreChange

FREE_GROUP = 255  # in the column of groups
MAX_EVENT_BLOCKS = 4096  # in a snapshot
MAX_SNAPSHOT_BLOCKS = 16_384  # in one message


class Tokens:
    """Token ids of blocks. This one keeps none."""

    def note(self, change: KvStored) -> None:
        """Keep the token ids of stored units."""

    def forget(self, page: int) -> None:
        """Drop the token ids of a removed unit."""

    def of(self, pages: Iterable[int]) -> list[int]:
        """Return the token ids of units, one after the other; none if one of them has none."""
        return []

    def clear(self) -> None:
        """Drop all token ids."""


class PlainTokens(Tokens):
    """Token ids of exact prefixes in the namespace without a name: others are never published."""

    def __init__(self, unit_bytes: int) -> None:
        self._unit_bytes = unit_bytes
        self._units: dict[int, bytes] = {}  # by page

    def note(self, change: KvStored) -> None:
        continues = change.before in self._units if change.namespace is None else not change.namespace
        if continues and not is_marked(change.edge):
            for at, page in enumerate(change.pages):
                self._units[page] = change.edge[at * self._unit_bytes : (at + 1) * self._unit_bytes]

    def forget(self, page: int) -> None:
        self._units.pop(page, None)

    def of(self, pages: Iterable[int]) -> list[int]:
        units = [self._units.get(page) for page in pages]
        return [] if None in units else array("I", b"".join(unit for unit in units if unit is not None)).tolist()

    def clear(self) -> None:
        self._units.clear()


class Ledger:
    """Record of a cache's content, by page."""

    def __init__(self, layout: CacheLayout, digests: Digests, tokens: Tokens) -> None:
        self.layout = layout
        self._digests, self._tokens = digests, tokens
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        pages = self.layout.n_pages
        self._digest, self._parent = (array("Q", bytes(8 * pages)) for _ in "12")
        self._end = array("i", bytes(4 * pages))  # of a segment: its tokens
        self._group = bytearray([FREE_GROUP]) * pages
        self._tokens.clear()

    @property
    def groups(self) -> dict[int, str]:
        """Kinds of the groups that this cache can have."""
        has = {KV: self.layout.unit_pages > 0, STATES: not self.layout.every_page, SEGMENTS: True}
        return {group: kind for group, kind in KINDS.items() if has[group]}

    def cleared(self, lifetime: bytes) -> AllBlocksCleared:
        """Return the event that begins a history or a snapshot."""
        return AllBlocksCleared(lifetime, self.layout.unit_tokens, self.groups)

    # -- from changes

    def events(self, changes: Iterable[Change]) -> Iterator[BlockStored | BlockRemoved]:
        """Apply changes and yield their events. Adjacent removals are one event a group."""
        removed: dict[int, list[int]] = {}
        for change in changes:
            if isinstance(change, Removed):
                self._remove(change, removed)
                continue
            yield from _removals(removed)
            removed = {}
            if isinstance(change, KvStored):
                yield self._store_kv(change)
            elif isinstance(change, CheckpointStored):
                yield self._store_checkpoint(change)
            else:
                yield self._store_segment(change)
        yield from _removals(removed)

    def _remove(self, change: Removed, removed: dict[int, list[int]]) -> None:
        for page in change.pages:
            removed.setdefault(self._group[page], []).append(self._digest[page])
            self._group[page] = FREE_GROUP
            self._tokens.forget(page)

    def _store_kv(self, change: KvStored) -> BlockStored:
        if change.namespace is None:
            before = self._digest[change.before]
        else:
            before = self._digests.root(change.namespace)
        digests = self._digests.after(before, change.edge)
        for at, (page, parent, digest) in enumerate(zip(change.pages, [before, *digests], digests, strict=False), 1):
            self._put(page, KV, digest, parent, change.start + at)
        self._tokens.note(change)
        return self._kv(list(change.pages))

    def _store_checkpoint(self, change: CheckpointStored) -> BlockStored:
        if change.kv == NONE:
            *before, digest = self._digests.prefix(change.namespace, change.key)
            parent = before[-1] if before else 0
        else:
            digest, parent = self._digest[change.kv], self._parent[change.kv]
        self._put(change.page, STATES, digest, parent, change.end)
        return self._state(change.page)

    def _store_segment(self, change: SegmentStored) -> BlockStored:
        tokens = len(change.ids) // TOKEN_BYTES
        self._put(change.page, SEGMENTS, self._digests.segment(change), 0, tokens)
        return self._segment(change.page)

    def _put(self, page: int, group: int, digest: int, parent: int, end: int) -> None:
        self._group[page], self._digest[page], self._parent[page], self._end[page] = group, digest, parent, end

    # -- events of rows

    def _kv(self, pages: list[int]) -> BlockStored:
        """Return the event of adjacent units."""
        stored = self._in_prefix(KV, pages)
        stored.token_ids = self._tokens.of(pages)
        return stored

    def _state(self, page: int) -> BlockStored:
        return self._in_prefix(STATES, [page])

    def _segment(self, page: int) -> BlockStored:
        return self._stored(SEGMENTS, [page], self._end[page])

    def _in_prefix(self, group: int, pages: list[int]) -> BlockStored:
        unit = self.layout.unit_tokens
        stored = self._stored(group, pages, unit)
        stored.position = self._end[pages[-1]] * unit
        if self._end[pages[0]] > 1:
            stored.parent_block_hash = self._parent[pages[0]]
        return stored

    def _stored(self, group: int, pages: list[int], size: int) -> BlockStored:
        digests = [self._digest[page] for page in pages]
        return BlockStored(digests, None, [], size, None, MEDIUM, None, None, group, KINDS[group])

    # -- from everything

    def contents(self) -> Iterator[BlockStored]:
        """Yield everything that is held, parents before children, in as few events as there are branches."""
        for pages in self._chains():
            for at in range(0, len(pages), MAX_EVENT_BLOCKS):
                yield self._kv(pages[at : at + MAX_EVENT_BLOCKS])
        yield from map(self._state, self._pages_of(STATES))
        yield from map(self._segment, self._pages_of(SEGMENTS))

    def _chains(self) -> list[list[int]]:
        """Return the pages of units as chains, each after the one that it branches off."""
        chains: list[list[int]] = []
        open_at: dict[int, list[int]] = {}  # by the digest of the last unit
        digest, parent = self._digest, self._parent
        for page in self._pages_of(KV):
            pages = open_at.pop(parent[page], None)
            if pages is None:
                pages = []
                chains.append(pages)
            pages.append(page)
            open_at[digest[page]] = pages
        return chains

    def _pages_of(self, group: int) -> list[int]:
        """Return the first pages of a group's members, in order of position."""
        pages = np.flatnonzero(np.frombuffer(self._group, np.uint8) == group)
        order = np.argsort(np.frombuffer(self._end, np.int32)[pages], kind="stable")
        found: list[int] = pages[order].tolist()
        return found


def _removals(removed: dict[int, list[int]]) -> Iterator[BlockRemoved]:
    for group, digests in removed.items():
        yield BlockRemoved(digests, MEDIUM, group)


class EventStream:
    """Messages of one lifetime, with dense numbers from 0.

    The first event of each message names the lifetime. Message 0, and the first one of a snapshot, begin with
    `AllBlocksCleared`, which has the block size and the groups.
    """

    def __init__(
        self,
        ledger: Ledger,
        lifetime: bytes,
        clock: Callable[[], float] = time.time,
        stores: Sequence[StoreLedger] = (),
    ) -> None:
        """`stores`: ledgers of stores below memory, which are published, too."""
        self._ledger, self._lifetime, self._clock, self._stores = ledger, lifetime, clock, stores
        self._kept: deque[Message] = deque()
        self._kept_bytes = 0
        self.next = 0  # number of the next message

    # -- live messages, in order

    def begin(self, contents: Sequence[Change]) -> Message:
        """Return a message that replaces readers' pictures: `contents` are those of the cache now."""
        self._ledger.clear()
        held = chain(self._ledger.events(contents), self._stored())
        return self._message([self._ledger.cleared(self._lifetime), *held])

    def step(self, changes: Sequence[Change]) -> Message:
        """Return the message of one step's changes, which are not empty."""
        return self._message(list(self._ledger.events(changes)))

    def stored(self, ledger: StoreLedger, changes: Iterable[StoreChange]) -> Message | None:
        """Return the message of a store's changes; None if readers know all of them."""
        events: list[Event] = list(ledger.events(changes))
        return self._message(events) if events else None

    def _stored(self) -> Iterator[BlockStored]:
        return chain.from_iterable(ledger.contents() for ledger in self._stores)

    def heartbeat(self) -> Message:
        """Return a message without content: a removal of no blocks, which every decoder takes."""
        return self._message([BlockRemoved([], MEDIUM, KV)])

    def _message(self, events: list[Event]) -> Message:
        message = Message(self.next, self._encoded(events))
        self.next += 1
        self._kept.append(message)
        self._kept_bytes += len(message.payload)
        while len(self._kept) > MAX_REPLAY_MESSAGES or (self._kept_bytes > MAX_REPLAY_BYTES and len(self._kept) > 1):
            self._kept_bytes -= len(self._kept.popleft().payload)
        return message

    def _encoded(self, events: list[Event]) -> bytes:
        events[0].lifetime = self._lifetime
        return encode(self._clock(), events)

    # -- answers to readers

    def replay(self, number: int) -> Iterator[Message]:
        """Yield the kept messages from `number` on: a first one with a later number is a gap."""
        kept = tuple(self._kept)
        yield from kept[max(0, number - self.next + len(kept)) :]

    def snapshot(self) -> Iterator[Message]:
        """Yield batches of the whole content for an empty reader; each has the next live message's number."""
        events: list[Event] = [self._ledger.cleared(self._lifetime)]
        blocks = 0
        for stored in chain(self._ledger.contents(), self._stored()):
            events.append(stored)
            blocks += len(stored.block_hashes)
            if blocks >= MAX_SNAPSHOT_BLOCKS:
                yield Message(self.next, self._encoded(events))
                events, blocks = [], 0
        if events:
            yield Message(self.next, self._encoded(events))
