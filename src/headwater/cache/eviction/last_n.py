"""Last n: only the n newest entries are kept, as in the experiments of the sparse prefix caching paper."""

from __future__ import annotations

from headwater.cache.eviction.base.policy import Kind, Victim
from headwater.cache.eviction.lru import Lru
from headwater.cache.node import Node, is_free_leaf
from headwater.plan import CacheLayout


class LastN(Lru):
    """Evict nodes on no path of the last `n` entries at commit (sparse prefix caching, section 5: "exactly the last").

    An entry is the path that one request committed: its KV and all checkpoints along it. A path that continues where an
    entry ends replaces that entry, so the legs of one request, and the turns of one session, are one entry, and
    requests that share a document are one each. A path that ends within another, without a checkpoint, is part of that
    entry. Shared nodes go with the last entry that has them; pinned nodes go at the next commit after their release.
    If memory is short before that, LRU decides.
    """

    keeps_history = True

    def __init__(self, layout: CacheLayout, n: int) -> None:
        if n < 1:
            raise ValueError(f"n is {n}, and must be at least 1")
        super().__init__(layout)
        self._n = n
        self._entries: dict[Node, None] = {}  # nodes at which entries end, the newest last
        self._spare: dict[Node, None] = {}  # unpinned leaves at which no entry ends

    def changed(self, node: Node) -> None:
        super().changed(node)
        if node.parent is None:
            self._entries.pop(node, None)
        self._sort_out(node)

    def surplus(self, node: Node, now: int) -> Victim | None:
        if node.parent is not None and next(reversed(self._entries), None) is not node:
            self._enter(node)
        leaf = next(iter(self._spare), None)
        return None if leaf is None else (leaf, Kind.NODE)

    def _enter(self, node: Node) -> None:
        for above in node.climb():
            self._entries.pop(above, None)
        for absorbed in [end for end in self._entries if end.parent is None]:
            del self._entries[absorbed]
        self._entries[node] = None
        self._spare.pop(node, None)
        while len(self._entries) > self._n:
            oldest = next(iter(self._entries))
            del self._entries[oldest]
            self._sort_out(oldest)

    def _sort_out(self, node: Node) -> None:
        if is_free_leaf(node) and node not in self._entries:
            self._spare[node] = None
        else:
            self._spare.pop(node, None)
