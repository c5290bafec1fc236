"""Fair shares: whoever was served least goes first, so that one namespace's flood does not starve another.

A virtual counter a namespace, raised by the tokens that were computed for it; a namespace that comes back from being
idle starts no lower than the least of those that are active, or where nobody is, than whoever left last: so nobody
saves up (virtual token counter: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithm 2).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

from headwater.schedule.sequence import Sequence

REMEMBERED = 1024  # namespaces whose counters are kept while they are idle


class Shares:
    """Tokens served, by namespace."""

    def __init__(self) -> None:
        self._served: OrderedDict[str, int] = OrderedDict()  # the most recently active last
        self._open: dict[str, int] = {}  # requests that wait or run
        self._level = 0  # counter of the last one that left and left nobody behind

    def __len__(self) -> int:
        return len(self._served)

    def join(self, namespace: str) -> None:
        """A request of `namespace` came."""
        if namespace not in self._open:
            least = min((self._served[name] for name in self._open), default=self._level)
            self._served[namespace] = max(self._served.get(namespace, 0), least)
        self._open[namespace] = self._open.get(namespace, 0) + 1
        self._served.move_to_end(namespace)

    def leave(self, namespace: str) -> None:
        """A request of `namespace` ended."""
        self._open[namespace] -= 1
        if not self._open[namespace]:
            del self._open[namespace]
        if not self._open:
            self._level = self._served[namespace]
        if len(self._served) > REMEMBERED + len(self._open):
            del self._served[next(name for name in self._served if name not in self._open)]

    def charge(self, namespace: str, tokens: int) -> None:
        """So many tokens were computed for `namespace`; for one that has left, nothing is noted."""
        if namespace in self._served:
            self._served[namespace] += tokens

    def order(self, seqs: Iterable[Sequence]) -> Iterator[Sequence]:
        """Lazily, the next of the namespace that is served least; within one, in order of arrival.

        Each sequence that was yielded counts with the tokens that it may still compute.
        """
        lines: dict[str, list[Sequence]] = {}
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
