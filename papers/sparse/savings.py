"""What is saved with so many checkpoints: all placements, within one entry (figure 2 and its siblings)."""

from __future__ import annotations

from papers.figure import Figure, Found, Line, Shape
from papers.lab import Lab
from papers.sparse.datasets import NARRATIVE, PROMPTS, QUALITY, Dataset
from papers.sparse.within import Score, scores

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
    """By budget: normalised savings beyond the better of the fixed placements."""
    return [saved(found, optimal(k)) - max(saved(found, rule.format(k=k)) for rule in FIXED.values()) for k in BUDGETS]


def close(found: Scores) -> list[str]:
    """Those optimal placements that save nearly what a checkpoint at every block saves."""
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
    """Whether a fixed placement's distance to the optimal one shrinks to a tenth over the budgets."""
    first, last = (abs(saved(found, optimal(k)) - saved(found, rule.format(k=k))) for k in (BUDGETS[0], BUDGETS[-1]))
    return last <= first / 10


def _figure(name: str, where: str, dataset: Dataset, difference: str) -> Figure:
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
NOVELS = _figure(
    "sparse-2",
    "figure 2",
    NARRATIVE,
    f"Novels read on chapter by chapter stand for NarrativeQA: an overlap ends where the entry does. {COMMON}",
)
DOCUMENTS = _figure(
    "sparse-2-quality", "figure 2's kind, on QuALITY", QUALITY, f"SQuALITY's stories are QuALITY's kind. {COMMON}"
)
VERSIONS = _figure(
    "sparse-2-prompts",
    "figure 2's kind, on System Prompts",
    PROMPTS,
    "Successive versions of prompts stand for System Prompts, and differ in length by two orders of magnitude. Who "
    "overlaps a long one overlaps it deeper, which a single law of depths does not know; balanced does, as it goes by "
    f"the length ([sparse-lengths](#sparse-lengths)). {COMMON}",
)
