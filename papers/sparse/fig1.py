"""How deep requests overlap what is retained."""

from __future__ import annotations

from itertools import pairwise

from papers.figure import Figure, Found, Line, Shape
from papers.lab import Lab
from papers.quantile import BOX, quantile
from papers.sparse.datasets import DATASETS, NARRATIVE, PROMPTS, QUALITY

BINS = (64, 256, 1024, 4096, 16_384, 65_536, 131_072)  # tokens


def run(lab: Lab) -> Found:
    depths: dict[str, list[int]] = {}
    shares: dict[str, list[float]] = {}
    lines = []
    for dataset in DATASETS:
        seen = dataset.seen(lab)
        hits = [overlap for overlap in seen if overlap.depth]
        depths[dataset.name] = [overlap.depth for overlap in hits]
        shares[dataset.name] = [overlap.depth / seen[overlap.entry].length for overlap in hits]
        lines.append(Line(f"{dataset.name}: requests that overlap", None, 100 * len(hits) / len(seen), "%"))
        lines += _lines(dataset.name, depths[dataset.name])
        lines.append(Line(f"{dataset.name}: median share of the entry", None, quantile(shares[dataset.name], 0.5)))
    spread = [quantile(depths[NARRATIVE.name], q) for q in BOX]
    prompts = depths[PROMPTS.name]
    return Found(
        tuple(lines),
        (
            Shape(
                "most of QuALITY's overlaps end within 5% of the entry's end",
                quantile(shares[QUALITY.name], 0.5) > 0.95,
            ),
            Shape(
                "NarrativeQA's spread widely: the upper quartile is more than twice the lower",
                spread[3] > 2 * spread[1],
            ),
            Shape(
                "most of System Prompts' are within a tenth of the deepest", quantile(prompts, 0.5) < max(prompts) / 10
            ),
        ),
    )


def _lines(name: str, depths: list[int]) -> list[Line]:
    lines = [Line(f"{name}: depth, P{100 * q:.0f}", None, quantile(depths, q), "tokens") for q in BOX]
    for low, high in pairwise(BINS):
        share = sum(low <= depth < high for depth in depths) / len(depths)
        if share:
            lines.append(Line(f"{name}: {low:,} to {high - 1:,} tokens", None, 100 * share, "%"))
    return lines


FIGURE = Figure(
    name="sparse-1",
    title="Distribution of overlap depths",
    paper="Sparse prefix caching, figure 1",
    claim=(
        "overlaps are far from uniform: QuALITY's end near the document's end, NarrativeQA's spread widely, "
        "System Prompts' are short."
    ),
    difference=(
        "An overlap counts from a block of 64 tokens on; without that, the chat format's header alone would be most "
        "of them. Of QuALITY's stand-in all overlaps end at a story's end, so the spike is as sharp as it can be. "
        "Novels grow chapter by chapter, so an overlap is the whole of the entry before."
    ),
    run=run,
)
