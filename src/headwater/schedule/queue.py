"""Order of requests: by arrival in the queue, by fair shares between namespaces.

A virtual counter a namespace is raised by the tokens that are computed for it; the namespace with the lowest goes
first, so that a flood of requests in one does not starve another. A namespace that was idle starts no lower than the
lowest active one, or, if none is active, than the one that left last: idle time earns no credit (virtual token counter:
Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithm 2).
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import TypeVar

from headwater.schedule.kinds.request import Request
from headwater.schedule.sequence import Sequence

AnySequence = TypeVar("AnySequence", bound=Sequence)
REMEMBERED = 1024  # idle namespaces whose counters are kept


class Queue:
    """Waiting requests in order of arrival (ids grow with arrival); a preempted one returns to its old place."""

    def __init__(self) -> None:
        self._waiting: list[Request] = []
        self._lines: dict[str, list[Request]] = {}  # the same, by namespace

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._waiting))

    def push(self, seq: Request) -> None:
        """Queue a request."""
        for line in (self._waiting, self._lines.setdefault(seq.namespace, [])):
            insort(line, seq, key=lambda s: s.id)

    def remove(self, seq: Request) -> None:
        """Take a request out. KeyError or ValueError if it does not wait."""
        line = self._lines[seq.namespace]
        for requests in (self._waiting, line):
            requests.remove(seq)
        if not line:
            del self._lines[seq.namespace]

    def first(self, count: int) -> list[Request]:
        """Return at most `count` requests, in order of arrival."""
        return self._waiting[:count]

    def fronts(self, count: int, without: Container[str] = ()) -> list[Request]:
        """Return the first `count` requests of each namespace that is not in `without`."""
        return [seq for name, line in self._lines.items() if name not in without for seq in line[:count]]

    def displaced_by(self, namespace: str) -> Request | None:
        """Return the request that leaves a full queue for a new one of `namespace`.

        It is the last one of the namespace with most waiting requests. None if that is `namespace`, or would be with
        the new request, or if the answers of all its requests have begun.
        """
        counts = Counter({name: len(line) for name, line in self._lines.items()})
        longest = max(counts, key=lambda name: counts[name], default=namespace)
        if counts[longest] <= counts[namespace] + 1:
            return None
        waiting = (seq for seq in reversed(self._waiting) if seq.namespace == longest)
        return next((seq for seq in waiting if not (seq.preemptions or seq.handover.begun)), None)


class Shares:
    """Tokens computed, by namespace."""

    def __init__(self) -> None:
        self._served: OrderedDict[str, int] = OrderedDict()  # the most recently active last
        self._open: dict[str, int] = {}  # requests that wait or run
        self._level = 0  # counter of the namespace that left last, when no other was active

    def __len__(self) -> int:
        return len(self._served)

    def join(self, namespace: str) -> None:
        """Note that a request of `namespace` arrived."""
        if namespace not in self._open:
            least = min((self._served[name] for name in self._open), default=self._level)
            self._served[namespace] = max(self._served.get(namespace, 0), least)
        self._open[namespace] = self._open.get(namespace, 0) + 1
        self._served.move_to_end(namespace)

    def leave(self, namespace: str) -> None:
        """Note that a request of `namespace` ended."""
        self._open[namespace] -= 1
        if not self._open[namespace]:
            del self._open[namespace]
        if not self._open:
            self._level = self._served[namespace]
        if len(self._served) > REMEMBERED + len(self._open):
            del self._served[next(name for name in self._served if name not in self._open)]

    def charge(self, namespace: str | None, tokens: int) -> None:
        """Raise a namespace's counter by `tokens`. None, or a namespace that was forgotten, is charged nothing."""
        if namespace is not None and namespace in self._served:
            self._served[namespace] += tokens

    def order(self, seqs: Iterable[AnySequence]) -> Iterator[AnySequence]:
        """Yield the next sequence of the namespace with the lowest counter; within one, in order of arrival.

        Each sequence that was yielded counts with the tokens that it may still compute.
        """
        lines: dict[str, list[AnySequence]] = {}
        for seq in sorted(seqs, key=lambda s: s.id, reverse=True):
            lines.setdefault(seq.namespace, []).append(seq)
        heap = [(self._served.get(name, 0), line[-1].id, line) for name, line in lines.items()]
        heapify(heap)
        while heap:
            served, _, line = heappop(heap)
            seq = line.pop()
            if line:
                heappush(heap, (served + len(seq.tokens) - seq.computed, line[-1].id, line))
            yield seq
