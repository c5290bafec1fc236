"""Mamba-1. L tokens, D model width, C channels, E states a channel, R channels of the step's projection."""

import torch

from headwater.layers.mamba import Mamba
from headwater.mixers.convolution import causal_convolution
from headwater.mixers.mamba import selective_scan
from tests.contract.recurrences.case import WIDTH, Recurrence, Tensors, constant


def reference(layer: Mamba, w: Tensors, x_LD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mixed_LC, z_LC = _product(w, "in_proj", x_LD).chunk(2, -1)
    no_tail_CW = x_LD.new_zeros(layer.inner, layer.conv - 1)
    mixed_LC = causal_convolution(mixed_LC, w["conv1d.weight"].squeeze(1).T, no_tail_CW)
    mixed_LC = torch.nn.functional.silu(mixed_LC + w.get("conv1d.bias", 0.0))
    widths = (layer.step_rank, layer.state, layer.state)
    parts = (mixed_LC @ w["x_proj.weight"].T).split(widths, -1)
    dt_LR, b_LE, c_LE = (_normed(layer, w, name, part) for name, part in zip(("dt", "b", "c"), parts, strict=True))
    dt_LC = torch.nn.functional.softplus(_product(w, "dt_proj", dt_LR))
    zero_EC = x_LD.new_zeros(layer.state, layer.inner)
    read_LC, state_EC = selective_scan(mixed_LC, dt_LC, _rates(w), b_LE, c_LE, zero_EC)
    out_LC = (read_LC + w["D"] * mixed_LC) * torch.nn.functional.silu(z_LC)
    return _product(w, "out_proj", out_LC), state_EC


def _product(w: Tensors, name: str, x_LK: torch.Tensor) -> torch.Tensor:
    return x_LK @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def _normed(layer: Mamba, w: Tensors, name: str, x_LK: torch.Tensor) -> torch.Tensor:
    if not layer.normed:
        return x_LK
    return (
        x_LK / (x_LK.square().mean(-1, keepdim=True) + layer.norm_eps).sqrt() * w.get(f"{name}_layernorm.weight", 1.0)
    )


def _rates(w: Tensors) -> torch.Tensor:
    return -w["A_log"].exp().T


def moved(layer: Mamba, w: Tensors, transition_C: torch.Tensor, state_EC: torch.Tensor) -> torch.Tensor:
    """The transition is the sum of steps, by which a state decays at its own rate."""
    return (transition_C * _rates(w)).exp() * state_EC


MAMBA = Recurrence(
    shapes={
        "plain": Mamba(WIDTH, inner=64, state=16, conv=4, step_rank=2),
        "normed": Mamba(WIDTH, 64, 16, 4, 2, normed=True),
        "odd widths": Mamba(WIDTH, 75, 7, 3, 5, normed=True, norm_eps=1e-5),
        "biases": Mamba(WIDTH, 40, 24, 4, 3, conv_bias=False, bias=True, normed=True, norm_weights=False),
    },
    reference=reference,
    moved=moved,
    transition=lambda layer: (layer.inner,),
    extremes={
        "forgets at once": {"dt_proj.bias": constant(1e4)},
        "forgets some states at once": {
            "A_log": lambda weight, generator: weight.uniform_(-16, 9, generator=generator)
        },
        "forgets nothing": {"A_log": constant(-200.0)},
        "forgets next to nothing": {"A_log": constant(-16.0)},
        "takes no step": {"dt_proj.bias": constant(-1e4)},
    },
)
