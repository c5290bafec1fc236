"""Evictor: carries out what the eviction policy chooses.

Two operations of the cache evict. `reserve` makes room, for legs, segments and healing alike. `commit` gives up what
the policy's own cap excludes now that a path was committed (`path_cap`, `last_n`). Anywhere else eviction raises.

`keep` are nodes that stay as they are: eviction stops before the first of them is chosen, and returns False.
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
    """Moves pages of the index and of stored segments to the pool."""

    def __init__(
        self, index: Index, pool: Pool, policy: Eviction, segments: SegmentStore, history: History | None = None
    ) -> None:
        self._index, self._pool, self._policy, self._history = index, pool, policy, history
        self._segments = segments
        self.checkpoints = 0  # evicted so far
        self.speculative = 0  # of them
        self.kv_pages = 0
        self.reuse: Counter[int] = Counter()  # evicted checkpoints by the number of requests that resumed there
        self.reserving = False  # whether room may be made: `reserve` alone permits it, while it runs

    def make_room(self, room: Room, pages: int, now: int, keep: Nodes = NONE) -> bool:
        """Evict until `pages` are free. The caller has checked that as many can be freed, unless some are kept."""
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
        """Take what is free in the other region, then evict in the own region, then in the other one.

        A segment has pages in both regions: after each eviction free pages are counted again.
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
        """Evict one checkpoint, or up to `pages` of one leaf's tail; if no prefix may go, a segment."""
        if not self.reserving:
            raise RuntimeError("eviction for room outside of reserve")
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
        """Evict what the policy's cap excludes, after the commit of a path to `node`. `commit` alone calls this."""
        while (victim := self._policy.surplus(node, now)) is not None:
            self._give_up(*victim)

    def _give_up(self, node: Node, kind: Kind) -> None:
        """Evict one checkpoint, or with kind NODE the checkpoint and KV of a leaf."""
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
