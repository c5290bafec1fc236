"""Requests that have no slot yet, first come first served; a preempted one comes back to its old place."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from headwater.schedule.sequence import Sequence


class Queue:
    """Waiting sequences in order of arrival (ids grow with arrival)."""

    def __init__(self) -> None:
        self._waiting: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._waiting))

    def push(self, seq: Sequence) -> None:
        insort(self._waiting, seq, key=lambda s: s.id)

    def remove(self, seq: Sequence) -> None:
        self._waiting.remove(seq)
