"""Nodes by a rank that is set from outside and may change either way."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from headwater.cache.node import Node

Rank = tuple[float, ...]


class Ranking:
    """A heap of (rank, serial, node); an entry whose rank is no longer its node's is dropped when it comes to the top.

    Who is no candidate when asked for is dropped, too: rank it again when it may have become one.
    """

    def __init__(self, is_candidate: Callable[[Node], bool]) -> None:
        self._is_candidate = is_candidate
        self._heap: list[tuple[Rank, int, Node]] = []
        self._rank: dict[Node, Rank] = {}

    def put(self, node: Node, rank: Rank) -> None:
        """Add the node, or set its rank anew."""
        if self._rank.get(node) != rank:
            self._rank[node] = rank
            heappush(self._heap, (rank, node.serial, node))
            if len(self._heap) > 2 * len(self._rank) + 64:
                self._heap = [(rank, node.serial, node) for node, rank in self._rank.items()]
                heapify(self._heap)

    def discard(self, node: Node) -> None:
        self._rank.pop(node, None)

    def lowest(self) -> Node | None:
        """The candidate with the lowest rank; of equals the one with the lowest serial. It stays ranked."""
        heap, ranks = self._heap, self._rank
        while heap:
            rank, _, node = heap[0]
            if ranks.get(node) == rank:
                if self._is_candidate(node):
                    return node
                del ranks[node]
            heappop(heap)
        return None
