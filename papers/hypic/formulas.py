"""HYPIC's figures that follow only from the models: bytes of segments and of transitions."""

from __future__ import annotations

from math import prod

from headwater.models.profiles import load_profile
from papers.figure import Found, Line, Shape
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


def memory(lab: Lab) -> Found:
    lines, shares = [], {}
    for name in DENSE + OTHERS:
        profile = load_profile(name)
        kv, states = profile.kv_bytes_per_token * TOKENS, profile.checkpoint_bytes
        single = profile.transition.bytes
        half = single // 2  # in bfloat16
        shares[name] = single / (kv + states + single)
        lines += [
            Line(f"{name}: keys and values of {TOKENS:,} tokens", None, kv / MEBI, "MiB"),
            Line(f"{name}: zero-start states", None, states / MEBI, "MiB"),
            Line(f"{name}: transitions, float32", None, single / MEBI, "MiB"),
            Line(f"{name}: transitions' share", None, 100 * shares[name], "%"),
            Line(f"{name}: transitions' share in bfloat16", None, 100 * (half / (kv + states + half)), "%"),
        ]
    return Found(
        lines,
        Shape("dense transitions are a third of the segment or more", min(shares[x] for x in DENSE) >= 1 / 3),
        Shape("all others are less than a tenth of it", max(shares[x] for x in OTHERS) < 0.1),
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
    rows: list[tuple[str, tuple[int, ...], int | None]] = [
        ("gated linear attention", (CHANNELS,), 256),  # a factor for each key channel; no profile has the layer
        *((name, _transition(profile, kind), paper) for name, (profile, kind, paper) in PROFILES.items()),
    ]
    lines = []
    for name, transition, paper in rows:
        lines.append(Line(f"{name}, float16", paper, _bytes(transition, HALF), "B"))
        lines.append(Line(f"{name}, as it is stored", None, _bytes(transition, SINGLE), "B"))
    agree = all(line.ours == line.paper for line in lines if line.paper is not None)
    return Found(lines, Shape("every family's transition has the bytes of the table", agree))


def _transition(profile: str, kind: str) -> tuple[int, ...]:
    """Return the shape of one head's transition, or of one channel's for Mamba-1."""
    layer = next(layer for layer, _ in load_profile(profile).layers if layer.kind == kind)
    assert layer.transition is not None
    return layer.transition[1:]


def _bytes(transition: tuple[int, ...], element: int) -> int:
    elements = prod(transition)
    return SCALAR if elements == 1 else element * elements
