"""Marconi's figures that follow from the model alone: table 1, figures 3b, 5 and 14."""

from __future__ import annotations

from headwater.layers.layer import Layer
from headwater.models.profiles import Profile, load_profile
from headwater.models.profiles.marconi import marconi
from papers.figure import Figure, Found, Line, Shape
from papers.lab import Lab

LENGTH = 8192  # L: tokens, where a formula is compared by its value
D, N = 4096, 128
BYTES = 2  # of an element in float16


def table1(lab: Lab) -> Found:
    layers = {layer.kind: layer for layer, _ in load_profile("marconi-7b").layers}
    attention, mlp, ssm = (layers[kind] for kind in ("attention", "mlp", "ssm"))
    return Found(
        lines=(
            Line(f"attention, FLOPs of {LENGTH:,} tokens", 8 * LENGTH * D**2 + 4 * LENGTH**2 * D, _flops(attention)),
            Line(f"MLP, FLOPs of {LENGTH:,} tokens", 16 * LENGTH * D**2, _flops(mlp)),
            Line(
                f"SSM, FLOPs of {LENGTH:,} tokens",
                12 * LENGTH * D**2 + 16 * LENGTH * D * N + 10 * LENGTH,
                _flops(ssm),
            ),
            Line("attention, bytes a token", 4 * D, BYTES * attention.kv_elements(1), "B"),
            Line("SSM, bytes of recurrent state", 2 * D * N, _state(ssm, "recurrent"), "B"),
            Line("SSM, convolution's share of the whole state", 6.1, 100 * _convolution(ssm), "%"),
            Line("attention, FLOPs saved a byte", LENGTH + 2 * D, _flops(attention) / (_kv(attention) * LENGTH)),
            Line("SSM, FLOPs saved a byte and token", 200, _flops(ssm) / _state(ssm, "recurrent") / LENGTH),
        ),
        shapes=(
            Shape(
                "an SSM layer saves more FLOPs a byte than an attention layer, the more so the longer the prefix",
                _advantage(ssm, attention, LENGTH) > _advantage(ssm, attention, LENGTH // 8) > 1,
            ),
        ),
    )


def _flops(layer: Layer, tokens: int = LENGTH) -> float:
    return layer.flops.between(0, tokens)


def _state(layer: Layer, name: str) -> int:
    return BYTES * layer.state_elements[name]


def _convolution(layer: Layer) -> float:
    conv = _state(layer, "conv")
    return conv / (conv + _state(layer, "recurrent"))


def _kv(layer: Layer) -> int:
    return BYTES * layer.kv_elements(1)


def _advantage(ssm: Layer, attention: Layer, tokens: int) -> float:
    return _flops(ssm, tokens) / _state(ssm, "recurrent") / (_flops(attention, tokens) / (_kv(attention) * tokens))


TABLE_1 = Figure(
    name="marconi-table1",
    title="FLOPs and bytes of each kind of layer",
    paper="Marconi, table 1 and appendix A",
    claim="the FLOP efficiency of SSM layers grows with the length, that of attention layers hardly.",
    difference=(
        "The profile follows the published simulator, which has 10LD for the SSM's last term where the table prints "
        "10L; the table's 200L a byte is its formula rounded."
    ),
    run=table1,
)


SEQUENCE = 10_000
BLOCK = 16
TRANSFORMER_LAYERS = 32  # of a usual 7B one


def fig3b(lab: Lab) -> Found:
    hybrid, deep = load_profile("marconi-7b"), load_profile("marconi-7b-attention")
    transformer = marconi("transformer", TRANSFORMER_LAYERS, 0)
    ratios = [_memory_ratio(hybrid, transformer, block) for block in (BLOCK, 32, 64, 128)]
    return Found(
        lines=(
            Line("10,000 tokens, a checkpoint every 16", 17.4, cached(hybrid, SEQUENCE, BLOCK) / 1e9, "GB"),
            Line("over the KV of a Transformer of 32 layers", 3.3, ratios[0], "x"),
            Line("over the KV of one of 36 layers, as in figure 12a", None, _memory_ratio(hybrid, deep, BLOCK), "x"),
            Line("an SSM layer's state over an attention layer's KV of a block", 4, _layer_ratio(hybrid), "x"),
            *(
                Line(f"every {n}, over 32 layers", None, ratio, "x")
                for n, ratio in zip((32, 64, 128), ratios[1:], strict=True)
            ),
        ),
        shapes=(Shape("the larger the block, the less memory", ratios == sorted(ratios, reverse=True)),),
    )


def cached(profile: Profile, tokens: int, block: int) -> int:
    """Return the bytes of a sequence with its KV and a checkpoint at every block."""
    return profile.kv_bytes_per_token * tokens + tokens // block * profile.checkpoint_bytes


def _memory_ratio(hybrid: Profile, transformer: Profile, block: int) -> float:
    return cached(hybrid, SEQUENCE, block) / cached(transformer, SEQUENCE, block)


def _layer_ratio(profile: Profile) -> float:
    """Return an SSM layer's state over an attention layer's KV, without the convolution (the paper's footnote)."""
    layers = {layer.kind: layer for layer, _ in profile.layers}
    return layers["ssm"].state_elements["recurrent"] / (layers["attention"].kv_elements(1) * BLOCK)


FIG_3B = Figure(
    name="marconi-3b",
    title="Memory of one sequence with a checkpoint at every block",
    paper="Marconi, figure 3b and section 3",
    claim="one sequence of 10K tokens takes 17.4 GB at block 16, 3.3 times a Transformer of the same size.",
    difference="None. The Transformer that gives the paper's ratio has 32 attention layers; figure 12a's has 36.",
    run=fig3b,
)


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
        tuple(lines),
        (Shape("the more SSM layers, the steeper FLOP efficiency grows with the length", growth == sorted(growth)),),
    )


def efficiency(profile: Profile, tokens: int) -> float:
    """Return the FLOPs that a prefix saves per byte of its KV and one checkpoint at its end (equation 1)."""
    return profile.flops.between(0, tokens) / (profile.kv_bytes_per_token * tokens + profile.checkpoint_bytes)


FIG_5 = Figure(
    name="marconi-5",
    title="FLOPs saved a byte over the length of a prefix",
    paper="Marconi, figure 5",
    claim="the more SSM layers a model has, the steeper the growth.",
    difference=(
        "The paper prints no numbers. Steeper is read as the slope, FLOPs a byte per token; relative to where it "
        "begins the Transformer's curve grows more than the hybrid's. Its hybrid of 1:6 is the 7B model, with 24 "
        "SSM layers and 4 of attention."
    ),
    run=fig5,
)


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
        tuple(lines),
        (
            Shape(
                "attention has the fewest FLOPs of short sequences",
                shares["attention", short] < min(shares["ssm", short], shares["mlp", short]),
            ),
            Shape("and more than the SSM layers of long ones", shares["attention", long] > shares["ssm", long]),
        ),
    )


FIG_14 = Figure(
    name="marconi-14",
    title="FLOPs by kind of layer",
    paper="Marconi, figure 14",
    claim="attention costs the least at short lengths and a large share at long ones, with 7.1% of the layers.",
    difference="None: the same formulas. The paper prints no other numbers.",
    run=fig14,
)
