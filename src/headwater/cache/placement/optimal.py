"""The best places under the law of overlap depths that the requests so far had."""

from __future__ import annotations

import numpy as np

from headwater.cache.placement.balanced import balanced
from headwater.cache.positions import EndOfAnswer, Placed, PlacementQuery
from headwater.cache.positions.hull import Column
from headwater.cache.positions.overlaps import Overlaps
from headwater.cache.positions.program import solve


class Optimal(EndOfAnswer):
    """At most k checkpoints a prompt with the least expected recomputation (sparse prefix caching, theorem 2).

    Along one prompt the places where others leave it have one law, so one dynamic program over the whole prompt divides
    the k among the edges of the tree, as it should be; those that fall into the matched part are not made up for.
    As far as the prompt is in the tree the law is that of the edges it goes along, itself the newest sample. Beyond, it
    is that of all requests (the paper's setting), given that they overlapped to more; a depth beyond the prompt's end
    counts there. The two parts weigh as much as requests of all overlapped to less and to more. All are weighted by
    `beta`, and counted when `every` new ones have come. As long as nothing overlapped, it is `balanced(k)`.

    `end` adds the end of the sequence, beyond the k: the prompt's last page, unless the answer's end is kept anyway.
    A growing chat is deeper each turn than anything seen, so its end is in no histogram. `end=False` is the paper's.
    """

    def __init__(self, k: int, beta: float = 0.99, every: int = 10, end: bool = True, edges: int = 32_768) -> None:
        if k < 1:
            raise ValueError(f"{k} checkpoints cannot be placed; 1 is the least")
        if not 0 < beta <= 1:
            raise ValueError(f"weights decay by {beta:g}; it needs to be more than 0, and 1 at most")
        if every < 1 or edges < 1:
            raise ValueError(f"every {every} requests and {edges} edges; at least 1 of each")
        self._k, self._end = k, end
        self._overlaps = Overlaps(beta, every, edges)

    def place(self, query: PlacementQuery) -> Placed:
        if self._overlaps.empty and not query.match.branch_tokens:
            positions = balanced(max(0, query.length - 1), self._k)
        else:
            positions = list(solve(*self._law(query), self._k, query.page_size).positions)
        return Placed(query.fresh((*positions, *query.end(self._end))))

    def learn(self, query: PlacementQuery) -> None:
        """Count where the prompt leaves the tree, on every edge that it goes along."""
        self._overlaps.learn(query.path(), query.match.branch_tokens)

    def _law(self, query: PlacementQuery) -> tuple[Column, Column]:
        """Depths at which the next request may leave this prompt, and weights."""
        branch, overlaps = query.match.branch_tokens, self._overlaps
        near = overlaps.along(query.path(), query.match.kv_tokens)
        weight = overlaps.up_to(branch)
        if branch:
            near[branch] = near.get(branch, 0.0) + overlaps.unit
            weight += overlaps.unit
        share = weight / sum(near.values()) if near else 0.0
        far, weights = overlaps.beyond(branch)
        depths = np.array([*near, *far], dtype=np.int64)
        weights = np.concatenate((share * np.array([*near.values()]), weights))
        return self._within(query, depths, weights)

    def _within(self, query: PlacementQuery, depths: Column, weights: Column) -> tuple[Column, Column]:
        """The law of what no end that is kept anyway will serve."""
        last = query.last_page
        if query.answered or self._end:
            served = depths > last if query.answered else depths >= last
            return depths[~served], weights[~served]
        return np.minimum(depths, last), weights
