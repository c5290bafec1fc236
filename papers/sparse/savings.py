"""Savings of placements within one entry, by number of checkpoints (figure 2 and its siblings)."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from headwater.account import Reason
from headwater.cache.placement import make_placement
from headwater.cache.positions import PlacementQuery
from headwater.cache.positions.program import Recomputation, solve
from headwater.plan import Match
from headwater.request import Boundaries
from papers.figure import Figure, Found, Line, Shape
from papers.lab import Lab
from papers.sparse.overlaps import NARRATIVE, PAGE, PROMPTS, QUALITY, Dataset, Overlap, overlaps


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
    with ProcessPoolExecutor(jobs or len(os.sched_getaffinity(0))) as pool:
        return dict(zip(spellings, pool.map(partial(score, seen=seen), spellings), strict=True))


def deepest(checkpoints: Sequence[int], depth: int) -> int:
    """Return the deepest checkpoint at or before `depth`; 0 if there is none."""
    before = bisect_right(checkpoints, depth)
    return checkpoints[before - 1] if before else 0


def query(length: int, depth: int = 0) -> PlacementQuery:
    """Return a prompt of which nothing is cached, though it overlaps an entry to `depth`."""
    return PlacementQuery(length, Match(0, 0, depth, Reason.COLD), Boundaries(), PAGE)


BUDGETS = (1, 2, 4, 8, 16, 32, 64)
FEW = (1, 4, 16)  # budgets at which other decays are tried
FIXED = {"balanced": "balanced({k},end=False)", "logarithmic": "logarithmic({k},end=False)"}
OPTIMAL = "optimal({k},beta={beta},end=False)"
BETA, OTHERS = 0.99, (0.9, 0.999)
UNBUDGETED = {
    "KV only": "none",
    "every block": "every_block(1)",
    "sqrt": "sqrt(end=False)",
}
CLOSE = 0.01  # of normalised savings

Scores = dict[str, Score]


def run(lab: Lab, dataset: Dataset) -> Found:
    spellings = [*UNBUDGETED.values(), *(rule.format(k=k) for rule in FIXED.values() for k in BUDGETS)]
    spellings += [optimal(k) for k in BUDGETS] + [optimal(k, beta) for beta in OTHERS for k in FEW]
    found = scores(spellings, dataset.seen(lab), lab.jobs)
    lines = [line for label, rule in UNBUDGETED.items() for line in _lines(label, found[rule], count=True)]
    for k in BUDGETS:
        for label, rule in FIXED.items():
            lines += _lines(f"{label}, k = {k}", found[rule.format(k=k)])
        lines += _lines(f"optimal, k = {k}", found[optimal(k)], count=True)
        for beta in OTHERS if k in FEW else ():
            lines += _lines(f"optimal, k = {k}, beta {beta}", found[optimal(k, beta)])
    return Found((*lines, _enough(found)), _shapes(found))


def optimal(k: int, beta: float = BETA) -> str:
    return OPTIMAL.format(k=k, beta=beta)


def saved(found: Scores, spelling: str) -> float:
    return found[spelling].recomputation.savings


def gains(found: Scores) -> list[float]:
    """Return by budget the normalised savings beyond the better of the fixed placements."""
    return [saved(found, optimal(k)) - max(saved(found, rule.format(k=k)) for rule in FIXED.values()) for k in BUDGETS]


def close(found: Scores) -> list[str]:
    """Return the optimal placements whose savings are close to those of a checkpoint at every block."""
    block = saved(found, UNBUDGETED["every block"])
    return [optimal(k) for k in BUDGETS if saved(found, optimal(k)) >= block - CLOSE]


def _enough(found: Scores) -> Line:
    enough = [found[spelling].checkpoints for spelling in close(found)]
    label = f"optimal: checkpoints within {100 * CLOSE:.0f} point of every block's savings"
    return Line(label, None, min(enough, default=None), "an entry")


def _lines(label: str, score: Score, count: bool = False) -> list[Line]:
    lines = [
        Line(f"{label}: savings", None, 100 * score.recomputation.savings, "%"),
        Line(f"{label}: reduction", None, score.recomputation.reduction, "x"),
    ]
    return lines + [Line(f"{label}: checkpoints", None, score.checkpoints, "an entry")] * count


def _shapes(found: Scores) -> tuple[Shape, ...]:
    block, wins = found[UNBUDGETED["every block"]], gains(found)
    return (
        Shape("optimal saves at least what each fixed placement saves, at each k", min(wins) >= 0),
        Shape("its gain over the better of them is largest at k of 1 or 2", max(wins) in wins[:2]),
        *(
            Shape(f"{label} comes up with it: a tenth of the distance is left at the largest k", _meets(found, rule))
            for label, rule in FIXED.items()
        ),
        Shape(
            "optimal comes within a point of every block with less than half of its checkpoints",
            any(found[spelling].checkpoints < block.checkpoints / 2 for spelling in close(found)),
        ),
    )


def _meets(found: Scores, rule: str) -> bool:
    """Return whether a fixed placement's distance to the optimal one shrinks to a tenth over the budgets."""
    first, last = (abs(saved(found, optimal(k)) - saved(found, rule.format(k=k))) for k in (BUDGETS[0], BUDGETS[-1]))
    return last <= first / 10


def _savings(name: str, where: str, dataset: Dataset, difference: str) -> Figure:
    return Figure(
        name=name,
        title=f"Savings over the number of checkpoints, {dataset.name}",
        paper=f"Sparse prefix caching, {where}",
        claim=(
            "optimal placement dominates every placement of as many checkpoints, most where they are few, and matches "
            "a checkpoint at every block with fewer."
        ),
        difference=difference,
        run=lambda lab: run(lab, dataset),
    )


COMMON = (
    "The paper's own numbers are in plots only. Our data are several passes over fewer requests, so a decay that "
    "remembers as much as a pass has seen the same documents before. Optimal uses fewer checkpoints than it may where "
    "many are allowed: it knows only depths that were seen, and what ends between them is not covered. Logarithmic is "
    "with base 2, as the paper gives none: half of a prompt lies beyond its last checkpoint, however many there are."
)
FIG_2 = _savings(
    "sparse-2",
    "figure 2",
    NARRATIVE,
    f"Novels read on chapter by chapter stand for NarrativeQA: an overlap ends where the entry does. {COMMON}",
)
FIG_2_QUALITY = _savings(
    "sparse-2-quality", "figure 2's kind, on QuALITY", QUALITY, f"SQuALITY's stories are QuALITY's kind. {COMMON}"
)
FIG_2_PROMPTS = _savings(
    "sparse-2-prompts",
    "figure 2's kind, on System Prompts",
    PROMPTS,
    "Successive versions of prompts replace System Prompts, and differ in length by two orders of magnitude. Longer "
    "prompts are overlapped deeper, which a single overlap distribution does not represent; balanced follows the "
    f"length ([sparse-lengths](#sparse-lengths)). {COMMON}",
)


FEW_BUDGETS = (1, 4, 16)
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)  # tokens
ALIKE = 0.02  # of normalised savings
SPELLINGS = [rule for k in FEW_BUDGETS for rule in (optimal(k), FIXED["balanced"].format(k=k))]


def by_length(lab: Lab) -> Found:
    everything = PROMPTS.seen(lab)
    found = {"all lengths": scores(SPELLINGS, everything, lab.jobs)}
    order = PROMPTS.order(lab)
    for low, high in pairwise(LENGTHS):
        seen = overlaps([one for one in order if low <= one.prompt_tokens < high], PROMPTS.entries)
        found[f"{low:,} to {high - 1:,} tokens"] = scores(SPELLINGS, seen, lab.jobs)
    known = {k: hindsight(everything, k) for k in FEW_BUDGETS}
    lines = [
        Line(f"all lengths: all overlaps known before, k = {k}", None, 100 * share, "%") for k, share in known.items()
    ]
    for name, of in found.items():
        for k in FEW_BUDGETS:
            lines += [Line(f"{name}: optimal, k = {k}", None, 100 * saved(of, optimal(k)), "%")]
            lines += [Line(f"{name}: balanced, k = {k}", None, 100 * saved(of, FIXED["balanced"].format(k=k)), "%")]
    pooled = found.pop("all lengths")
    return Found(
        tuple(lines),
        (
            Shape(
                "over all lengths even a law that is known before saves less than balanced, at k = 1",
                known[1] < saved(pooled, FIXED["balanced"].format(k=1)),
            ),
            Shape(
                "among prompts of like length optimal is within 2 points of balanced or above, at k of 4 and 16",
                all(lead(of, k) >= -ALIKE for of in found.values() for k in FEW_BUDGETS[1:]),
            ),
        ),
    )


def lead(found: Scores, k: int) -> float:
    return saved(found, optimal(k)) - saved(found, FIXED["balanced"].format(k=k))


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


BY_LENGTH = Figure(
    name="sparse-lengths",
    title="Savings on System Prompts, by length of the prompt",
    paper="Sparse prefix caching, figure 2's kind: a check of ours",
    claim="one distribution of overlap depths for all requests is what placement needs.",
    difference=(
        "It is not sufficient if prompts differ in length as much as ours: a longer prompt is overlapped deeper, and "
        "a single distribution places checkpoints at the ends of short prompts. Among prompts of similar length, "
        "optimal saves as much as balanced or more; the longest prompts are versions of very few, with depths that "
        "were never observed before. The paper has no such figure: it was added because sparse-2-prompts did not "
        "come out."
    ),
    run=by_length,
)
