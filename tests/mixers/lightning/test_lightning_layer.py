"""The layer against transformers' MiniMax, in both dtypes, and what segments will need of a layer that rotates."""

from __future__ import annotations

import pytest
import torch
from transformers.models.minimax.configuration_minimax import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from headwater.layers.attention import Rotary
from headwater.layers.lightning import Lightning, alibi_slopes
from headwater.mixers.batch import StepBatch
from headwater.mixers.lightning import LightningAttention
from headwater.mixers.recurrent import LayerState
from headwater.mixers.rotary import rotary_table, rotate_into
from headwater.mixers.slices import Slice
from headwater.mixers.weights import Weights

WIDTH, LAYERS, INDEX = 48, 6, 2
NONE = torch.empty(0, dtype=torch.int64)


def pair(heads: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.nn.Module, LightningAttention]:
    """transformers' layer with random weights, and ours with the same."""
    torch.manual_seed(0)
    config = MiniMaxConfig(
        hidden_size=WIDTH,
        num_attention_heads=heads,
        head_dim=head_dim,
        num_hidden_layers=LAYERS,
        layer_types=["linear_attention"] * LAYERS,
    )
    oracle = MiniMaxLightningAttention(config, INDEX).eval()
    for parameter in oracle.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    slopes = tuple(oracle.slope_rate.flatten().tolist())
    shape = Lightning(WIDTH, heads, head_dim, slopes, activated=True, normed=False, by_head=True)
    names = {"output_gate": "g_proj", "norm": "g_norm", "out_proj": "o_proj"}
    tensors = {}
    for name, parameter in oracle.named_parameters():
        module, _, kind = name.partition(".")
        tensors[f"{names.get(module, module)}.{kind}"] = parameter.detach().to(dtype)
    return oracle, LightningAttention(shape, Weights(tensors, dtype))


def run(layer: LightningAttention, x_LD: torch.Tensor, decoded: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of a sequence whose last tokens are decoded, and its state."""
    s, prefilled = layer.shape, len(x_LD) - decoded
    state = LayerState(torch.zeros(2, s.heads, s.head_dim, s.head_dim))
    prefill = StepBatch(NONE, torch.arange(prefilled), (Slice(0, prefilled, 0, 1, NONE, 0),), NONE, (), NONE)
    with torch.inference_mode():
        outs = [layer.forward(x_LD[:prefilled], prefill, state)]
        for t in range(prefilled, len(x_LD)):
            step = StepBatch(NONE, torch.tensor([t]), (), torch.tensor([1]), (NONE,), NONE)
            outs.append(layer.forward(x_LD[t : t + 1], step, state))
    return torch.cat(outs), state.recurrent[1]


@pytest.mark.parametrize(("heads", "head_dim"), [(4, 16), (3, 24), (1, 40)])
def test_prefill_and_decode_agree_with_transformers(heads: int, head_dim: int) -> None:
    oracle, layer = pair(heads, head_dim, torch.float32)
    x_LD = torch.randn(150, WIDTH)
    with torch.inference_mode():
        wanted_1LD, _ = oracle(x_LD[None], position_embeddings=None, attention_mask=None)
    out_LD, _ = run(layer, x_LD, decoded=10)
    assert (out_LD - wanted_1LD[0]).abs().max() < 1e-5 * wanted_1LD.abs().max()


def test_bfloat16_stays_close_and_keeps_its_states_in_float32() -> None:
    oracle, layer = pair(4, 16, torch.bfloat16)
    x_LD = torch.randn(100, WIDTH).bfloat16()
    with torch.inference_mode():
        wanted_1LD, _ = oracle(x_LD.float()[None], position_embeddings=None, attention_mask=None)
    out_LD, state_HKK = run(layer, x_LD, decoded=5)
    assert out_LD.dtype == torch.bfloat16
    assert state_HKK.dtype == torch.float32
    assert (out_LD - wanted_1LD[0]).abs().max() < 0.03 * wanted_1LD.abs().max()


@pytest.mark.parametrize("others", [(1,), (5, 200), (64, 400, 3)])
def test_whole_chunks_have_the_same_bits_wherever_their_rows_begin(others: tuple[int, ...]) -> None:
    """Alone they are read where the projection left them, among other sequences from a copy."""
    _, layer = pair(3, 24, torch.float32)
    x_LD = torch.randn(256, WIDTH)
    wanted_LD, wanted_HKK = run(layer, x_LD, decoded=0)
    lengths = (*others, len(x_LD))
    slices = tuple(Slice(sum(lengths[:i]), n, 0, i, NONE, 0) for i, n in enumerate(lengths))
    rows_ND = torch.cat((torch.randn(sum(others), WIDTH), x_LD))
    state = LayerState(torch.zeros(len(lengths), 3, 24, 24))
    with torch.inference_mode():
        out_ND = layer.forward(rows_ND, StepBatch(NONE, torch.arange(len(rows_ND)), slices, NONE, (), NONE), state)
    assert torch.equal(out_ND[sum(others) :], wanted_LD)
    assert torch.equal(state.recurrent[-1], wanted_HKK)


def test_a_segments_state_is_used_at_another_position_by_turning_its_keys() -> None:
    """S ← T·S + R(p)·S₀ (HyPIC, equation 7), with T = λ^tokens."""
    heads, head_dim, before, tokens = 3, 16, 91, 77
    shape = Lightning(WIDTH, heads, head_dim, tuple(alibi_slopes(heads)), rotary=Rotary(8), norm_groups=3)
    torch.manual_seed(0)
    layer = LightningAttention(shape, Weights({n: torch.randn(size) * 0.3 for n, size in shape.tensors().items()}))
    x_LD = torch.randn(before + tokens, WIDTH)
    _, prefix_HKK = run(layer, x_LD[:before], decoded=0)
    _, segment_HKK = run(layer, x_LD[before:], decoded=0)
    _, wanted_HKK = run(layer, x_LD, decoded=0)
    turned_VHK = segment_HKK.permute(2, 0, 1).contiguous()
    rotate_into(turned_VHK, rotary_table(shape.rotary, "cpu").at(torch.full((head_dim,), before)))
    transition_H11 = (-torch.tensor(shape.slopes) * tokens).exp()[:, None, None]
    composed_HKK = transition_H11 * prefix_HKK + turned_VHK.permute(1, 2, 0)
    assert (composed_HKK - wanted_HKK).abs().max() < 1e-6 * wanted_HKK.abs().max()
    apart_HKK = transition_H11 * prefix_HKK + segment_HKK
    assert (apart_HKK - wanted_HKK).abs().max() > 1e-2 * wanted_HKK.abs().max()
