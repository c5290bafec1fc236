"""What placements save within one entry, exactly as the paper counts it."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from headwater.account import Reason
from headwater.cache.placement import make_placement
from headwater.cache.positions import PlacementQuery
from headwater.cache.positions.recomputation import Recomputation
from headwater.plan import Match
from headwater.request import Boundaries
from papers.sparse.overlap import PAGE, Overlap


@dataclass(frozen=True, slots=True)
class Score:
    """`checkpoints`: of an entry, on average over those that were overlapped."""

    recomputation: Recomputation
    checkpoints: float


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where requests resume, 0: at the beginning; and how many checkpoints the entries had that they overlapped."""

    at: tuple[int, ...]
    checkpoints: float


def resumptions(spelling: str, seen: Sequence[Overlap]) -> Resumed:
    """Every entry gets a placement's checkpoints as it is made; who overlaps it resumes at the deepest before.

    The placement knows what came before, and no tree: an entry is placed as a whole, wherever it overlapped others.
    """
    placement = make_placement(spelling)
    wanted = {overlap.entry for overlap in seen}
    placed: dict[int, tuple[int, ...]] = {}
    found = []
    for number, overlap in enumerate(seen):
        found.append(deepest(placed[overlap.entry], overlap.depth) if overlap.depth else 0)
        if number in wanted:
            placed[number] = placement.place(query(overlap.length)).checkpoints
        placement.learn(query(overlap.length, overlap.depth))
    return Resumed(tuple(found), sum(map(len, placed.values())) / max(1, len(placed)))


def score(spelling: str, seen: Sequence[Overlap]) -> Score:
    """Of the requests that overlap something."""
    resumed = resumptions(spelling, seen)
    hits = max(1, sum(overlap.depth > 0 for overlap in seen))
    depths = sum(overlap.depth for overlap in seen)
    return Score(Recomputation((depths - sum(resumed.at)) / hits, depths / hits), resumed.checkpoints)


def scores(spellings: Sequence[str], seen: Sequence[Overlap], jobs: int = 0) -> dict[str, Score]:
    """A score a placement; jobs: processes, 0 is one a core."""
    with ProcessPoolExecutor(jobs or len(os.sched_getaffinity(0))) as pool:
        return dict(zip(spellings, pool.map(partial(score, seen=seen), spellings), strict=True))


def deepest(checkpoints: Sequence[int], depth: int) -> int:
    """The deepest checkpoint at or before `depth`; 0: from the beginning."""
    before = bisect_right(checkpoints, depth)
    return checkpoints[before - 1] if before else 0


def query(length: int, depth: int = 0) -> PlacementQuery:
    """A prompt of which nothing is cached, though it overlaps an entry to `depth`."""
    return PlacementQuery(length, Match(0, 0, depth, Reason.COLD), Boundaries(), PAGE)
