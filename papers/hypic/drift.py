"""How far states drift above the first layer, and where attention goes wrong (benchmarks/segment_states.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from papers.figure import Figure, Found, Line, Shape

TOKENS, PARTS = 512, 2
TRAINED = "headwater-tiny"
QWEN, RING = (8.92, 5.11), (8.69, 4.98)  # percent and degrees of the paper's two models
ENVELOPE = 0.10  # "within a 10% state-drift envelope" (section 6.3)


@dataclass(frozen=True, slots=True)
class Drift:
    """Of a composed state from that of one pass over all tokens."""

    relative: float  # ‖composed − full‖ / ‖full‖
    degrees: float  # angle between the two


@dataclass(frozen=True, slots=True)
class Places:
    """Mean deviation of the attention that a segment's keys get, by where in it they stand."""

    head: float
    interior: float
    tail: float


def deepest(skipped: Mapping[str, Drift], within: Mapping[str, Drift]) -> Found:
    """Table 4, by model: with attention layers that add nothing, and with them in."""
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
    """Figure 3, by attention layer of the trained model."""
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


DEEPEST = Figure(
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
BOUNDARIES = Figure(
    name="hypic-3",
    title="Where attention deviates in a segment that was computed alone",
    paper="HYPIC, figure 3",
    claim="deviation concentrates at segments' boundaries; interior positions are largely unaffected.",
    difference="The embedded model, a mean over the heads of each attention layer and over a sample of held-out "
    "prompts (`headwater fidelity`), 8 tokens a head and tail; the paper shows one head of one prompt.",
    run=None,
)
