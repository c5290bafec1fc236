"""Gated short convolution. L tokens, D model width, W taps, w = W − 1."""

import torch

from headwater.layers.short_conv import ShortConv
from headwater.mixers.convolution import causal_convolution
from tests.contract.recurrences.case import WIDTH, Recurrence, Tensors


def reference(layer: ShortConv, w: Tensors, x_LD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    bias = w.get("in_proj.bias", x_LD.new_zeros(3 * layer.hidden))
    parts = zip(w["in_proj.weight"].chunk(3), bias.chunk(3), strict=True)
    b_LD, c_LD, x_LD = (x_LD @ weight.T + bias for weight, bias in parts)
    before_wD = x_LD.new_zeros(layer.conv - 1, layer.hidden)
    mixed_LD = b_LD * x_LD
    convolved_LD = causal_convolution(mixed_LD, w["conv1d.weight"].squeeze(1).T, before_wD.T)
    out_LD = c_LD * (convolved_LD + w.get("conv1d.bias", 0.0))
    last_wD = torch.cat((before_wD, mixed_LD))[len(mixed_LD) :]
    return out_LD @ w["out_proj.weight"].T + w.get("out_proj.bias", 0.0), last_wD


def moved(layer: ShortConv, w: Tensors, transition_1: torch.Tensor, state_wD: torch.Tensor) -> torch.Tensor:
    n = int(transition_1)
    return torch.cat((state_wD, state_wD.new_zeros(n, layer.hidden)))[n:]


SHORT_CONV = Recurrence(
    shapes={
        "plain": ShortConv(WIDTH, conv=3),
        "with biases": ShortConv(WIDTH, conv=4, bias=True),
        "one stored input": ShortConv(WIDTH, conv=2),
    },
    reference=reference,
    moved=moved,
    transition=lambda layer: (1,),
    parts=3,
    remembers=lambda layer: layer.conv - 2,  # one token less than its stored inputs
)
