"""What a transition takes, by family of recurrence."""

from __future__ import annotations

from math import prod

from headwater.layers.gla import GatedLinearAttention
from headwater.layers.layer import Layer
from headwater.models.profiles import load_profile
from papers.figure import Figure, Found, Line, Shape
from papers.lab import Lab

SCALAR = 4  # bytes: float32, whatever the table's type
HALF, SINGLE = 2, 4  # bytes of an element: float16 as the table has it, float32 as it is stored
CHANNELS = 128  # of keys and values a head
PROFILES = {  # name -> profile, the layer's kind in it, the table's bytes
    "Lightning Attention": ("ring-flash-linear-2.0", "lightning", 4),
    "Mamba-2": ("nemotron-h-8b", "mamba2", 4),
    "Mamba-1, a channel": ("jamba-1.5-mini", "mamba", None),
    "Gated DeltaNet": ("qwen3.5-9b", "gated_delta_net", 32768),
    "Kimi Delta Attention": ("kimi-linear-48b-a3b", "delta_attention", 32768),
}


def run(lab: Lab) -> Found:
    rows: list[tuple[str, Layer, int | None]] = [
        ("gated linear attention", GatedLinearAttention(4 * CHANNELS, 4, CHANNELS, CHANNELS), 256),
        *((name, _layer(profile, kind), paper) for name, (profile, kind, paper) in PROFILES.items()),
    ]
    lines = []
    for name, layer, paper in rows:
        lines.append(Line(f"{name}, float16", paper, _bytes(layer, HALF), "B"))
        lines.append(Line(f"{name}, as it is stored", None, _bytes(layer, SINGLE), "B"))
    agree = all(line.ours == line.paper for line in lines if line.paper is not None)
    return Found(tuple(lines), (Shape("every family's transition takes what the table says", agree),))


def _layer(profile: str, kind: str) -> Layer:
    return next(layer for layer, _ in load_profile(profile).layers if layer.kind == kind)


def _bytes(layer: Layer, element: int) -> int:
    """Of one head, or one channel of Mamba-1's."""
    assert layer.transition is not None
    elements = prod(layer.transition[1:])
    return SCALAR if elements == 1 else element * elements


FIGURE = Figure(
    name="hypic-table3",
    title="Bytes of a segment's transition, a head and layer",
    paper="HYPIC, table 3",
    claim="4 bytes where a head decays by one factor, 256 where each key channel has its own, 32 KB with a delta rule.",
    difference=(
        "The table is of float16; transitions are stored in float32, with twice the bytes where they are no scalars. "
        "RetNet and DeltaNet have no layer of their own here: their transitions have the forms of Lightning "
        "Attention's and Gated DeltaNet's. Mamba-1, which the table leaves out, decays each state of a channel at its "
        "own rate by one step size: the sum of the steps is all that is stored, 4 bytes a channel."
    ),
    run=run,
)
