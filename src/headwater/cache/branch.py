"""Cached prefix along one key: its resume positions, eviction of content ranked below it, removal of its own end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headwater.cache.evictor import Evictor
from headwater.cache.index import Index
from headwater.cache.node import Node
from headwater.cache.pool import Pool
from headwater.cache.survey import Survey
from headwater.plan import CacheLayout, Place


@dataclass(frozen=True)
class Branches:
    """Operations on the cached prefix of one key. Keys are of whole units, positions in tokens."""

    layout: CacheLayout
    index: Index
    pool: Pool
    evictor: Evictor
    now: Callable[[], int]  # the cache's tick

    def checkpoints(self, key: bytes, namespace: str) -> tuple[int, ...]:
        """Return the resume positions of a prompt that continues `key`, ascending, without speculative ones.

        Changes nothing.
        """
        unit = self.layout.unit_tokens
        path, end = self.index.find(namespace, key)
        if self.layout.every_page:
            end = self.index.deepest_with_states(path[-1], end) if path else 0
            return (end * unit,) if end else ()
        kept = (node for node in path if node.checkpoint is not None and not node.speculative and node.end <= end)
        return tuple(node.end * unit for node in kept)

    def make_room_below(self, kv: int, states: int, branch: Place, resume: Place) -> bool:
        """Evict what ranks below the content of `branch` beyond its place, until `kv` and `states` pages are free.

        False: the branch itself would be evicted next. It is complete then, except for speculative checkpoints before
        its last one, and so is the prefix of a leg that starts at `resume`. If all else together would be too little,
        nothing is evicted.
        """
        if self.pool.shortage(kv, states) is None:
            return True
        own = self._own(branch)
        start = self._pinned(resume)
        try:
            keep = own if start is None else own | {start}
            evictable = self.evictor.evictable(Survey([], 0, None, (), (), kv, states), None, keep)
            if self.pool.shortage(kv, states, evictable) is not None:
                return False
            return self.evictor.make_rooms(kv, states, self.now() + 1, own)
        finally:
            if start is not None:
                self.index.unpin(start, start.checkpoint is not None)

    def _own(self, branch: Place) -> set[Node]:
        """Return the nodes beyond the place, without speculative checkpoints that have a checkpoint below them."""
        path, _ = self.index.find(branch.namespace, branch.key)
        last = max((node.end for node in path if node.checkpoint is not None and not node.speculative), default=0)
        beyond = (node for node in path if node.end * self.layout.unit_tokens > branch.at)
        return {node for node in beyond if not node.speculative or node.end > last}

    def _pinned(self, place: Place) -> Node | None:
        """Pin the node that ends at this place, and its checkpoint, and return it; None if the place is not cached."""
        units = place.at // self.layout.unit_tokens
        path, end = self.index.find(place.namespace, place.key, units)
        if not path or end < units:
            return None
        node = self.index.boundary(path[-1], units)
        self.index.pin(node, node.checkpoint is not None)
        return node

    def drop(self, key: bytes, above: int, namespace: str) -> None:
        """Drop the cached content of `key` beyond `above`, from its end upwards, unless it is pinned or shared."""
        floor = above // self.layout.unit_tokens
        path, end = self.index.find(namespace, key)
        node = path[-1] if path else None
        if node is None or node.end > end:  # the rest of it is another's
            return
        while node.parent is not None and node.end > floor and not (node.children or node.pins or node.tails):
            parent = node.parent
            if node.checkpoint is not None:
                self.pool.states.give(self.index.drop(node, evicted=False))
            if node.parent is not None:  # a node without KV left with its checkpoint
                units = node.end - max(floor, parent.end)
                self.pool.kv.give(self.index.trim(node, units, evicted=False))
            node = parent
