"""FLOPs, state and FLOPs saved a byte, layer by layer."""

from __future__ import annotations

from headwater.layers.layer import Layer
from headwater.models.profiles import load_profile
from papers.figure import Figure, Found, Line, Shape
from papers.lab import Lab

TOKENS = 8192  # L, where a formula is compared by its value
D, N = 4096, 128
BYTES = 2  # of an element in float16


def run(lab: Lab) -> Found:
    layers = {layer.kind: layer for layer, _ in load_profile("marconi-7b").layers}
    attention, mlp, ssm = (layers[kind] for kind in ("attention", "mlp", "ssm"))
    return Found(
        lines=(
            Line(f"attention, FLOPs of {TOKENS:,} tokens", 8 * TOKENS * D**2 + 4 * TOKENS**2 * D, _flops(attention)),
            Line(f"MLP, FLOPs of {TOKENS:,} tokens", 16 * TOKENS * D**2, _flops(mlp)),
            Line(
                f"SSM, FLOPs of {TOKENS:,} tokens",
                12 * TOKENS * D**2 + 16 * TOKENS * D * N + 10 * TOKENS,
                _flops(ssm),
            ),
            Line("attention, bytes a token", 4 * D, BYTES * attention.kv_elements(1), "B"),
            Line("SSM, bytes of recurrent state", 2 * D * N, _state(ssm, "recurrent"), "B"),
            Line("SSM, convolution's share of the whole state", 6.1, 100 * _convolution(ssm), "%"),
            Line("attention, FLOPs saved a byte", TOKENS + 2 * D, _flops(attention) / (_kv(attention) * TOKENS)),
            Line("SSM, FLOPs saved a byte and token", 200, _flops(ssm) / _state(ssm, "recurrent") / TOKENS),
        ),
        shapes=(
            Shape(
                "an SSM layer saves more FLOPs a byte than an attention layer, the more so the longer the prefix",
                _advantage(ssm, attention, TOKENS) > _advantage(ssm, attention, TOKENS // 8) > 1,
            ),
        ),
    )


def _flops(layer: Layer, tokens: int = TOKENS) -> float:
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


FIGURE = Figure(
    name="marconi-table1",
    title="FLOPs and bytes of each kind of layer",
    paper="Marconi, table 1 and appendix A",
    claim="the FLOP efficiency of SSM layers grows with the length, that of attention layers hardly.",
    difference=(
        "The profile follows the published simulator, which has 10LD for the SSM's last term where the table prints "
        "10L; the table's 200L a byte is its formula rounded."
    ),
    run=run,
)
