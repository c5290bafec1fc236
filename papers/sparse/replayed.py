"""Placements in the cache itself: a tree whose checkpoints cost memory, with eviction by last_n."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.lab.row import Row
from headwater.lab.setup import Setup
from headwater.models.profiles import load_profile
from papers.figure import Figure, Found, Line, Shape
from papers.lab import Lab
from papers.sparse.overlaps import DATASETS, PAGE, Dataset
from papers.sparse.savings import BETA, FIXED, OPTIMAL, UNBUDGETED

BUDGETS = (1, 4, 16, 64)
MEMORY = 8 * 10**12  # bytes: enough for a checkpoint at every block, so that only last_n evicts
RULES = FIXED | {"optimal": OPTIMAL.replace("{beta}", str(BETA))}
PLAIN = UNBUDGETED | {"structural": "structural"}
POINT, TENTH = 0.01, 0.1

Rows = dict[str, Row]  # by placement


def run(lab: Lab) -> Found:
    lines: list[Line] = []
    shapes: list[Shape] = []
    for dataset in DATASETS:
        found = _rows(lab, dataset)
        lines += _lines(dataset.name, found)
        shapes += _shapes(dataset.name, found)
    return Found(tuple(lines), tuple(shapes))


def _rows(lab: Lab, dataset: Dataset) -> Rows:
    spellings = [*PLAIN.values(), *(rule.format(k=k) for rule in RULES.values() for k in BUDGETS)]
    profile = load_profile("qwen3.5-0.8b")
    eviction = f"last_n({dataset.entries})"
    setups = [Setup(profile, MEMORY, spelling, eviction, page_size=PAGE, decode_reuse="none") for spelling in spellings]
    results = lab.run(dataset.trace(lab), setups, dataset.load)
    return {spelling: result.row for spelling, result in zip(spellings, results, strict=True)}


def _lines(name: str, found: Rows) -> list[Line]:
    """Return hit tokens and checkpoints taken; KV only is left out, as it hits nothing."""
    lines: list[Line] = []
    for label, spelling in PLAIN.items():
        if spelling != "none":
            lines += _pair(f"{name}: {label}", found[spelling])
    for k in BUDGETS:
        for label, rule in RULES.items():
            lines += _pair(f"{name}: {label}, k = {k}", found[rule.format(k=k)])
    return lines


def _pair(label: str, row: Row) -> Sequence[Line]:
    return (
        Line(f"{label}: hit tokens", None, 100 * row.token_hit_rate, "%"),
        Line(f"{label}: checkpoints taken", None, row.checkpoints_taken / row.requests, "a request"),
    )


def _shapes(name: str, found: Rows) -> Sequence[Shape]:
    block = found[UNBUDGETED["every block"]]
    best = [found[RULES["optimal"].format(k=k)] for k in BUDGETS]
    fixed = [max(found[rule.format(k=k)].hit_tokens for rule in FIXED.values()) for k in BUDGETS]
    close = [row for row in best if row.hit_tokens >= (1 - POINT) * block.hit_tokens]
    return (
        Shape(
            f"{name}: optimal hits at least what each fixed placement hits, at each k",
            all(row.hit_tokens >= other for row, other in zip(best, fixed, strict=True)),
        ),
        Shape(
            f"{name}: it comes within 1% of every block's hits with less than a tenth of its checkpoints",
            any(row.checkpoints_taken < TENTH * block.checkpoints_taken for row in close),
        ),
    )


FIGURE = Figure(
    name="sparse-replay",
    title="Placements in the cache's tree",
    paper="Sparse prefix caching, section 5's setting end to end",
    claim="the same placements dominate where checkpoints are kept in a tree and only the last n entries are retained.",
    difference=(
        "The paper places each entry as a whole. Here the matched part of a prompt keeps its checkpoints, and the "
        "overlap distribution comes from the prompt's own edges, beyond them from all requests. One pass over the "
        "data, answers not cached; `structural`, the default, has no budget. If optimal saves less, the reasons are "
        "the same as within an entry: depths that were never observed, and prompts of different lengths."
    ),
    run=run,
)
