"""What is cached along one key: where work can resume on it, whether it is next to go, and giving up its own end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headwater.cache.eviction import Eviction, Room
from headwater.cache.index import Index
from headwater.cache.node import Node
from headwater.cache.pool import Pool
from headwater.types import CacheLayout


@dataclass(frozen=True)
class Branches:
    """Over the index of one cache. Keys are of whole units, positions in tokens."""

    layout: CacheLayout
    index: Index
    pool: Pool
    policy: Eviction
    now: Callable[[], int]  # the cache's tick

    def checkpoints(self, key: bytes, namespace: str) -> tuple[int, ...]:
        """Where a prompt that goes on after `key` could resume on its path, ascending, guesses left out.

        Asking changes nothing.
        """
        unit = self.layout.unit_tokens
        path, end = self._path(key, namespace)
        if self.layout.resumable == "every_page":
            return (end * unit,) if end else ()
        kept = (node for node in path if node.checkpoint is not None and not node.speculative and node.end <= end)
        return tuple(node.end * unit for node in kept)

    def would_evict(self, pages: int, key: bytes, above: int, namespace: str) -> bool:
        """Whether taking so many pages would begin with what is cached of `key` beyond `above`."""
        if self.pool.free >= pages:
            return False
        path, _ = self._path(key, namespace)
        own = {node for node in path if node.end * self.layout.unit_tokens > above}
        rooms = (Room.KV, Room.STATE) if self.pool.split else (Room.ANY,)
        victims = (self.policy.victim(room, self.now()) for room in rooms)
        return any(victim is not None and victim[0] in own for victim in victims)

    def drop(self, key: bytes, above: int, namespace: str) -> None:
        """Give up what is cached of `key` beyond `above`, from its end on, as far as nobody reads it or shares it."""
        floor = above // self.layout.unit_tokens
        path, end = self._path(key, namespace)
        node = path[-1] if path else None
        if node is None or node.end > end:  # the rest of it is another's
            return
        while node.parent is not None and node.end > floor and not (node.children or node.pins):
            parent = node.parent
            if node.checkpoint is not None:
                self.pool.states.give(self.index.drop(node, evicted=False))
            if node.parent is not None:  # a node without KV left with its checkpoint
                units = node.end - max(floor, parent.end)
                self.pool.kv.give(self.index.trim(node, units, evicted=False))
            node = parent

    def _path(self, key: bytes, namespace: str) -> tuple[list[Node], int]:
        """The nodes that `key` enters, and the depth that it reaches, in units."""
        root = self.index.roots.get(namespace)
        if root is None:
            return [], 0
        last, end = self.index.walk(root, key, len(key) // self.layout.unit_bytes)
        return self.index.path(last), end
