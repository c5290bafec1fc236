"""Optimal: the best positions for the overlap distribution of the requests so far."""

from __future__ import annotations

import math

import numpy as np

from headwater.cache.placement.balanced import balanced
from headwater.cache.placement.base import Placed, Placement, PlacementQuery
from headwater.cache.placement.optimal.overlaps import Overlaps
from headwater.cache.placement.optimal.program import Column, solve

LENGTH_DEVIATION = 0.05  # standard deviation of the logarithm of prompts' lengths that count as alike


class Optimal(Placement):
    """At most k checkpoints per prompt with the least expected recomputation (sparse prefix caching, theorem 2).

    One overlap distribution per prompt, so one dynamic program over the whole prompt divides the k among the edges of
    the tree; positions in the matched part are not replaced by others. Along the edges that the prompt shares with the
    tree, the distribution is that of these edges, the prompt itself being the newest sample. Beyond, it is that of the
    requests that overlapped to more; a depth beyond the prompt's end counts at its end. The two parts are weighted by
    the requests that overlapped to less and to more. Weights decay by `beta`, and are updated every `every` requests.
    Before the first overlap, the positions are those of `balanced(k)`.

    Beyond the tree a request counts the more, the nearer its prompt's length is to this one's: longer prompts overlap
    to greater depths. One further request, the prior, is spread evenly over the prompt's pages; for lengths that were
    not seen before, it is all that counts. `pooled=True` is the paper's rule: one distribution for all lengths, and no
    prior.

    `end` adds a checkpoint at the end of the sequence, beyond the k: the prompt's last page, unless the answer is
    cached with its end. A growing chat is deeper each turn than all requests before, so its end is in no histogram.
    `end=False` is the paper's rule.
    """

    def __init__(
        self, k: int, beta: float = 0.99, every: int = 10, end: bool = True, edges: int = 32_768, pooled: bool = False
    ) -> None:
        if k < 1:
            raise ValueError(f"{k} checkpoints cannot be placed; at least 1 can")
        if not 0 < beta <= 1:
            raise ValueError(f"weights decay by {beta:g}; it needs to be more than 0, and 1 at most")
        if every < 1 or edges < 1:
            raise ValueError(f"every {every} requests and {edges} edges; at least 1 of each")
        self._k, self._end, self._pooled = k, end, pooled
        self._overlaps = Overlaps(beta, every, edges, math.inf if pooled else LENGTH_DEVIATION)

    def place(self, query: PlacementQuery) -> Placed:
        if self._overlaps.distribution.empty and not query.match.branch_tokens:
            positions = balanced(max(0, query.length - 1), self._k)
        else:
            positions = list(solve(*self._distribution(query), self._k, query.page_size).positions)
        return Placed(query.fresh((*positions, *query.end(self._end))))

    def knows(self, query: PlacementQuery) -> bool:
        """Return whether this prompt overlaps, or one of about its length did."""
        return query.match.branch_tokens > 0 or self._overlaps.distribution.knows(query.length)

    def learn(self, query: PlacementQuery) -> None:
        """Count the depth at which the prompt leaves the tree, on every edge that it passes."""
        self._overlaps.learn(query.path(), query.match.branch_tokens, query.length)

    def _distribution(self, query: PlacementQuery) -> tuple[Column, Column]:
        """Return the depths at which the next request may leave this prompt, and their weights."""
        branch, overlaps = query.match.branch_tokens, self._overlaps
        near = overlaps.along(query.path(), query.match.kv_tokens)
        depths, weights = self._whole(query)
        beyond = depths > branch
        weight = float(weights[~beyond].sum())
        if branch:
            near[branch] = near.get(branch, 0.0) + overlaps.unit
            weight += 1.0
        share = weight / sum(near.values()) if near else 0.0
        depths = np.concatenate((np.array([*near], dtype=np.int64), depths[beyond]))
        weights = np.concatenate((share * np.array([*near.values()]), weights[beyond]))
        return self._within(query, depths, weights)

    def _whole(self, query: PlacementQuery) -> tuple[Column, Column]:
        """Return the depths of requests with such prompts and the prior's, and their weights: 1 for the newest."""
        depths, weights = self._overlaps.distribution.of(query.length)
        pages = query.last_page // query.page_size
        if self._pooled or not pages:
            return depths, weights
        prior = query.page_size * np.arange(1, pages + 1)
        return np.concatenate((depths, prior)), np.concatenate((weights, np.full(pages, 1 / pages)))

    def _within(self, query: PlacementQuery, depths: Column, weights: Column) -> tuple[Column, Column]:
        """Return the distribution without depths that a checkpoint at an end serves anyway."""
        last = query.last_page
        if query.answered or self._end:
            served = depths > last if query.answered else depths >= last
            return depths[~served], weights[~served]
        return np.minimum(depths, last), weights
