"""Requests in an order that is settled: a trace's own, or that of a sample of it."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.traces.request import Request


class Played:
    """Arrivals that no answer moves."""

    def __init__(self, order: Sequence[tuple[float, Request]]) -> None:
        self._order, self._next = order, 0

    def __len__(self) -> int:
        return len(self._order) - self._next

    def due(self) -> float | None:
        return self._order[self._next][0] if len(self) else None

    def take(self) -> Request:
        self._next += 1
        return self._order[self._next - 1][1]

    def answered(self, request: Request, now: float) -> None:
        """Nothing waits for it."""
