"""Requests that have no slot yet, in order of arrival; a preempted one comes back to its old place."""

from __future__ import annotations

from bisect import insort
from collections import Counter
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

    def displaced_by(self, namespace: str) -> Sequence | None:
        """Who leaves a full queue for a newcomer of `namespace`: the last of the namespace that waits most.

        None if that is the newcomer's own, or would be with it; nobody leaves whose answer has begun.
        """
        counts = Counter(seq.namespace for seq in self._waiting)
        longest = max(counts, key=lambda name: counts[name], default=namespace)
        if counts[longest] <= counts[namespace] + 1:
            return None
        fresh = (seq for seq in reversed(self._waiting) if seq.namespace == longest and not seq.preemptions)
        return next(fresh, None)
