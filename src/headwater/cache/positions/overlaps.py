"""Overlap depths of requests with cached prefixes: exponentially weighted histograms, one of all and one per edge."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict

import numpy as np

from headwater.cache.positions import Edge, Path
from headwater.cache.positions.program import Column

FAINT = 1e-4  # of the newest request's weight: smaller weights are dropped from large histograms
MANY = 256  # depths that an edge may have before its faint ones are dropped
ROUNDING = 1e-9  # of a sum of weights
HEAVY = 1e100  # weight of a request at which all are scaled down

Histogram = dict[int, float]  # depth in tokens -> weight of the requests that overlapped so far


class Overlaps:
    """Each request weighs 1 / beta times as much as the one before (sparse prefix caching, theorem 4).

    An edge's histogram holds the requests that entered it, each at the depth where it left, and at the edge's end those
    that went on. Depths count from the root, so a split leaves the lower part's histogram as it is; the upper part
    begins with a copy. An edge that is absorbed by its child loses its histogram. The `edges` last used are kept.
    """

    def __init__(self, beta: float, every: int, edges: int) -> None:
        self.unit = 1.0  # weight of the next request, at least
        self._beta, self._every, self._most = beta, every, edges
        self._seen = 0
        self._waiting: list[tuple[Path, int]] = []
        self._all: Histogram = {}
        self._edges: OrderedDict[int, Histogram] = OrderedDict()
        self._depths: list[int] = []  # of all, ascending
        self._weights = np.zeros(0)

    def learn(self, path: Path, depth: int) -> None:
        """Add a request that overlaps to `depth`. Requests are counted together, every `every` requests."""
        self._seen += 1
        if depth:
            self._waiting.append((path, depth))
        if self._seen % self._every == 0 and self._waiting:
            self._count()

    def _count(self) -> None:
        for path, depth in self._waiting:
            self.unit /= self._beta
            self._all[depth] = self._all.get(depth, 0.0) + self.unit
            start = 0
            for edge in path:
                if depth <= start:
                    break
                self._enter(edge, min(depth, edge.end))
                start = edge.end
        self._waiting.clear()
        while len(self._edges) > self._most:
            self._edges.popitem(last=False)
        self._all = _clear(self._all, FAINT * self.unit)
        if self.unit > HEAVY:
            self._scale_down()
        self._depths = sorted(self._all)
        self._weights = np.array([self._all[depth] for depth in self._depths])

    def _enter(self, edge: Edge, depth: int) -> None:
        histogram = self._edges.get(edge.id)
        if histogram is None:
            histogram = self._edges[edge.id] = dict(self._of(edge))
        elif len(histogram) > MANY:
            histogram = self._edges[edge.id] = _clear(histogram, FAINT * self.unit)
        histogram[depth] = histogram.get(depth, 0.0) + self.unit
        self._edges.move_to_end(edge.id)

    def _scale_down(self) -> None:
        scaled = {name: _clear(old, 1.0) for name, old in self._edges.items()}
        for histogram in (self._all, *scaled.values()):
            for depth in histogram:
                histogram[depth] /= self.unit
        self._edges = OrderedDict((name, new) for name, new in scaled.items() if new)
        self.unit = 1.0

    def _of(self, edge: Edge) -> Histogram:
        """Return the histogram of an edge; for the new upper part of a split edge, that of the lower part."""
        for name in (edge.id, *edge.origins):
            if name in self._edges:
                return self._edges[name]
        return {}

    # ---- reading

    def along(self, path: Path, end: int) -> Histogram:
        """Return the depths at which requests left this path, up to `end`, which lies on the last edge.

        A request that passes an edge and does not enter the next one leaves at the node between them.
        """
        left: Histogram = {}
        start, through = 0, 0.0
        for edge in path:
            stop = min(edge.end, end)
            histogram = self._of(edge)
            inside = on = 0.0
            for depth, weight in histogram.items():
                if depth >= stop:
                    on += weight
                elif depth > start:
                    left[depth] = weight
                    inside += weight
            elsewhere = through - on - inside
            if elsewhere > ROUNDING * through:
                left[start] = left.get(start, 0.0) + elsewhere
            start, through = stop, on
        if through:
            left[end] = left.get(end, 0.0) + through
        return left

    def up_to(self, depth: int) -> float:
        """Return the weight of all requests that overlapped to `depth` or less."""
        return float(self._weights[: bisect_right(self._depths, depth)].sum())

    def beyond(self, depth: int) -> tuple[list[int], Column]:
        """Return the depths beyond `depth` to which requests overlapped, ascending, and their weights."""
        first = bisect_right(self._depths, depth)
        return self._depths[first:], self._weights[first:]

    @property
    def empty(self) -> bool:
        return not self._all


def _clear(histogram: Histogram, least: float) -> Histogram:
    """Return the histogram without weights below `least`."""
    return {depth: weight for depth, weight in histogram.items() if weight >= least}
