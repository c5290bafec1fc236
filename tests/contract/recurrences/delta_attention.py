"""Kimi Delta Attention. L tokens, D model width, C convolved channels, H heads, K width of keys and V of values."""

import torch

from headwater.layers.kda import DeltaAttention
from headwater.mixers.convolution import causal_convolution
from headwater.mixers.gdn import delta_rule
from tests.contract.recurrences.case import WIDTH, Fill, Recurrence, Tensors, constant, rows, uniform

FAR = 1e4  # of a gate's input: a sigmoid is 0 or 1 there, and e^−softplus is 0


def reference(layer: DeltaAttention, w: Tensors, x_LD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    no_tail_CW = x_LD.new_zeros(layer.width, layer.conv - 1)
    heads = (layer.heads, layer.head_dim)
    q_LHK, k_LHK, v_LHV = (
        torch.nn.functional.silu(
            causal_convolution(x_LD @ w[f"{name}_proj.weight"].T, w[f"{name}_conv1d.weight"].squeeze(1).T, no_tail_CW)
        ).unflatten(-1, heads)
        for name in "qkv"
    )
    q_LHK, k_LHK = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q_LHK, k_LHK))
    beta_LH = torch.sigmoid(x_LD @ w["b_proj.weight"].T)
    zero_HKV = x_LD.new_zeros(layer.heads, layer.head_dim, layer.head_dim)
    g_LHK = log_decays(layer, w, (_through(layer, w, "f", x_LD) + w["dt_bias"]).unflatten(-1, heads))
    core_LHV, state_HKV = delta_rule(q_LHK * layer.head_dim**-0.5, k_LHK, v_LHV, g_LHK, beta_LH, zero_HKV)
    normed_LHV = core_LHV / (core_LHV.square().mean(-1, keepdim=True) + layer.norm_eps).sqrt() * w["o_norm.weight"]
    gate_LX = torch.sigmoid(_through(layer, w, "g", x_LD))
    return (normed_LHV.flatten(1) * gate_LX) @ w["o_proj.weight"].T, state_HKV


def _through(layer: DeltaAttention, w: Tensors, name: str, x_LD: torch.Tensor) -> torch.Tensor:
    names = (f"{name}_a_proj", f"{name}_b_proj") if layer.low_rank else (f"{name}_proj",)
    for projection in names:
        x_LD = x_LD @ w[f"{projection}.weight"].T
    return x_LD


def log_decays(layer: DeltaAttention, w: Tensors, f_LHK: torch.Tensor) -> torch.Tensor:
    rate_H1 = w["A_log"].exp().unsqueeze(-1)
    if layer.lowest is None:
        return -rate_H1 * torch.nn.functional.softplus(f_LHK)
    return layer.lowest * torch.sigmoid(rate_H1 * f_LHK)


def moved(layer: DeltaAttention, w: Tensors, transition_HKK: torch.Tensor, state_HKV: torch.Tensor) -> torch.Tensor:
    return transition_HKK @ state_HKV


def every_other(value: float, other: float) -> Fill:
    """Fill gates of even channels with the first value, and those of odd channels with the other."""

    def fill(weight: torch.Tensor, generator: torch.Generator) -> None:
        weight[::2], weight[1::2] = value, other

    return fill


FORGETS_AT_ONCE = {"A_log": constant(5.0), "dt_bias": constant(FAR)}
FORGETS_NOTHING = {"A_log": constant(-200.0)}  # decay 1: plain DeltaNet
OVERWRITES = {"b_proj.weight": rows(0, 3, FAR)}
DELTA_ATTENTION = Recurrence(
    shapes={
        "odd heads": DeltaAttention(WIDTH, 3, 16, 4),
        "bounded decays": DeltaAttention(WIDTH, 4, 24, 3, low_rank=False, lowest=-5.0),
        "one head": DeltaAttention(WIDTH, 1, 40, 2, norm_eps=1e-6, lowest=-0.3),
    },
    reference=reference,
    moved=moved,
    fill={"A_log": uniform(-1.0, 1.0), "dt_bias": uniform(-12.0, 0.0)},
    transition=lambda layer: (layer.heads, layer.head_dim, layer.head_dim),
    extremes={
        "forgets at once": FORGETS_AT_ONCE,
        "forgets some channels at once": {"A_log": constant(5.0), "dt_bias": every_other(FAR, -20.0)},
        "forgets in bursts": {
            "A_log": constant(6.0),
            "dt_bias": uniform(-12.0, -4.0),
            "f_b_proj.weight": uniform(-3, 3),
        },
        "forgets nothing": FORGETS_NOTHING,
        "forgets next to nothing": {"A_log": constant(-16.0)},
        "writes nothing": {"b_proj.weight": rows(0, 3, -FAR)},
        "overwrites": OVERWRITES,
        "overwrites and forgets nothing": {**FORGETS_NOTHING, **OVERWRITES},
        "overwrites and forgets at once": {**FORGETS_AT_ONCE, **OVERWRITES},
    },
)
