"""Stream of a worker's messages: numbered, the last ones kept for replay, and snapshots. No sockets, no threads."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice

from headwater.cache.changes import Change
from headwater.cluster.ledger import Ledger
from headwater.cluster.messages import KV, MEDIUM, BlockRemoved, BlockStored, Event, Message, encode
from headwater.cluster.store_ledger import StoreLedger
from headwater.tiers.changes import Change as StoreChange

MAX_REPLAY_MESSAGES, MAX_REPLAY_BYTES = 10_000, 64 * 2**20  # for replay
MAX_SNAPSHOT_BLOCKS = 16_384  # in one message


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
        first = self.next - len(self._kept)
        yield from islice(tuple(self._kept), max(0, number - first), None)

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
