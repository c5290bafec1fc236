"""Requests that have no slot yet, in order of arrival; a preempted one comes back to its old place."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Container, Iterator

from headwater.schedule.sequence import Sequence


class Queue:
    """Waiting sequences in order of arrival (ids grow with arrival)."""

    def __init__(self) -> None:
        self._waiting: list[Sequence] = []
        self._lines: dict[str, list[Sequence]] = {}  # the same, by namespace

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._waiting))

    def push(self, seq: Sequence) -> None:
        for line in (self._waiting, self._lines.setdefault(seq.namespace, [])):
            insort(line, seq, key=lambda s: s.id)

    def remove(self, seq: Sequence) -> None:
        self._waiting.remove(seq)
        line = self._lines[seq.namespace]
        line.remove(seq)
        if not line:
            del self._lines[seq.namespace]

    def first(self, count: int) -> list[Sequence]:
        """At most `count`, in order of arrival."""
        return self._waiting[:count]

    def fronts(self, count: int, without: Container[str] = ()) -> list[Sequence]:
        """The first `count` of each namespace that is not in `without`."""
        return [seq for name, line in self._lines.items() if name not in without for seq in line[:count]]

    def displaced_by(self, namespace: str) -> Sequence | None:
        """Who leaves a full queue for a newcomer of `namespace`: the last of the namespace that waits most.

        None if that is the newcomer's own, or would be with it; nobody leaves whose answer has begun.
        """
        counts = Counter({name: len(line) for name, line in self._lines.items()})
        longest = max(counts, key=lambda name: counts[name], default=namespace)
        if counts[longest] <= counts[namespace] + 1:
            return None
        fresh = (seq for seq in reversed(self._waiting) if seq.namespace == longest and not seq.preemptions)
        return next(fresh, None)
