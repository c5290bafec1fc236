"""Nodes by age, put right only when somebody asks for the oldest: refreshing or blocking a node costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace

from headwater.cache.node import Node


class AgeQueue:
    """A heap of (time, serial, node). A node's time may only grow while it is in it.

    `add` a node whenever it may have become a candidate; whether it is one is asked again before it is handed out.
    """

    def __init__(self, time_of: Callable[[Node], int], is_candidate: Callable[[Node], bool]) -> None:
        self._time_of, self._is_candidate = time_of, is_candidate
        self._heap: list[tuple[int, int, Node]] = []
        self._queued: set[Node] = set()
        self._sweep_at = 64

    def add(self, node: Node) -> None:
        """Queue the node unless it is queued."""
        if node not in self._queued:
            self._queued.add(node)
            heappush(self._heap, (self._time_of(node), node.serial, node))
            if len(self._heap) > self._sweep_at:
                self._sweep()

    def oldest(self) -> Node | None:
        """The candidate with the lowest time; of equals the one with the lowest serial. It stays queued."""
        heap = self._heap
        while heap:
            time, serial, node = heap[0]
            if not self._is_candidate(node):
                heappop(heap)
                self._queued.discard(node)
            elif (current := self._time_of(node)) != time:
                heapreplace(heap, (current, serial, node))
            else:
                return node
        return None

    def _sweep(self) -> None:
        """Let go of those that are no candidates now; they are added again when they become some."""
        nodes = [node for _, _, node in self._heap if self._is_candidate(node)]
        self._queued = set(nodes)
        self._heap = [(self._time_of(node), node.serial, node) for node in nodes]
        heapify(self._heap)
        self._sweep_at = 2 * len(nodes) + 64
