"""Gated linear attention. L tokens, D model width, H heads, K key width, V value width."""

import torch

from benchmarks.gated_linear_attention import GatedLinearAttention
from headwater.mixers.recurrent import decayed_by_channel
from tests.contract.recurrences.case import WIDTH, Fill, Recurrence, Tensors, constant, uniform

FAR = 2e4  # of a gate's input: e^(−FAR / 16) is 0


def reference(layer: GatedLinearAttention, w: Tensors, x_LD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q_LHK, k_LHK, v_LHV, z_LHV = (
        (x_LD @ w[f"{name}_proj.weight"].T).unflatten(-1, (layer.heads, -1)) for name in ("q", "k", "v", "g")
    )
    gate_LX = x_LD @ w["gk_proj.0.weight"].T @ w["gk_proj.1.weight"].T + w["gk_proj.1.bias"]
    g_LHK = torch.nn.functional.logsigmoid(gate_LX).unflatten(-1, (layer.heads, -1)) / layer.normaliser
    zero_HKV = x_LD.new_zeros(layer.heads, layer.k_dim, layer.v_dim)
    core_LHV, state_HKV = decayed_by_channel(q_LHK * layer.k_dim**-0.5, k_LHK, v_LHV, g_LHK, zero_HKV)
    normed_LHV = core_LHV / (core_LHV.square().mean(-1, keepdim=True) + layer.norm_eps).sqrt() * w["g_norm.weight"]
    return (normed_LHV * torch.nn.functional.silu(z_LHV)).flatten(1) @ w["o_proj.weight"].T, state_HKV


def moved(
    layer: GatedLinearAttention, w: Tensors, transition_HK: torch.Tensor, state_HKV: torch.Tensor
) -> torch.Tensor:
    return transition_HK.unsqueeze(-1) * state_HKV


def every_other(value: float, other: float) -> Fill:
    """Fill gates of even channels with the first value, and those of odd channels with the other."""

    def fill(weight: torch.Tensor, generator: torch.Generator) -> None:
        weight[::2], weight[1::2] = value, other

    return fill


GATED_LINEAR_ATTENTION = Recurrence(
    shapes={
        "values twice as wide": GatedLinearAttention(WIDTH, 4, 16, 32),
        "odd heads": GatedLinearAttention(WIDTH, 3, 24, 16, gate_rank=5, normaliser=4.0),
        "one head": GatedLinearAttention(WIDTH, 1, 40, 8, gate_rank=3, normaliser=1.0, norm_eps=1e-6),
    },
    reference=reference,
    moved=moved,
    transition=lambda layer: (layer.heads, layer.k_dim),
    fill={"gk_proj.1.bias": uniform(-2.0, 8.0)},
    extremes={
        "forgets at once": {"gk_proj.1.bias": constant(-FAR)},
        "forgets some channels at once": {"gk_proj.1.bias": every_other(-FAR, 20.0)},
        "forgets in bursts": {"gk_proj.1.weight": uniform(-200.0, 200.0)},
        "forgets nothing": {"gk_proj.1.bias": constant(200.0)},
        "forgets next to nothing": {"gk_proj.1.bias": constant(13.0)},
    },
)
