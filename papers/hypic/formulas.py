"""HYPIC's figures that follow from the models alone: bytes of segments and of transitions."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from headwater.layers.gla import GatedLinearAttention
from headwater.layers.layer import Layer
from headwater.models.profiles import load_profile
from papers.figure import Figure, Found, Line, Shape
from papers.lab import Lab

TOKENS = 1024  # of a segment
MEBI = 2**20
DENSE = ("qwen3.5-9b", "kimi-linear-48b-a3b")
OTHERS = (
    "ring-flash-linear-2.0",
    "minimax-m1",
    "nemotron-h-8b",
    "granite-4.0-h-small",
    "jamba-1.5-mini",
    "falcon-mamba-7b",
)


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes of a segment's parts."""

    kv: int
    states: int
    transitions: int

    @property
    def share(self) -> float:
        """Share of the transitions in the segment's bytes."""
        return self.transitions / (self.kv + self.states + self.transitions)

    def halved(self) -> Stored:
        """Return the same with transitions in bfloat16."""
        return Stored(self.kv, self.states, self.transitions // 2)


def memory(lab: Lab) -> Found:
    lines, shares = [], {}
    for name in DENSE + OTHERS:
        profile = load_profile(name)
        stored = Stored(profile.kv_bytes_per_token * TOKENS, profile.checkpoint_bytes, profile.transition_bytes)
        shares[name] = stored.share
        lines += [
            Line(f"{name}: keys and values of {TOKENS:,} tokens", None, stored.kv / MEBI, "MiB"),
            Line(f"{name}: zero-start states", None, stored.states / MEBI, "MiB"),
            Line(f"{name}: transitions, float32", None, stored.transitions / MEBI, "MiB"),
            Line(f"{name}: transitions' share", None, 100 * stored.share, "%"),
            Line(f"{name}: transitions' share in bfloat16", None, 100 * stored.halved().share, "%"),
        ]
    return Found(
        tuple(lines),
        (
            Shape("dense transitions are a third of the segment or more", min(shares[x] for x in DENSE) >= 1 / 3),
            Shape("all others are less than a tenth of it", max(shares[x] for x in OTHERS) < 0.1),
        ),
    )


MEMORY = Figure(
    name="hypic-memory",
    title="Bytes of a stored segment, by model",
    paper="HYPIC, section 4.2",
    claim="a segment costs its KV, zero-start states and transitions, which are small where they are not dense.",
    difference="The paper gives no bytes of whole models; a segment's KV, states and transitions are counted as the "
    "engine lays them out, before they are rounded up to pages.",
    run=memory,
)


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


def table3(lab: Lab) -> Found:
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
    """Return the bytes of one head's transition, or of one channel's for Mamba-1."""
    assert layer.transition is not None
    elements = prod(layer.transition[1:])
    return SCALAR if elements == 1 else element * elements


TABLE_3 = Figure(
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
    run=table3,
)
