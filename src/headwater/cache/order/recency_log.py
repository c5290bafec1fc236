"""Nodes in the order in which they were used: times only grow, so noting a use is an append."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from headwater.cache.node import Node


class RecencyLog:
    """(time, node) of each use; all but a node's last are stale and dropped when they come to the front."""

    def __init__(self, is_candidate: Callable[[Node], bool]) -> None:
        self._is_candidate = is_candidate
        self._log: deque[tuple[int, Node]] = deque()
        self._last: dict[Node, int] = {}

    def note(self, node: Node, time: int) -> None:
        """The node was used at `time`, which is not before any noted earlier."""
        if self._last.get(node) != time:
            self._last[node] = time
            self._log.append((time, node))
            if len(self._log) > 2 * len(self._last) + 64:
                self._log = deque((time, node) for time, node in self._log if self._last.get(node) == time)

    def discard(self, node: Node) -> None:
        """There is nothing to give up at this node any more."""
        self._last.pop(node, None)

    def oldest(self) -> Node | None:
        """The candidate that was used longest ago; of equals the one with the lowest serial."""
        log, last = self._log, self._last
        while log and last.get(log[0][1]) != log[0][0]:
            log.popleft()
        best, best_time = None, 0
        for time, node in log:
            if best is not None and time > best_time:
                break
            if last.get(node) == time and self._is_candidate(node) and (best is None or node.serial < best.serial):
                best, best_time = node, time
        return best
