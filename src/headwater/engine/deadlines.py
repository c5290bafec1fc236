"""Requests that must end by a time. Times are in seconds of a monotonic clock."""

from __future__ import annotations

from collections.abc import Container
from heapq import heapify, heappop, heappush


class Deadlines:
    """A heap of (time, request); what has ended otherwise is skipped when its time comes."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at: float, request: int) -> None:
        heappush(self._heap, (at, request))

    def forget_all_but(self, open_requests: Container[int]) -> None:
        """Drop the entries of requests that have ended."""
        self._heap = [entry for entry in self._heap if entry[1] in open_requests]
        heapify(self._heap)

    def take_passed(self, now: float) -> list[int]:
        """The requests whose time has come; they are not told again."""
        passed = []
        while self._heap and self._heap[0][0] <= now:
            passed.append(heappop(self._heap)[1])
        return passed
