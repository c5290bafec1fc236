"""Overlap depths of requests with cached prefixes: an exponentially weighted histogram per edge, and those of all."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from headwater.cache.placement.base import Edge, Path
from headwater.cache.placement.optimal.program import Column

MIN_WEIGHT = 1e-4  # of the newest request's weight: smaller ones are dropped from large histograms
MAX_DEPTHS = 256  # of an edge before small weights are dropped
ROUNDING_SHARE = 1e-9  # of a sum of weights
MAX_WEIGHT = 1e100  # of a request; beyond it all are scaled down
MAX_REQUESTS = 8192  # latest ones, which make the distribution of all
MAX_DEVIATIONS = 4.0  # standard deviations between two prompts' lengths that count as alike

Histogram = dict[int, float]  # depth in tokens -> weight of the requests that overlapped so far


class Distribution:
    """Depths to which the latest requests overlapped, for a prompt of a given length.

    A request weighs e^(-z²/2), with z = ln(ratio of both prompts' lengths) / alike; alike = inf: one for all lengths
    (sparse prefix caching, theorem 4). It weighs beta times as much for each later request of the same length.
    """

    def __init__(self, beta: float, alike: float) -> None:
        self._beta, self._alike = beta, alike
        self._depths = np.zeros(0, np.int64)
        self._lengths = np.zeros(0)  # logarithms of the prompts' lengths

    def add(self, requests: Sequence[tuple[int, int]]) -> None:
        """Count requests: the depth and the prompt's length of each, in tokens."""
        new = np.array(requests, dtype=np.int64).reshape(-1, 2)
        self._depths = np.concatenate((self._depths, new[:, 0]))[-MAX_REQUESTS:]
        self._lengths = np.concatenate((self._lengths, np.log(new[:, 1])))[-MAX_REQUESTS:]

    def of(self, length: int) -> tuple[Column, Column]:
        """Return depths of requests with prompts of about `length` tokens, and their weights: at most 1 each."""
        distance = self._distance(length)
        alike = np.flatnonzero(np.abs(distance) < MAX_DEVIATIONS)
        weights = np.exp(-0.5 * distance[alike] ** 2)
        later = weights[::-1].cumsum()[::-1] - weights
        return self._depths[alike], weights * self._beta**later

    def knows(self, length: int) -> bool:
        """Return whether a request with a prompt of about `length` tokens was counted."""
        return bool((np.abs(self._distance(length)) < MAX_DEVIATIONS).any())

    def _distance(self, length: int) -> Column:
        return (self._lengths - math.log(max(1, length))) / self._alike

    @property
    def empty(self) -> bool:
        return not len(self._depths)


class Overlaps:
    """Overlap histograms of edges, and the distribution of all requests (sparse prefix caching, theorem 4).

    Each request weighs 1 / beta times as much as the one before. An edge's histogram has the requests that entered it,
    each at the depth where it left, and at the edge's end those that continued beyond it. Depths count from the root,
    so a split leaves the lower part's histogram as it is; the upper part begins with a copy. An edge that is merged
    into its child loses its histogram. The `edges` last used are kept.
    """

    def __init__(self, beta: float, every: int, edges: int, alike: float = math.inf) -> None:
        self.unit = 1.0  # weight of the next request in the edges' histograms, at least
        self.distribution = Distribution(beta, alike)
        self._beta, self._every, self._most = beta, every, edges
        self._seen = 0
        self._waiting: list[tuple[Path, int, int]] = []
        self._edges: OrderedDict[int, Histogram] = OrderedDict()

    def learn(self, path: Path, depth: int, length: int) -> None:
        """Add a request with a prompt of `length` tokens that overlaps to `depth`. `every` are counted together."""
        self._seen += 1
        if depth:
            self._waiting.append((path, depth, length))
        if self._seen % self._every == 0 and self._waiting:
            self._count()

    def _count(self) -> None:
        for path, depth, _ in self._waiting:
            self.unit /= self._beta
            start = 0
            for edge in path:
                if depth <= start:
                    break
                self._enter(edge, min(depth, edge.end))
                start = edge.end
        self.distribution.add([(depth, length) for _, depth, length in self._waiting])
        self._waiting.clear()
        while len(self._edges) > self._most:
            self._edges.popitem(last=False)
        if self.unit > MAX_WEIGHT:
            self._scale_down()

    def _enter(self, edge: Edge, depth: int) -> None:
        histogram = self._edges.get(edge.id)
        if histogram is None:
            histogram = self._edges[edge.id] = dict(self._of(edge))
        elif len(histogram) > MAX_DEPTHS:
            histogram = self._edges[edge.id] = _clear(histogram, MIN_WEIGHT * self.unit)
        histogram[depth] = histogram.get(depth, 0.0) + self.unit
        self._edges.move_to_end(edge.id)

    def _scale_down(self) -> None:
        scaled = {name: _clear(old, 1.0) for name, old in self._edges.items()}
        for histogram in scaled.values():
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
            if elsewhere > ROUNDING_SHARE * through:
                left[start] = left.get(start, 0.0) + elsewhere
            start, through = stop, on
        if through:
            left[end] = left.get(end, 0.0) + through
        return left


def _clear(histogram: Histogram, least: float) -> Histogram:
    """Return the histogram without weights below `least`."""
    return {depth: weight for depth, weight in histogram.items() if weight >= least}
