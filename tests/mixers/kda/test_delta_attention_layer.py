"""The layer against transformers': Kimi-Linear's, and Ling 3.0's with and without bounded decays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers.models.bailing_hybrid.configuration_bailing_hybrid import BailingHybridConfig
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridDeltaAttention
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

from headwater.layers.kda import DeltaAttention
from headwater.mixers.batch import StepBatch
from headwater.mixers.kda import KimiDeltaAttention
from headwater.mixers.recurrent import LayerState
from headwater.mixers.slices import Slice
from headwater.mixers.weights import Weights

WIDTH = 48
NONE = torch.empty(0, dtype=torch.int64)


def kimi(shape: DeltaAttention) -> torch.nn.Module:
    config = KimiLinearConfig(
        hidden_size=WIDTH,
        num_hidden_layers=4,
        rms_norm_eps=shape.norm_eps,
        linear_num_heads=shape.heads,
        linear_head_dim=shape.head_dim,
        linear_conv_kernel_dim=shape.conv,
    )
    return KimiLinearDeltaAttention(config, 0)


def ling(shape: DeltaAttention) -> torch.nn.Module:
    config = BailingHybridConfig(
        hidden_size=WIDTH,
        num_hidden_layers=4,
        rms_norm_eps=shape.norm_eps,
        linear_num_heads=shape.heads,
        linear_head_dim=shape.head_dim,
        linear_conv_kernel_dim=shape.conv,
        kda_safe_gate=shape.lowest is not None,
        kda_lower_bound=shape.lowest or 0.0,
    )
    return BailingHybridDeltaAttention(config, 0)


LAYERS: dict[str, tuple[Callable[[DeltaAttention], torch.nn.Module], DeltaAttention]] = {
    "kimi": (kimi, DeltaAttention(WIDTH, 4, 16, 4)),
    "kimi, odd heads": (kimi, DeltaAttention(WIDTH, 3, 24, 3, norm_eps=1e-6)),
    "ling, bounded": (ling, DeltaAttention(WIDTH, 3, 16, 4, low_rank=False, lowest=-5.0)),
    "ling, not bounded": (ling, DeltaAttention(WIDTH, 2, 32, 4, low_rank=False)),
}


def pair(name: str) -> tuple[torch.nn.Module, DeltaAttention, dict[str, torch.Tensor]]:
    """transformers' layer with random weights, our shape, and the weights by our names."""
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    oracle = make(shape).eval()
    for parameter in oracle.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    stored = {key.removeprefix("forget_gate."): tensor.detach() for key, tensor in oracle.named_parameters()}
    taps = stored.pop("conv1d.weight").chunk(3)
    stored |= {f"{name}_conv1d.weight": part for name, part in zip("qkv", taps, strict=True)}
    tensors = {key: stored[key].view(dims) for key, dims in shape.tensors().items()}
    return oracle, shape, tensors


def zero_state(shape: DeltaAttention, dtype: torch.dtype = torch.float32) -> LayerState:
    recurrent, conv = (dims for _, dims in shape.states)
    return LayerState(torch.zeros(2, *recurrent), torch.zeros(2, *conv, dtype=dtype))


@pytest.mark.parametrize("name", LAYERS)
def test_prefill_and_decode_agree_with_transformers(name: str) -> None:
    oracle, shape, tensors = pair(name)
    layer, state = KimiDeltaAttention(shape, Weights(tensors)), zero_state(shape)
    x_LD = torch.randn(150, WIDTH)
    with torch.inference_mode():
        wanted_LD = oracle(x_LD[None])[0]
        prefill = StepBatch(NONE, NONE, (Slice(0, 140, 0, 1, NONE, 0),), NONE, (), NONE)
        outs = [layer.forward(x_LD[:140], prefill, state)]
        decode = StepBatch(NONE, NONE, (), torch.tensor([1]), (NONE,), NONE)
        outs += [layer.forward(x_LD[t : t + 1], decode, state) for t in range(140, 150)]
    assert (torch.cat(outs) - wanted_LD).abs().max() < 1e-5 * wanted_LD.abs().max()


@pytest.mark.parametrize("name", LAYERS)
def test_bfloat16_is_within_a_hundredth_and_has_float32_states(name: str) -> None:
    oracle, shape, tensors = pair(name)
    for parameter in oracle.parameters():
        parameter.data = parameter.data.bfloat16().float()
    rounded = {key: tensor.bfloat16() for key, tensor in tensors.items()}
    layer, state = KimiDeltaAttention(shape, Weights(rounded, torch.bfloat16)), zero_state(shape, torch.bfloat16)
    x_LD = torch.randn(100, WIDTH).bfloat16()
    with torch.inference_mode():
        prefill = StepBatch(NONE, NONE, (Slice(0, 100, 0, 0, NONE, 0),), NONE, (), NONE)
        out_LD = layer.forward(x_LD, prefill, state)
        wanted_LD = oracle(x_LD.float()[None])[0]
    assert out_LD.dtype == torch.bfloat16
    assert state.recurrent.dtype == torch.float32
    assert (out_LD - wanted_LD).norm() < 0.01 * wanted_LD.norm()


def test_bound_on_decays_changes_the_output() -> None:
    _, shape, tensors = pair("ling, bounded")
    x_LD = torch.randn(70, WIDTH)
    prefill = StepBatch(NONE, NONE, (Slice(0, 70, 0, 0, NONE, 0),), NONE, (), NONE)
    with torch.inference_mode():
        outs = [
            KimiDeltaAttention(replace(shape, lowest=lowest), Weights(tensors)).forward(
                x_LD, prefill, zero_state(shape)
            )
            for lowest in (-5.0, -0.5, None)
        ]
    assert all((a - b).abs().max() > 0.01 * a.abs().max() for a, b in ((outs[0], outs[1]), (outs[0], outs[2])))
