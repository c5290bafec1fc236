"""HYPIC's figures on composed states, measured by benchmarks/segment_states.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from papers.figure import Figure, Found, Line, Shape

LAYER_TOKENS, SEGMENTS = 1096, 4
BOUND = 1e-5  # relative error of float32
DECAYS, LENGTHS = (5, 7, 10), (256, 512, 1024)  # γ = 1 − 2^(−n); tokens of the segment after
PAPER_ADDITION = {
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
    """Return the first layer's errors by kind of mixer; `rounded`: with transitions in bfloat16."""
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
    """Return the errors of naive addition by n of γ = 1 − 2^(−n) and tokens."""
    table = PAPER_ADDITION.items()
    lines = tuple(Line(f"γ = 1 - 2^-{n}, {tokens:,} tokens", paper, found[n, tokens]) for (n, tokens), paper in table)
    return Found(lines, (Shape("every error is the table's", all(round(found[x], 3) == paper for x, paper in table)),))


SETTING = "Computed by the served mixers in float32 (`python -m benchmarks.segment_states`). "
LAYER_0 = Figure(
    name="hypic-layer0",
    title="Composed against full state at the first layer",
    paper="HYPIC, section 4.2",
    claim="1,096 tokens in 4 segments: 6e-5 relative error and 0.003 degrees.",
    difference=f"{SETTING}Random weights, the largest of each kind's shapes, against a recurrence in float64 token by "
    "token. The paper's is a Gated DeltaNet. In bfloat16 a transition is rounded once, after it was computed.",
    run=None,
)
TABLE_2 = Figure(
    name="hypic-table2",
    title="Error of naive addition, RetNet",
    paper="HYPIC, table 2",
    claim="adding a segment's state without its transition errs by 1 - γ^tokens of the state before it.",
    difference=f"{SETTING}RetNet's recurrence is Lightning Attention's with other decays.",
    run=None,
)


TOKENS, PARTS = 512, 2
TRAINED = "headwater-tiny"
QWEN, RING = (8.92, 5.11), (8.69, 4.98)  # percent and degrees of the paper's two models
ENVELOPE = 0.10  # "within a 10% state-drift envelope" (section 6.3)


@dataclass(frozen=True, slots=True)
class Drift:
    """Drift of a composed state from the state of one pass over all tokens."""

    relative: float  # ‖composed − full‖ / ‖full‖
    degrees: float  # angle between the two


@dataclass(frozen=True, slots=True)
class Places:
    """Mean deviation of the attention on a segment's keys, by their place in the segment."""

    head: float
    interior: float
    tail: float


def deepest(skipped: Mapping[str, Drift], within: Mapping[str, Drift]) -> Found:
    """Return table 4 by model: with attention layers that add nothing, and with attention."""
    lines = []
    for found, where, in_paper in ((skipped, "attention skipped", True), (within, "attention in", False)):
        for name, drift in found.items():
            paper = (RING if "Ring" in name else QWEN) if in_paper else (None, None)
            lines += [
                Line(f"{name}, {where}: relative L2", paper[0], 100 * drift.relative, "%"),
                Line(f"{name}, {where}: angle", paper[1], drift.degrees, "°"),
            ]
    return Found(
        tuple(lines),
        (
            Shape(
                f"the trained model stays within {ENVELOPE:.0%} with attention skipped",
                skipped[TRAINED].relative <= ENVELOPE,
            ),
        ),
    )


def boundaries(found: Mapping[str, Places]) -> Found:
    """Return figure 3 by attention layer of the trained model."""
    lines = []
    for name, places in found.items():
        lines += [
            Line(f"{name}: head over interior", None, places.head / places.interior, "x"),
            Line(f"{name}: tail over interior", None, places.tail / places.interior, "x"),
        ]
    return Found(
        tuple(lines),
        (
            Shape("heads of segments are off more than interiors", all(p.head > p.interior for p in found.values())),
            Shape("so are their tails", all(p.tail > p.interior for p in found.values())),
        ),
    )


TABLE_4 = Figure(
    name="hypic-table4",
    title="Drift of the deepest recurrent layer's state",
    paper="HYPIC, table 4",
    claim="512 tokens in two chunks, attention skipped: 8.92% and 5.11 degrees on Qwen3.5-35B-A3B, 8.69% and 4.98 on "
    "Ring-flash.",
    difference="The embedded model has 8 layers and was trained to answer from composed states, which does not ask "
    "them to be near; the others are random weights of 8 and 4 layers. The random Ring's attention stands after its "
    "recurrent layers, so skipping it changes nothing there. Held-out documents cut in two, w = 0, as "
    "`headwater fidelity --cut 512 --way w0` has it, with `--skip-attention` and without.",
    run=None,
)
FIG_3 = Figure(
    name="hypic-3",
    title="Where attention deviates in a segment that was computed alone",
    paper="HYPIC, figure 3",
    claim="deviation concentrates at segments' boundaries; interior positions are largely unaffected.",
    difference="The embedded model, a mean over the heads of each attention layer and over a sample of held-out "
    "prompts (`headwater fidelity`), 8 tokens a head and tail; the paper shows one head of one prompt.",
    run=None,
)
