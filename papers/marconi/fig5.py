"""FLOPs saved a byte over the length of a prefix."""

from __future__ import annotations

from headwater.models.profiles import Profile, load_profile
from papers.figure import Figure, Found, Line, Shape
from papers.lab import Lab

MODELS = {"Transformer": "marconi-7b-attention", "hybrid 1:6": "marconi-7b", "Mamba": "marconi-7b-ssm"}
LENGTHS = (1_000, 4_000, 16_000, 64_000)


def run(lab: Lab) -> Found:
    profiles = {label: load_profile(name) for label, name in MODELS.items()}
    lines = [
        Line(f"{label}, {tokens:,} tokens", None, efficiency(profile, tokens) / 1e3, "kFLOP/B")
        for label, profile in profiles.items()
        for tokens in LENGTHS
    ]
    growth = [efficiency(one, LENGTHS[-1]) - efficiency(one, LENGTHS[0]) for one in profiles.values()]
    return Found(
        tuple(lines),
        (Shape("the more SSM layers, the steeper FLOP efficiency grows with the length", growth == sorted(growth)),),
    )


def efficiency(profile: Profile, tokens: int) -> float:
    """FLOPs saved a byte by a prefix of so many tokens: its KV and one checkpoint at its end (equation 1)."""
    return profile.flops.between(0, tokens) / (profile.kv_bytes_per_token * tokens + profile.checkpoint_bytes)


FIGURE = Figure(
    name="marconi-5",
    title="FLOPs saved a byte over the length of a prefix",
    paper="Marconi, figure 5",
    claim="the more SSM layers a model has, the steeper the growth.",
    difference=(
        "The paper prints no numbers. Steeper is read as the slope, FLOPs a byte per token; relative to where it "
        "begins the Transformer's curve grows more than the hybrid's. Its hybrid of 1:6 is the 7B model, with 24 "
        "SSM layers and 4 of attention."
    ),
    run=run,
)
