"""What mixers compute (benchmarks/segment_states.py): composition at the first layer, and addition instead of it."""

from __future__ import annotations

from collections.abc import Mapping

from papers.figure import Figure, Found, Line, Shape
from papers.hypic.drift import Drift

TOKENS, SEGMENTS = 1096, 4
BOUND = 1e-5  # relative error that is float32's
DECAYS, LENGTHS = (5, 7, 10), (256, 512, 1024)  # γ = 1 − 2^(−n); tokens of the segment after
PAPER = {
    (5, 256): 1.000,
    (5, 512): 1.000,
    (5, 1024): 1.000,
    (7, 256): 0.866,
    (7, 512): 0.982,
    (7, 1024): 1.000,
    (10, 256): 0.221,
    (10, 512): 0.394,
    (10, 1024): 0.632,
}


def first_layer(found: Mapping[str, Drift], rounded: Mapping[str, Drift]) -> Found:
    """By kind of mixer; `rounded`: with transitions in bfloat16."""
    lines = []
    for name, drift in found.items():
        lines += [
            Line(f"{name}: relative error", 6e-5, drift.relative),
            Line(f"{name}: angle", 0.003, drift.degrees, "°"),
            Line(f"{name}: relative error with transitions in bfloat16", None, rounded[name].relative),
        ]
    worst = max(drift.relative for drift in found.values())
    return Found(tuple(lines), (Shape(f"every mixer's composed state is the full one's to {BOUND:g}", worst <= BOUND),))


def addition(found: Mapping[tuple[int, int], float]) -> Found:
    """Errors of naive addition by n of γ = 1 − 2^(−n) and tokens."""
    lines = tuple(
        Line(f"γ = 1 - 2^-{n}, {tokens:,} tokens", paper, found[n, tokens]) for (n, tokens), paper in PAPER.items()
    )
    return Found(lines, (Shape("every error is the table's", all(round(found[x], 3) == PAPER[x] for x in PAPER)),))


SETTING = "Computed by the served mixers in float32 (`python -m benchmarks.segment_states`). "
FIRST = Figure(
    name="hypic-layer0",
    title="Composed against full state at the first layer",
    paper="HYPIC, section 4.2",
    claim="1,096 tokens in 4 segments: 6e-5 relative error and 0.003 degrees.",
    difference=f"{SETTING}Random weights, the largest of each kind's shapes, against a recurrence in float64 token by "
    "token. The paper's is a Gated DeltaNet. In bfloat16 a transition is rounded once, after it was computed.",
    run=None,
)
ADDITION = Figure(
    name="hypic-table2",
    title="Error of naive addition, RetNet",
    paper="HYPIC, table 2",
    claim="adding a segment's state without its transition errs by 1 - γ^tokens of the state before it.",
    difference=f"{SETTING}RetNet's recurrence is Lightning Attention's with other decays.",
    run=None,
)
