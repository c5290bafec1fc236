"""Gated DeltaNet. L tokens, D model width, C convolved channels, G key heads, H value heads, K and V their widths."""

import torch

from headwater.layers.gdn import DeltaNet
from headwater.mixers.convolution import causal_convolution
from headwater.mixers.gdn import delta_rule
from tests.contract.recurrences.case import WIDTH, Recurrence, Tensors, constant, rows

FAR = 1e4  # of a gate's input: a sigmoid is 0 or 1 there, and e^−softplus is 0


def projections(layer: DeltaNet, w: Tensors) -> list[torch.Tensor]:
    """Weights of q, k, v, z, b and a, each with the rows of its heads in order."""
    keys, values = layer.k_heads * layer.k_dim, layer.v_heads * layer.v_dim
    if layer.apart:
        return [w[f"in_proj_{name}.weight"] for name in "qkvzba"]
    if not layer.by_key_head:
        names = ("in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight")
        return [*w["in_proj_qkv.weight"].split((keys, keys, values)), *(w[name] for name in names)]
    shared = layer.v_heads // layer.k_heads
    parts = []
    for name, widths in (
        ("in_proj_qkvz.weight", (layer.k_dim, layer.k_dim, shared * layer.v_dim, shared * layer.v_dim)),
        ("in_proj_ba.weight", (shared, shared)),
    ):
        heads = w[name].split(sum(widths))
        parts += [torch.cat(rows_of_heads) for rows_of_heads in zip(*(h.split(widths) for h in heads), strict=True)]
    return parts


def reference(layer: DeltaNet, w: Tensors, x_LD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q_w, k_w, v_w, z_w, b_w, a_w = projections(layer, w)
    no_tail_CW = x_LD.new_zeros(layer.channels, layer.conv - 1)
    taps_WC = w["conv1d.weight"].squeeze(1).T
    mixed_LC = causal_convolution(x_LD @ torch.cat((q_w, k_w, v_w)).T, taps_WC, no_tail_CW)
    q_LX, k_LX, v_LX = torch.nn.functional.silu(mixed_LC).split([len(q_w), len(k_w), len(v_w)], -1)
    q_LHK, k_LHK = (_unit(t.unflatten(-1, (layer.k_heads, -1)), layer) for t in (q_LX, k_LX))
    g_LH = -w["A_log"].exp() * torch.nn.functional.softplus(x_LD @ a_w.T + w["dt_bias"])
    beta_LH = layer.strength * torch.sigmoid(x_LD @ b_w.T)
    v_LHV = v_LX.unflatten(-1, (layer.v_heads, -1))
    zero_HKV = x_LD.new_zeros(layer.v_heads, layer.k_dim, layer.v_dim)
    core_LHV, state_HKV = delta_rule(q_LHK * layer.k_dim**-0.5, k_LHK, v_LHV, g_LH, beta_LH, zero_HKV)
    normed_LHV = core_LHV / (core_LHV.square().mean(-1, keepdim=True) + layer.norm_eps).sqrt() * w["norm.weight"]
    gate_LX = torch.nn.functional.silu(x_LD @ z_w.T)
    return (normed_LHV.flatten(1) * gate_LX) @ w["out_proj.weight"].T, state_HKV


def _unit(t_LGK: torch.Tensor, layer: DeltaNet) -> torch.Tensor:
    """Normalised, once for each value head: [L, H, K]."""
    normed_LGK = t_LGK / (t_LGK.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    return normed_LGK.repeat_interleave(layer.v_heads // layer.k_heads, 1)


def moved(layer: DeltaNet, w: Tensors, transition_HKK: torch.Tensor, state_HKV: torch.Tensor) -> torch.Tensor:
    return transition_HKK @ state_HKV


FORGETS_AT_ONCE = {"A_log": constant(5.0), "dt_bias": constant(FAR)}
FORGETS_NOTHING = {"A_log": constant(-200.0)}  # decay 1: plain DeltaNet
OVERWRITES = {"in_proj_b.weight": rows(0, 4, FAR)}
GATED_DELTA_NET = Recurrence(
    shapes={
        "few heads": DeltaNet(WIDTH, 2, 4, 16, 24, 4),
        "by key head": DeltaNet(WIDTH, 2, 4, 16, 24, 4, by_key_head=True),
        "odd heads": DeltaNet(WIDTH, 3, 3, 24, 16, 2),
        "odd groups": DeltaNet(WIDTH, 1, 5, 8, 40, 3, by_key_head=True, norm_eps=1e-5),
        "negative eigenvalues": DeltaNet(WIDTH, 2, 4, 16, 24, 4, apart=True, strength=2.0),
    },
    reference=reference,
    moved=moved,
    transition=lambda layer: (layer.v_heads, layer.k_dim, layer.k_dim),
    extremes={
        "forgets at once": FORGETS_AT_ONCE,
        "forgets nothing": FORGETS_NOTHING,
        "forgets next to nothing": {"A_log": constant(-16.0)},
        "writes nothing": {"in_proj_b.weight": rows(0, 4, -FAR)},
        "overwrites": OVERWRITES,
        "overwrites and forgets nothing": {**FORGETS_NOTHING, **OVERWRITES},
        "overwrites and forgets at once": {**FORGETS_AT_ONCE, **OVERWRITES},
    },
)
