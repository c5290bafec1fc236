"""The last n entries, as the sparse paper's experiments keep them."""

from __future__ import annotations

from headwater.cache.eviction.lru import Lru
from headwater.cache.node import Node
from headwater.cache.order import Kind, Victim
from headwater.cache.order.leaves import is_free_leaf
from headwater.plan import CacheLayout


class LastN(Lru):
    """Whatever is on no path of the last `n` entries goes at commit (the sparse paper, section 5: "exactly the last").

    An entry is the path that one request committed: its KV and all checkpoints along it. A path that goes on where an
    entry ends takes its place, so legs of one request, and turns of one session, are one entry, and requests that
    share a document are one each. One that ends within another, without a checkpoint, is part of that. What entries
    share goes with the last of them; what is pinned goes at the next commit after it was let go. Where memory is
    short before that, as LRU.
    """

    keeps_history = True

    def __init__(self, layout: CacheLayout, n: int) -> None:
        if n < 1:
            raise ValueError(f"n is {n}, and must be at least 1")
        super().__init__(layout)
        self._n = n
        self._entries: dict[Node, None] = {}  # nodes at which they end, the last one last
        self._spare: dict[Node, None] = {}  # unpinned leaves at which none ends

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
        climb: Node | None = node
        while climb is not None:
            self._entries.pop(climb, None)
            climb = climb.parent
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
