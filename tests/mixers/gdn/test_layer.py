"""The layer against transformers' for both families' weight layouts, and how chunks are put into blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from headwater.layers.gdn import DeltaNet
from headwater.mixers.batch import StepBatch
from headwater.mixers.gdn import GatedDeltaNet
from headwater.mixers.recurrent import LayerState
from headwater.mixers.slices import Slice, blocks
from headwater.mixers.weights import Weights

WIDTH, EPS = 48, 1e-6
NONE = torch.empty(0, dtype=torch.int64)
SHAPES = tuple(
    DeltaNet(WIDTH, *sizes, norm_eps=EPS) for sizes in ((2, 4, 16, 24, 4), (3, 3, 32, 16, 2), (1, 6, 16, 16, 4))
)
ORACLES = {
    "qwen3_5": (Qwen3_5GatedDeltaNet, Qwen3_5TextConfig),
    "qwen3_next": (Qwen3NextGatedDeltaNet, Qwen3NextConfig),
}


def pair(family: str, shape: DeltaNet) -> tuple[torch.nn.Module, GatedDeltaNet]:
    """transformers' layer with random weights, and ours with the same."""
    make, config = ORACLES[family]
    torch.manual_seed(0)
    oracle = make(
        config(
            hidden_size=WIDTH,
            num_hidden_layers=4,
            rms_norm_eps=EPS,
            linear_num_key_heads=shape.k_heads,
            linear_num_value_heads=shape.v_heads,
            linear_key_head_dim=shape.k_dim,
            linear_value_head_dim=shape.v_dim,
            linear_conv_kernel_dim=shape.conv,
        ),
        0,
    ).eval()
    for parameter in oracle.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours = replace(shape, by_key_head=family == "qwen3_next")
    return oracle, GatedDeltaNet(ours, Weights({k: v.detach() for k, v in oracle.named_parameters()}))


def zero_state(shape: DeltaNet) -> LayerState:
    recurrent = torch.zeros(2, shape.v_heads, shape.k_dim, shape.v_dim)
    return LayerState(recurrent, torch.zeros(2, shape.channels, shape.conv - 1))


@pytest.mark.parametrize("family", ORACLES)
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_and_decode_agree_with_transformers(family: str, shape: DeltaNet) -> None:
    oracle, layer = pair(family, shape)
    x_LD, state = torch.randn(150, WIDTH), zero_state(shape)
    with torch.inference_mode():
        wanted_LD = oracle(x_LD[None])[0]
        prefill = StepBatch(NONE, NONE, (Slice(0, 140, 0, 1, NONE, 0),), NONE, (), NONE)
        outs = [layer.forward(x_LD[:140], prefill, state)]
        decode = StepBatch(NONE, NONE, (), torch.tensor([1]), (NONE,), NONE)
        outs += [layer.forward(x_LD[t : t + 1], decode, state) for t in range(140, 150)]
    assert (torch.cat(outs) - wanted_LD).abs().max() < 1e-5 * wanted_LD.abs().max()


def test_bfloat16_stays_close_and_keeps_its_states_in_float32() -> None:
    shape = SHAPES[0]
    oracle, _ = pair("qwen3_5", shape)
    tensors = {name: tensor.detach().bfloat16() for name, tensor in oracle.named_parameters()}
    layer, state = GatedDeltaNet(shape, Weights(tensors, torch.bfloat16)), zero_state(shape)
    state = LayerState(state.recurrent, state.conv.bfloat16())
    x_LD = torch.randn(100, WIDTH).bfloat16()
    with torch.inference_mode():
        prefill = StepBatch(NONE, NONE, (Slice(0, 100, 0, 0, NONE, 0),), NONE, (), NONE)
        out_LD = layer.forward(x_LD, prefill, state)
        wanted_LD = oracle(x_LD.float()[None])[0]
    assert out_LD.dtype == torch.bfloat16
    assert state.recurrent.dtype == torch.float32
    assert (out_LD - wanted_LD).abs().max() < 0.03 * wanted_LD.abs().max()


def test_blocks_hold_every_chunk_once_in_the_order_of_each_sequence() -> None:
    group = [Slice(0, n, 0, i, NONE, 0) for i, n in enumerate((700, 130, 128, 1))]
    seen: dict[int, list[int]] = {i: [] for i in range(4)}
    for n_active, chunks in blocks(group, 4):
        assert len(chunks) <= 4
        assert len(chunks) % n_active == 0
        for at, chunk in enumerate(chunks):
            assert chunk.parent.slot == at % n_active
            seen[chunk.parent.slot].append(chunk.index)
    assert [seen[i] for i in range(4)] == [list(range(n)) for n in (11, 3, 2, 1)]
