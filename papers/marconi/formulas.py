"""Marconi's figures that follow only from the model: table 1, figures 3b, 5 and 14."""

from __future__ import annotations

from headwater.layers.layer import Layer
from headwater.models.profiles import Profile, load_profile
from headwater.models.profiles.marconi import marconi
from papers.figure import Found, Line, Shape
from papers.lab import Lab

LENGTH = 8192  # L: tokens, where a formula is compared by its value
D, N = 4096, 128
BYTES = 2  # of an element in float16


def table1(lab: Lab) -> Found:
    layers = _layers(load_profile("marconi-7b"))
    attention, mlp, ssm = (layers[kind] for kind in ("attention", "mlp", "ssm"))
    kv = BYTES * attention.kv_elements(1)
    state, conv = (BYTES * ssm.state_elements[name] for name in ("recurrent", "conv"))
    of_ssm = 12 * LENGTH * D**2 + 16 * LENGTH * D * N + 10 * LENGTH
    short, long = (
        ssm.flops.between(0, n) / state / (attention.flops.between(0, n) / (kv * n)) for n in (LENGTH // 8, LENGTH)
    )
    return Found(
        (
            Line(f"attention, FLOPs of {LENGTH:,} tokens", 8 * LENGTH * D**2 + 4 * LENGTH**2 * D, _flops(attention)),
            Line(f"MLP, FLOPs of {LENGTH:,} tokens", 16 * LENGTH * D**2, _flops(mlp)),
            Line(f"SSM, FLOPs of {LENGTH:,} tokens", of_ssm, _flops(ssm)),
            Line("attention, bytes a token", 4 * D, kv, "B"),
            Line("SSM, bytes of recurrent state", 2 * D * N, state, "B"),
            Line("SSM, convolution's share of the whole state", 6.1, 100 * (conv / (conv + state)), "%"),
            Line("attention, FLOPs saved a byte", LENGTH + 2 * D, _flops(attention) / (kv * LENGTH)),
            Line("SSM, FLOPs saved a byte and token", 200, _flops(ssm) / state / LENGTH),
        ),
        Shape(
            "an SSM layer saves more FLOPs a byte than an attention layer, the more so the longer the prefix",
            long > short > 1,
        ),
    )


def _layers(profile: Profile) -> dict[str, Layer]:
    return {layer.kind: layer for layer, _ in profile.layers}


def _flops(layer: Layer) -> float:
    return layer.flops.between(0, LENGTH)


SEQUENCE = 10_000  # tokens
BLOCK = 16
TRANSFORMER_LAYERS = 32  # of a usual 7B one


def fig3b(lab: Lab) -> Found:
    hybrid, deep = load_profile("marconi-7b"), load_profile("marconi-7b-attention")
    usual = marconi("transformer", TRANSFORMER_LAYERS, 0)
    over = {block: cached(hybrid, block) / cached(usual, block) for block in (BLOCK, 32, 64, 128)}
    over_deep = cached(hybrid, BLOCK) / cached(deep, BLOCK)
    layers = _layers(hybrid)  # compared without the convolution, as in the paper's footnote
    of_layers = layers["ssm"].state_elements["recurrent"] / (layers["attention"].kv_elements(1) * BLOCK)
    return Found(
        (
            Line("10,000 tokens, a checkpoint every 16", 17.4, cached(hybrid, BLOCK) / 1e9, "GB"),
            Line("over the KV of a Transformer of 32 layers", 3.3, over[BLOCK], "x"),
            Line("over the KV of one of 36 layers, as in figure 12a", None, over_deep, "x"),
            Line("an SSM layer's state over an attention layer's KV of a block", 4, of_layers, "x"),
            *(Line(f"every {block}, over 32 layers", None, over[block], "x") for block in (32, 64, 128)),
        ),
        Shape("the larger the block, the less memory", list(over.values()) == sorted(over.values(), reverse=True)),
    )


def cached(profile: Profile, block: int) -> int:
    """Return the bytes of one sequence with its KV and a checkpoint at every block."""
    return profile.kv_bytes_per_token * SEQUENCE + SEQUENCE // block * profile.checkpoint_bytes


MODELS = {"Transformer": "marconi-7b-attention", "hybrid 1:6": "marconi-7b", "Mamba": "marconi-7b-ssm"}
PREFIXES = (1_000, 4_000, 16_000, 64_000)


def fig5(lab: Lab) -> Found:
    profiles = {label: load_profile(name) for label, name in MODELS.items()}
    lines = [
        Line(f"{label}, {tokens:,} tokens", None, efficiency(profile, tokens) / 1e3, "kFLOP/B")
        for label, profile in profiles.items()
        for tokens in PREFIXES
    ]
    growth = [efficiency(one, PREFIXES[-1]) - efficiency(one, PREFIXES[0]) for one in profiles.values()]
    return Found(
        lines, Shape("the more SSM layers, the steeper FLOP efficiency grows with the length", growth == sorted(growth))
    )


def efficiency(profile: Profile, tokens: int) -> float:
    """Return the FLOPs that a prefix saves per byte of its KV and one checkpoint at its end (equation 1)."""
    return profile.flops.between(0, tokens) / (profile.kv_bytes_per_token * tokens + profile.checkpoint_bytes)


LENGTHS = (1_000, 10_000, 30_000, 100_000)
KINDS = ("attention", "ssm", "mlp")


def fig14(lab: Lab) -> Found:
    profile = load_profile("marconi-7b")
    shares = {}
    for tokens in LENGTHS:
        flops = profile.flops_by_kind(0, tokens)
        shares.update({(kind, tokens): 100 * flops[kind] / sum(flops.values()) for kind in KINDS})
    layers = profile.layers_by_kind
    lines = [Line("attention's share of the layers", 7.1, 100 * layers["attention"] / sum(layers.values()), "%")]
    lines += [Line(f"{kind}, {n:,} tokens", None, shares[kind, n], "% of FLOPs") for n in LENGTHS for kind in KINDS]
    short, long = LENGTHS[0], LENGTHS[-1]
    return Found(
        lines,
        Shape(
            "attention has the fewest FLOPs of short sequences",
            shares["attention", short] < min(shares["ssm", short], shares["mlp", short]),
        ),
        Shape("and more than the SSM layers of long ones", shares["attention", long] > shares["ssm", long]),
    )
