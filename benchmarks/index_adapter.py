"""Headwater under the interface of a shared index benchmark, which runs several caches on one workload.

Its `Adapter` has two budgets, so pages are in a split pool, a checkpoint being one page of the second region.
`Headwater` puts index, pool and policy under it, as its peers put their trees; `HeadwaterRequests` goes through
`PrefixCache`: a request with draft, lease and plan for each insert.
"""

from __future__ import annotations

import numpy as np

from headwater.cache import PrefixCache
from headwater.cache.eviction import make_eviction
from headwater.cache.eviction.base.policy import Room
from headwater.cache.evictor import Evictor
from headwater.cache.index import Index
from headwater.cache.node import Node
from headwater.cache.pool import Pool
from headwater.cache.segments.store import SegmentStore
from headwater.cache.tails import Tails
from headwater.plan import CacheLayout, Draft, Saving

Key = tuple[bytes, int]


def layout_of(page: int, kv_tokens: int, states: int) -> CacheLayout:
    """Two static regions, of `kv_tokens` and of `states` checkpoints."""
    n_pages = kv_tokens // page + states
    return CacheLayout(n_pages, page, page, 4 * page, slot_pages=0, state_fraction=states / n_pages)


class Headwater:
    """The tree with its pages and its eviction policy."""

    name = "headwater-lru"
    eviction = "lru"

    def __init__(self, page: int, kv_tokens: int, states: int) -> None:
        self.page = page
        layout = layout_of(page, kv_tokens, states)
        self.pool = Pool(layout)
        policy = make_eviction(self.eviction, layout)
        self.index = Index(4 * page, 1, policy)
        stored = SegmentStore(layout, self.pool), Tails(layout, self.index, self.pool, policy)
        self.evictor = Evictor(self.index, self.pool, policy, *stored, {})
        self.evictor.reserving = True  # no PrefixCache stands above the tree here, so nothing else may reserve
        self.root = self.index.root("")
        self.index.pin(self.root)
        self.now = 0
        self.last: tuple[Node, Node] = self.root, self.root  # end of the last match, and its checkpoint

    def prepare(self, tokens: np.ndarray) -> Key:
        return np.asarray(tokens, dtype=np.int32).tobytes(), len(tokens) // self.page

    def match(self, key: Key) -> tuple[int, int]:
        """Tokens of KV and depth of the checkpoint; what it finds is refreshed by `insert`."""
        deepest, end = self.index.walk(self.root, *key)
        resume = self.index.deepest_checkpoint(deepest, end) or self.root
        self.last = deepest, resume
        return end * self.page, resume.end * self.page

    def insert(self, key: Key, hit: int = 0) -> None:
        """All of the key's whole pages, and a checkpoint at their end."""
        tokens, end = key
        self.now += 1
        if hit:
            self.index.resume(self.last[1], self.now)
        last, depth = self.index.walk(self.root, tokens, end)
        joint = node = self.index.boundary(last, depth)
        if depth < end:
            node = self.index.add(joint, tokens, end, self.pool.kv.take(end - depth))
        if node.checkpoint is None:
            self.index.save(node, tuple(self.pool.states.take(1)), self.now)
        self.index.touch(node, None, self.now)
        self.index.tidy(joint)

    def evict_states(self, n: int) -> int:
        for _ in range(n):
            self.evictor.evict(Room.STATE, 1, self.now)
        return n

    def evict_kv(self, tokens: int) -> int:
        before = self.evictor.kv_pages
        self.evictor.make_room(Room.KV, self.pool.kv.free + -(-tokens // self.page), self.now)
        return (self.evictor.kv_pages - before) * self.page

    def lock(self) -> tuple[Node, Node]:
        for node in self.last:
            self.index.pin(node)
        self.index.hold(self.last[1])
        return self.last

    def unlock(self, handle: tuple[Node, Node]) -> None:
        self.index.hold(handle[1], False)
        for node in handle:
            self.index.unpin(node)

    def free(self) -> tuple[int, int]:
        return self.pool.kv.free * self.page, self.pool.states.free

    def counts(self) -> tuple[int, int, int]:
        return self.index.kv_pages * self.page, self.index.checkpoints, self.index.nodes


class HeadwaterSegLen(Headwater):
    name, eviction = "headwater-seglen", "seglen"


class HeadwaterLearned(Headwater):
    name, eviction = "headwater-learned", "headwater"


class HeadwaterRequests:
    """The public cache: `match` changes nothing; `insert` is reserve + commit + release, and evicts what it takes."""

    name = "headwater-requests"

    def __init__(self, page: int, kv_tokens: int, states: int) -> None:
        self.page, self.budget = page, (kv_tokens, states)
        self.cache = PrefixCache(layout_of(page, kv_tokens, states))
        self.requests = 0

    def prepare(self, tokens: np.ndarray) -> Key:
        return np.asarray(tokens, dtype=np.int32).tobytes(), len(tokens) // self.page * self.page

    def match(self, key: Key) -> tuple[int, int]:
        found = self.cache.match(key[0], key[1] + 1)  # one more, since the last token is never matched
        return found.kv_tokens, found.checkpoint_tokens

    def insert(self, key: Key, hit: int = 0) -> None:
        tokens, end = key
        if hit < end:
            self.requests += 1
            draft = Draft(self.requests, "", tokens, hit, end, end, Saving((end,)))
            self.cache.commit(self.cache.reserve(draft))
            self.cache.release(self.requests)

    def evict_states(self, n: int) -> int:
        evictor = self.cache.evictor
        for _ in range(n):
            evictor.reserving = True  # it stands in for `reserve`, which leaves it at False
            evictor.evict(Room.STATE, 1, self.requests)
        return n

    def evict_kv(self, tokens: int) -> int:
        evictor, pool = self.cache.evictor, self.cache.pool
        before, evictor.reserving = evictor.kv_pages, True
        evictor.make_room(Room.KV, pool.kv.free + -(-tokens // self.page), self.requests)
        return (evictor.kv_pages - before) * self.page

    def lock(self) -> None:
        """Nothing to do: `reserve` pins what it reads before it evicts."""

    def unlock(self, handle: None) -> None:
        """`release` has done it."""

    def free(self) -> tuple[int, int]:
        """The whole budgets: `reserve` makes the room that it needs."""
        return self.budget

    def counts(self) -> tuple[int, int, int]:
        stats = self.cache.stats()
        return stats.pages_kv * self.page, stats.checkpoints, stats.nodes
