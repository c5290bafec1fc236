"""Ranking: the nodes with the lowest scores, in order, until they are used up."""

from __future__ import annotations

from heapq import heappop, heappush

from headwater.cache.node import Node

Entry = tuple[float, int, Node]  # score and serial


class Ranking:
    """The lowest of all scores at some moment, and those that changed since to one that is not above them.

    A node with a higher score than all that were ranked cannot be the lowest before these are used up, so it is left
    out: most changes cost a comparison.
    """

    def __init__(self) -> None:
        self.bound = -1.0  # the highest score that was ranked; below all scores if none was
        self._ranked: list[Entry] = []  # the lowest one last
        self._changed: list[Entry] = []  # a heap
        self._entries: dict[Node, Entry] = {}  # that stand; another one of the node is out of date

    def begin(self, ranked: list[Entry]) -> None:
        """Rank these, the lowest last, in place of all others."""
        self._ranked, self._changed = ranked, []
        self._entries = {entry[2]: entry for entry in ranked}
        self.bound = ranked[0][0] if ranked else -1.0

    def put(self, node: Node, score: float) -> None:
        """Set the score of a node that changed."""
        if score <= self.bound:
            self._entries[node] = entry = score, node.serial, node
            heappush(self._changed, entry)
        else:
            self._entries.pop(node, None)

    def discard(self, node: Node) -> None:
        """Remove the node, if it is ranked."""
        self._entries.pop(node, None)

    def lowest(self) -> Node | None:
        """Return the node with the lowest score, of equals the older one; None once those that were ranked are gone."""
        ranked, changed, entries = self._ranked, self._changed, self._entries
        while ranked and entries.get(ranked[-1][2]) is not ranked[-1]:
            ranked.pop()
        if not ranked:
            return None
        while changed and entries.get(changed[0][2]) is not changed[0]:
            heappop(changed)
        return min(ranked[-1], changed[0])[2] if changed else ranked[-1][2]
