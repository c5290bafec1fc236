"""Mamba-2. L tokens, D model width, C convolved channels, H heads, P channels a head, I = H·P, G groups, N states."""

from dataclasses import replace

import torch

from headwater.layers.mamba2 import Mamba2
from headwater.mixers.convolution import causal_convolution
from headwater.mixers.mamba2 import state_space
from tests.contract.recurrences.case import WIDTH, Recurrence, Tensors, constant

FAR = 1e4  # of a step's bias: dt is as large


def reference(layer: Mamba2, w: Tensors, x_LD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    of_groups = layer.groups * layer.state
    widths = (layer.inner, layer.inner, of_groups, of_groups, layer.heads)
    projected_LE = x_LD @ w["in_proj.weight"].T + w.get("in_proj.bias", 0.0)
    parts = [s * part for s, part in zip(layer.scales, projected_LE.split(widths, -1), strict=True)]
    gate_LI, dt_LH = torch.nn.functional.silu(parts[0]), torch.nn.functional.softplus(parts[-1] + w["dt_bias"])
    no_tail_CW = x_LD.new_zeros(layer.channels, layer.conv - 1)
    mixed_LC = causal_convolution(torch.cat(parts[1:4], -1), w["conv1d.weight"].squeeze(1).T, no_tail_CW)
    mixed_LC = torch.nn.functional.silu(mixed_LC + w.get("conv1d.bias", 0.0))
    x_LI, b_LX, c_LX = mixed_LC.split(widths[1:4], -1)
    y_LHP, state_HNP = state_space(
        x_LI.unflatten(-1, (layer.heads, -1)),
        dt_LH.clamp(*layer.step_limits),
        -w["A_log"].exp(),
        b_LX.unflatten(-1, (layer.groups, -1)),
        c_LX.unflatten(-1, (layer.groups, -1)),
        w["D"],
        x_LD.new_zeros(layer.heads, layer.state, layer.head_dim),
    )
    out_LI = _normed(layer, w, y_LHP.flatten(1), gate_LI)
    return out_LI @ w["out_proj.weight"].T + w.get("out_proj.bias", 0.0), state_HNP


def _normed(layer: Mamba2, w: Tensors, y_LI: torch.Tensor, gate_LI: torch.Tensor) -> torch.Tensor:
    if not layer.normed:
        return y_LI * gate_LI
    y_LGX = (y_LI if layer.norm_first else y_LI * gate_LI).unflatten(-1, (layer.groups, -1))
    y_LGX = y_LGX / (y_LGX.square().mean(-1, keepdim=True) + layer.norm_eps).sqrt()
    normed_LI = y_LGX.flatten(1) * w["norm.weight"]
    return normed_LI * gate_LI if layer.norm_first else normed_LI


def moved(layer: Mamba2, w: Tensors, transition_H: torch.Tensor, state_HNP: torch.Tensor) -> torch.Tensor:
    return transition_H[:, None, None] * state_HNP


PLAIN = Mamba2(WIDTH, heads=4, head_dim=16, state=24, groups=1, conv=4)
MAMBA2 = Recurrence(
    shapes={
        "plain": PLAIN,
        "odd heads": Mamba2(WIDTH, heads=9, head_dim=8, state=16, groups=3, conv=3, norm_eps=1e-6, bias=True),
        "one channel a head": Mamba2(WIDTH, 49, 1, 8, 1, 4, norm_first=True, conv_bias=False, out_bias=True),
        "scaled": replace(PLAIN, normed=False, scales=(0.7, 0.35, 0.5, 2.0, 0.25), step_limits=(0.2, 0.9)),
    },
    reference=reference,
    moved=moved,
    transition=lambda layer: (layer.heads,),
    extremes={
        "forgets at once": {"dt_bias": constant(FAR)},
        "forgets everything": {"A_log": constant(80.0), "dt_bias": constant(FAR)},
        "forgets nothing": {"A_log": constant(-200.0)},
        "forgets next to nothing": {"A_log": constant(-16.0)},
        "takes no step": {"dt_bias": constant(-FAR)},
        "some heads forget at once": {"A_log": lambda weight, generator: weight.uniform_(-16, 9, generator=generator)},
    },
)
