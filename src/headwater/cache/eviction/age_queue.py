"""Nodes by age. Refreshing a node costs nothing; its place is put right when it comes to the front."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace

from headwater.cache.index import Node


class AgeQueue:
    """A heap of (time, serial, node). While a node is in it, its time may only grow."""

    def __init__(self, time_of: Callable[[Node], int]) -> None:
        self._time_of = time_of
        self._heap: list[tuple[int, int, Node]] = []
        self._members: set[Node] = set()

    def put(self, node: Node, member: bool) -> None:
        """Make the node a member, or not one."""
        if not member:
            self._members.discard(node)
        elif node not in self._members:
            self._members.add(node)
            heappush(self._heap, (self._time_of(node), node.serial, node))
            if len(self._heap) > 2 * len(self._members) + 64:
                self._forget_leavers()

    def oldest(self) -> Node | None:
        """The member with the lowest time; of equals the one with the lowest serial."""
        heap = self._heap
        while heap:
            time, serial, node = heap[0]
            if node not in self._members:
                heappop(heap)
            elif (current := self._time_of(node)) != time:
                heapreplace(heap, (current, serial, node))
            else:
                return node
        return None

    def _forget_leavers(self) -> None:
        self._heap = [(self._time_of(node), node.serial, node) for node in self._members]
        heapify(self._heap)

    def __len__(self) -> int:
        return len(self._members)
