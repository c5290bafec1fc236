"""Carries out what the eviction policy chooses, until there is room.

`keep` are nodes of which nothing is to go: what would evict one stops right before it, and returns False.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet

from headwater.cache.history import History
from headwater.cache.index import Index
from headwater.cache.node import Node
from headwater.cache.order import Eviction, Kind, Room
from headwater.cache.pool import Pool
from headwater.cache.segments.store import SegmentStore

Nodes = AbstractSet[Node]
NONE: Nodes = frozenset()


class Evictor:
    """Moves pages from the index, and from stored segments, to the pool."""

    def __init__(
        self, index: Index, pool: Pool, policy: Eviction, segments: SegmentStore, history: History | None = None
    ) -> None:
        self._index, self._pool, self._policy, self._history = index, pool, policy, history
        self._segments = segments
        self.checkpoints = 0  # evicted so far
        self.speculative = 0  # of them
        self.kv_pages = 0
        self.reuse: Counter[int] = Counter()  # evicted checkpoints by the number of requests that resumed there

    def make_room(self, room: Room, pages: int, now: int, keep: Nodes = NONE) -> bool:
        """Evict until `pages` are free. The caller has made sure that as many can be, unless some are kept."""
        region = self._pool.states if room is Room.STATE else self._pool.kv
        while region.free < pages:
            if self._segments.goes_first:
                self._segments.evict()
            elif not self.evict(room, pages - region.free, now, keep):
                return False
        return True

    def make_rooms(self, kv: int, states: int, now: int, keep: Nodes = NONE) -> bool:
        """Evict until `kv` pages are free for KV and `states` for checkpoints and slots, both at once."""
        pool = self._pool
        if not pool.split:
            return self.make_room(Room.ANY, kv + states, now, keep)
        if pool.step:
            return self._make_elastic(kv, states, now, keep)
        return self.make_room(Room.KV, kv, now, keep) and self.make_room(Room.STATE, states, now, keep)

    def _make_elastic(self, kv: int, states: int, now: int, keep: Nodes) -> bool:
        """Regions first take what is free in the other one, then evict their own, then what the other one can.

        A segment has pages in both, so after each one that goes what is free is looked at anew.
        """
        pool = self._pool
        pool.trade(kv, states)
        sides = (Room.KV, pool.kv, kv), (Room.STATE, pool.states, states)
        for (room, region, wanted), (other, lender, kept) in (sides, sides[::-1]):
            while region.free < wanted:
                if self._segments.goes_first:
                    self._segments.evict()
                elif self._policy.victim(room, now) is not None:
                    if not self.evict(room, wanted - region.free, now, keep):
                        return False
                else:
                    pool.trade(kv, states)
                    steps = -((region.free - wanted) // pool.step)
                    short = kept + steps * pool.step - lender.free
                    if steps > 0 and not (self._segments.evict() or self.evict(other, short, now, keep)):
                        return False
        return True

    def evict(self, room: Room, pages: int, now: int, keep: Nodes = NONE) -> bool:
        """Give up one checkpoint, or up to `pages` of one leaf's tail; where no prefix may go, a segment."""
        victim = self._policy.victim(room, now)
        if victim is None and self._segments.evict():
            return True
        if keep and (victim is None or victim[0] in keep):
            return False
        assert victim is not None, f"the policy finds nothing to evict for {room}, {pages} pages short"
        node, kind = victim
        if kind is Kind.TAIL:
            self._trim(node, pages)
        else:
            self._give_up(node, kind)
        return True

    def give_up_surplus(self, node: Node, now: int) -> None:
        """Evict what the policy does not want to keep now that a path down to `node` was committed."""
        while (victim := self._policy.surplus(node, now)) is not None:
            self._give_up(*victim)

    def _give_up(self, node: Node, kind: Kind) -> None:
        """One checkpoint; or (kind NODE) all that the leaf keeps."""
        pages = len(node.pages)
        if node.checkpoint is not None:
            self.checkpoints += 1
            self.speculative += node.speculative
            self.reuse[node.hits] += 1
            self._pool.states.give(self._index.drop(node))
        if kind is Kind.NODE and pages:
            self._trim(node, pages)

    def _trim(self, node: Node, pages: int) -> None:
        if self._history is not None:
            self._history.note(self._index.namespace(node), node)
        units = min(len(node.pages), -(-pages // self._index.unit_pages) * self._index.unit_pages)
        freed = self._index.trim(node, units // self._index.unit_pages)
        self._pool.kv.give(freed)
        self.kv_pages += len(freed)
