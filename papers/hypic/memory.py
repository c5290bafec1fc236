"""What a stored segment takes, by model."""

from __future__ import annotations

from dataclasses import dataclass

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
        """The transitions', of all of it."""
        return self.transitions / (self.kv + self.states + self.transitions)

    def halved(self) -> Stored:
        """With transitions in bfloat16."""
        return Stored(self.kv, self.states, self.transitions // 2)


def run(lab: Lab) -> Found:
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


FIGURE = Figure(
    name="hypic-memory",
    title="Bytes of a stored segment, by model",
    paper="HYPIC, section 4.2",
    claim="a segment costs its KV, zero-start states and transitions, which are small where they are not dense.",
    difference="The paper gives no bytes of whole models; a segment's KV, states and transitions are counted as the "
    "engine lays them out, before they are rounded up to pages.",
    run=run,
)
