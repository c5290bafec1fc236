"""Savings of placements within one entry, by number of checkpoints (figure 2 and its siblings)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from headwater.account import Reason
from headwater.cache.placement import make_placement
from headwater.cache.placement.base import PlacementQuery
from headwater.cache.placement.optimal.program import Recomputation, solve
from headwater.machine import usable_cores
from headwater.plan import Match
from headwater.request import Boundaries
from papers.figure import Found, Line, Shape
from papers.lab import Lab
from papers.sparse.overlaps import PAGE, PROMPTS, Dataset, Overlap, overlaps


@dataclass(frozen=True, slots=True)
class Score:
    """Recomputation under a placement. `checkpoints`: mean over the entries that were overlapped."""

    recomputation: Recomputation
    checkpoints: float


@dataclass(frozen=True, slots=True)
class Resumed:
    """Resume positions of requests (0: the beginning), and numbers of checkpoints of the overlapped entries."""

    at: tuple[int, ...]
    checkpoints: float


def resumptions(spelling: str, seen: Sequence[Overlap]) -> Resumed:
    """Place checkpoints in each entry when it is made; a request that overlaps it resumes at the deepest one before.

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
    """Return the score of a placement over the requests that overlap any entry."""
    resumed = resumptions(spelling, seen)
    hits = max(1, sum(overlap.depth > 0 for overlap in seen))
    depths = sum(overlap.depth for overlap in seen)
    return Score(Recomputation((depths - sum(resumed.at)) / hits, depths / hits), resumed.checkpoints)


def scores(spellings: Sequence[str], seen: Sequence[Overlap], jobs: int = 0) -> dict[str, Score]:
    """Return the score of each placement. jobs: processes; 0: one a core."""
    with ProcessPoolExecutor(jobs or usable_cores()) as pool:
        return dict(zip(spellings, pool.map(partial(score, seen=seen), spellings), strict=True))


def deepest(checkpoints: Sequence[int], depth: int) -> int:
    """Return the deepest checkpoint at or before `depth`; 0 if there is none."""
    before = bisect_right(checkpoints, depth)
    return checkpoints[before - 1] if before else 0


def query(length: int, depth: int = 0) -> PlacementQuery:
    """Return a prompt of which nothing is cached, though it overlaps an entry to `depth`."""
    return PlacementQuery(length, Match(0, 0, depth, Reason.COLD), Boundaries(), PAGE)


BUDGETS = (1, 2, 4, 8, 16, 32, 64)
FEW = (1, 4, 16)  # budgets of figures with fewer of them
FIXED = {"balanced": "balanced({k},end=False)", "logarithmic": "logarithmic({k},end=False)"}
BETA, OTHERS = 0.99, (0.9, 0.999)
POOLED = f"optimal({{k}},beta={BETA},end=False,pooled=True)"  # the paper's rule: one distribution for all lengths
RULES = FIXED | {"optimal": f"optimal({{k}},beta={BETA},end=False)"}
UNBUDGETED = {"KV only": "none", "every block": "every_block(1)", "sqrt": "sqrt(end=False)"}
CLOSE = 0.01  # of normalised savings

Scores = dict[str, Score]


def by_number(lab: Lab, dataset: Dataset) -> Found:
    """Return the savings of each placement by number of checkpoints (figure 2)."""
    spellings = [*UNBUDGETED.values(), *(rule.format(k=k) for rule in RULES.values() for k in BUDGETS)]
    spellings += [POOLED.format(k=k) for k in BUDGETS] + [optimal(k, beta) for beta in OTHERS for k in FEW]
    found = scores(spellings, dataset.seen(lab), lab.jobs)
    lines = [line for label, rule in UNBUDGETED.items() for line in _lines(label, found[rule], count=True)]
    for k in BUDGETS:
        for label, rule in RULES.items():
            lines += _lines(f"{label}, k = {k}", found[rule.format(k=k)], count=label == "optimal")
        lines += _lines(f"optimal, one distribution, k = {k}", found[POOLED.format(k=k)])
        for beta in OTHERS if k in FEW else ():
            lines += _lines(f"optimal, k = {k}, beta {beta}", found[optimal(k, beta)])
    near = [found[spelling].checkpoints for spelling in close(found)]
    label = f"optimal: checkpoints within {100 * CLOSE:.0f} point of every block's savings"
    wins, block = gains(found), found[UNBUDGETED["every block"]]
    return Found(
        [*lines, Line(label, None, min(near, default=None), "an entry")],
        Shape("optimal saves at least what each fixed placement saves, at each k", min(wins) >= 0),
        Shape("its gain over the better fixed placement is largest at k = 1 or 2", max(wins) in wins[:2]),
        *(
            Shape(
                f"{label} approaches it: at most a tenth of the difference remains at the largest k",
                _meets(found, label),
            )
            for label in FIXED
        ),
        Shape(
            "optimal comes within a point of every block with less than half of its checkpoints",
            any(checkpoints < block.checkpoints / 2 for checkpoints in near),
        ),
    )


def optimal(k: int, beta: float = BETA) -> str:
    return f"optimal({k},beta={beta},end=False)"


def saved(found: Scores, spelling: str) -> float:
    return found[spelling].recomputation.savings


def lead(found: Scores, label: str, k: int) -> float:
    """Return the normalised savings of the optimal placement beyond those of a fixed one."""
    return saved(found, optimal(k)) - saved(found, FIXED[label].format(k=k))


def gains(found: Scores) -> list[float]:
    """Return by budget the normalised savings beyond the better of the fixed placements."""
    return [min(lead(found, label, k) for label in FIXED) for k in BUDGETS]


def close(found: Scores) -> list[str]:
    """Return the optimal placements whose savings are close to those of a checkpoint at every block."""
    block = saved(found, UNBUDGETED["every block"])
    return [optimal(k) for k in BUDGETS if saved(found, optimal(k)) >= block - CLOSE]


def _lines(label: str, score: Score, count: bool = False) -> list[Line]:
    lines = [
        Line(f"{label}: savings", None, 100 * score.recomputation.savings, "%"),
        Line(f"{label}: reduction", None, score.recomputation.reduction, "x"),
    ]
    return lines + [Line(f"{label}: checkpoints", None, score.checkpoints, "an entry")] * count


def _meets(found: Scores, label: str) -> bool:
    """Return whether a fixed placement's distance to the optimal one shrinks to a tenth over the budgets."""
    return abs(lead(found, label, BUDGETS[-1])) <= abs(lead(found, label, BUDGETS[0])) / 10


LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)  # tokens
ALIKE = 0.02  # of normalised savings


def by_length(lab: Lab) -> Found:
    """Return the savings among prompts of similar length, and over all lengths."""
    rules = {"one distribution": POOLED, "balanced": RULES["balanced"]}
    spellings = {(label, k): rule.format(k=k) for k in FEW for label, rule in rules.items()}
    everything = PROMPTS.seen(lab)
    found = {"all lengths": scores(list(spellings.values()), everything, lab.jobs)}
    order = PROMPTS.order(lab)
    for low, high in pairwise(LENGTHS):
        seen = overlaps([one for one in order if low <= one.prompt_tokens < high], PROMPTS.entries)
        found[f"{low:,} to {high - 1:,} tokens"] = scores(list(spellings.values()), seen, lab.jobs)
    known = {k: hindsight(everything, k) for k in FEW}
    lines = [
        Line(f"all lengths: all overlaps known in advance, k = {k}", None, 100 * share, "%")
        for k, share in known.items()
    ]
    lines += [
        Line(f"{name}: {label}, k = {k}", None, 100 * saved(of, spelling), "%")
        for name, of in found.items()
        for (label, k), spelling in spellings.items()
    ]
    pooled = found.pop("all lengths")
    return Found(
        lines,
        Shape(
            "over all lengths, placement for a distribution known in advance saves less than balanced, at k = 1",
            known[1] < saved(pooled, spellings["balanced", 1]),
        ),
        Shape(
            "among prompts of similar length, it saves at most 2 points less than balanced, at k = 4 and 16",
            all(
                saved(of, spellings["one distribution", k]) - saved(of, spellings["balanced", k]) >= -ALIKE
                for of in found.values()
                for k in FEW[1:]
            ),
        ),
    )


def hindsight(seen: Sequence[Overlap], k: int) -> float:
    """Return the normalised savings of the best k under the distribution of all depths, future ones included."""
    hits = [(seen[one.entry].length, one.depth) for one in seen if one.depth]
    depths = np.array([depth for _, depth in hits])
    placed: dict[int, tuple[int, ...]] = {}
    cost = 0
    for length, depth in hits:
        last = (length - 1) // PAGE * PAGE
        if last not in placed:
            placed[last] = solve(np.minimum(depths, last), np.ones(len(depths)), k, PAGE).positions
        cost += depth - deepest(placed[last], depth)
    return 1 - cost / int(depths.sum()) if hits else 0.0
