"""Memory that each hit takes if the most recently used content is kept: all sizes in one pass (Mattson et al. 1970).

It is a model and not the cache: a state can be resumed at every unit, checkpoints weigh as many pages as a request's
do on average, and eviction is strictly by last use. `lab/size.py` corrects it by replays of the cache.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from headwater.cache.index import Index
from headwater.cache.node import Node
from headwater.plan import CacheLayout
from headwater.traces.request import Request, Trace


class Weights:
    """Weights on positions in a row, with sums from a position on in O(log size) steps (Fenwick 1994)."""

    def __init__(self, size: int) -> None:
        self.total = 0.0
        self._sums = [0.0] * (size + 1)

    def add(self, position: int, weight: float) -> None:
        self.total += weight
        at, sums = position + 1, self._sums
        while at < len(sums):
            sums[at] += weight
            at += at & -at

    def since(self, position: int) -> float:
        """Return the sum of the weights from `position` on."""
        before, sums = 0.0, self._sums
        while position:
            before += sums[position]
            position &= position - 1
        return self.total - before


@dataclass(frozen=True, slots=True)
class Curve:
    """Tokens that hit by number of pages: `tokens[i]` from `pages[i]` pages on. Both ascend."""

    pages: list[float]
    tokens: list[int]
    prompt_tokens: int

    @property
    def ideal(self) -> int:
        """Tokens that hit with endless memory."""
        return self.tokens[-1] if self.tokens else 0

    def hits(self, pages: float) -> int:
        found = bisect_right(self.pages, pages)
        return self.tokens[found - 1] if found else 0

    def pages_for(self, tokens: float) -> float:
        """Return the fewest pages with which `tokens` hit; the most useful number of pages if that is never reached."""
        found = bisect_left(self.tokens, tokens)
        return self.pages[min(found, len(self.pages) - 1)] if self.pages else 0


class Distances:
    """LRU stack distances of requests in the order of their arrival."""

    def __init__(self, trace: Trace, layout: CacheLayout, requests: int, checkpoints: float) -> None:
        """Expect `requests` requests, each of which takes `checkpoints` checkpoints on average."""
        self._trace, self._layout = trace, layout
        self._unit_pages = layout.kv_pages_per_unit * (layout.unit_tokens // layout.page_size)
        self._more_pages = max(0.0, checkpoints - 1) * layout.checkpoint_pages
        self._tree = Index(layout.unit_bytes, 0)
        self._used: dict[int, int] = {}  # serial of a node: number of the request that used it last
        self._resumed: dict[int, int] = {}  # likewise, of the checkpoint at its end
        self._weights = Weights(requests)
        self._hits: list[tuple[float, int]] = []  # pages, tokens
        self._number = self._prompt_tokens = 0

    def see(self, request: Request) -> None:
        unit = self._layout.unit_tokens
        key = self._trace.key(request, request.known_tokens)
        units = len(key) // self._layout.unit_bytes
        cap = min(max(0, request.prompt_tokens - 1) // unit, units)
        last = self._entered(request.namespace, key, units)
        path = Index.path(last)
        self._count_hits(path, cap)
        self._use(path, last, cap)
        self._keep(last, key, units)
        self._number += 1
        self._prompt_tokens += request.prompt_tokens

    def curve(self) -> Curve:
        hits = sorted(self._hits)
        return Curve([pages for pages, _ in hits], list(accumulate(n for _, n in hits)), self._prompt_tokens)

    def _entered(self, namespace: str, key: bytes, units: int) -> Node:
        """Return the node at whose end the key leaves the tree of earlier requests."""
        node, end = self._tree.walk(self._tree.root(namespace), key, units)
        if end == node.end:
            return node
        upper = self._tree.boundary(node, end)
        self._used[upper.serial] = self._used[node.serial]
        return upper

    def _count_hits(self, path: list[Node], cap: int) -> None:
        """Record for each part of the path the pages with which it hits: those used since its last use, and a slot."""
        start, needed = 0, dict[int, float]()
        for node in path:
            used = self._used[node.serial]
            if used not in needed:
                needed[used] = self._weights.since(used) + self._layout.slot_pages
            end = min(node.end, cap)
            if end > start:
                self._hits.append((needed[used], (end - start) * self._layout.unit_tokens))
            start = node.end

    def _use(self, path: list[Node], last: Node, cap: int) -> None:
        """Mark the path, and the deepest checkpoint on it, as most recently used."""
        start, moved = 0, dict[int, float]()
        for node in path:
            used = self._used[node.serial]
            moved[used] = moved.get(used, 0.0) + (node.end - start) * self._unit_pages
            self._used[node.serial] = self._number
            start = node.end
        resumed = next((n for n in reversed(path) if n.end <= cap and n.serial in self._resumed), None)
        if resumed is not None:
            used = self._resumed[resumed.serial]
            moved[used] = moved.get(used, 0.0) + self._layout.checkpoint_pages
            self._resumed[resumed.serial] = self._number
        for used, pages in moved.items():
            self._weights.add(used, -pages)
        self._weights.add(self._number, sum(moved.values()))

    def _keep(self, last: Node, key: bytes, units: int) -> None:
        """Add the rest of the request's path, a checkpoint at its end, and its other checkpoints."""
        pages = self._more_pages
        if units > last.end:
            pages += (units - last.end) * self._unit_pages
            last = self._tree.add(last, key, units, array("i"))
            self._used[last.serial] = self._number
        if units and last.serial not in self._resumed:
            pages += self._layout.checkpoint_pages
            self._resumed[last.serial] = self._number
        self._weights.add(self._number, pages)


def distances(trace: Trace, layout: CacheLayout, requests: Sequence[Request], checkpoints: float) -> Curve:
    """Return the curve of these requests, each of which takes `checkpoints` checkpoints on average."""
    model = Distances(trace, layout, len(requests), checkpoints)
    for request in requests:
        model.see(request)
    return model.curve()
