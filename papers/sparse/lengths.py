"""Why one law for prompts of all lengths does not serve System Prompts: the same by length of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from headwater.cache.positions.program import solve
from papers.figure import Figure, Found, Line, Shape
from papers.lab import Lab
from papers.sparse.datasets import PROMPTS
from papers.sparse.overlap import PAGE, Overlap, overlaps
from papers.sparse.savings import FIXED, Scores, optimal, saved
from papers.sparse.within import deepest, scores

BUDGETS = (1, 4, 16)
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)  # tokens
ALIKE = 0.02  # of normalised savings
SPELLINGS = [rule for k in BUDGETS for rule in (optimal(k), FIXED["balanced"].format(k=k))]


def run(lab: Lab) -> Found:
    everything = PROMPTS.seen(lab)
    found = {"all lengths": scores(SPELLINGS, everything, lab.jobs)}
    order = PROMPTS.order(lab)
    for low, high in pairwise(LENGTHS):
        seen = overlaps([one for one in order if low <= one.prompt_tokens < high], PROMPTS.entries)
        found[f"{low:,} to {high - 1:,} tokens"] = scores(SPELLINGS, seen, lab.jobs)
    known = {k: hindsight(everything, k) for k in BUDGETS}
    lines = [
        Line(f"all lengths: all overlaps known before, k = {k}", None, 100 * share, "%") for k, share in known.items()
    ]
    for name, of in found.items():
        for k in BUDGETS:
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
                all(lead(of, k) >= -ALIKE for of in found.values() for k in BUDGETS[1:]),
            ),
        ),
    )


def lead(found: Scores, k: int) -> float:
    return saved(found, optimal(k)) - saved(found, FIXED["balanced"].format(k=k))


def hindsight(seen: Sequence[Overlap], k: int) -> float:
    """Normalised savings of the best k under one law of all depths, those of requests to come among them."""
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


FIGURE = Figure(
    name="sparse-lengths",
    title="Savings on System Prompts, by length of the prompt",
    paper="Sparse prefix caching, figure 2's kind: a check of ours",
    claim="one distribution of overlap depths for all requests is what placement needs.",
    difference=(
        "It is not where prompts differ in length as ours do: a longer prompt is overlapped deeper, and one law of all "
        "puts its checkpoints where short prompts end. Among prompts of like length optimal saves what balanced saves, "
        "or more; the longest are versions of very few prompts, and of depths that were never seen it knows nothing. "
        "The paper has no such figure: this one was added because sparse-2-prompts did not come out."
    ),
    run=run,
)
