"""Recurrent layers against those of transformers, in both dtypes, and what each kind does besides."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.bailing_hybrid.configuration_bailing_hybrid import BailingHybridConfig
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridDeltaAttention
from transformers.models.jamba.configuration_jamba import JambaConfig
from transformers.models.jamba.modeling_jamba import JambaMambaMixer
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.minimax.configuration_minimax import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from headwater.layers.attention import Rotary
from headwater.layers.gdn import DeltaNet
from headwater.layers.kda import DeltaAttention
from headwater.layers.layer import Layer
from headwater.layers.lightning import Lightning, alibi_slopes
from headwater.layers.mamba import Mamba
from headwater.mixers.batch import StepBatch
from headwater.mixers.recurrent import LayerState, RecurrentMixer
from headwater.mixers.rotary import rotary_table, rotate_into
from headwater.mixers.slices import Slice, blocks
from headwater.mixers.weights import Weights
from headwater.models.build import RECURRENT

WIDTH = 48
NONE = torch.empty(0, dtype=torch.int64)
Tensors = dict[str, Tensor]
Pair = tuple[nn.Module, Layer, Tensors]  # transformers' layer with random weights, our shape, the weights by our names


def random_weights(oracle: nn.Module) -> nn.Module:
    for parameter in oracle.eval().parameters():
        nn.init.normal_(parameter, std=0.3)
    return oracle


def stored(oracle: nn.Module) -> Tensors:
    return {name: parameter.detach() for name, parameter in oracle.named_parameters()}


def delta_net(by_key_head: bool, *sizes: int) -> Pair:
    shape = DeltaNet(WIDTH, *sizes, norm_eps=1e-6, by_key_head=by_key_head)
    config = (Qwen3NextConfig if by_key_head else Qwen3_5TextConfig)(
        hidden_size=WIDTH,
        num_hidden_layers=4,
        rms_norm_eps=shape.norm_eps,
        linear_num_key_heads=shape.k_heads,
        linear_num_value_heads=shape.v_heads,
        linear_key_head_dim=shape.k_dim,
        linear_value_head_dim=shape.v_dim,
        linear_conv_kernel_dim=shape.conv,
    )
    oracle = random_weights((Qwen3NextGatedDeltaNet if by_key_head else Qwen3_5GatedDeltaNet)(config, 0))
    return oracle, shape, stored(oracle)


def delta_attention(shape: DeltaAttention) -> Pair:
    """Kimi-Linear's, with gates of low rank, or Ling 3.0's with and without bounded decays."""
    sizes = {
        "hidden_size": WIDTH,
        "num_hidden_layers": 4,
        "rms_norm_eps": shape.norm_eps,
        "linear_num_heads": shape.heads,
        "linear_head_dim": shape.head_dim,
        "linear_conv_kernel_dim": shape.conv,
    }
    decays = {"kda_safe_gate": shape.lowest is not None, "kda_lower_bound": shape.lowest or 0.0}
    oracle = random_weights(
        KimiLinearDeltaAttention(KimiLinearConfig(**sizes), 0)
        if shape.low_rank
        else BailingHybridDeltaAttention(BailingHybridConfig(**sizes, **decays), 0)
    )
    tensors = {name.removeprefix("forget_gate."): tensor for name, tensor in stored(oracle).items()}
    taps = tensors.pop("conv1d.weight").chunk(3)
    tensors |= {f"{name}_conv1d.weight": part for name, part in zip("qkv", taps, strict=True)}
    return oracle, shape, {name: tensors[name].view(dims) for name, dims in shape.tensors().items()}


def lightning(heads: int, head_dim: int) -> Pair:
    layers = 6
    config = MiniMaxConfig(
        hidden_size=WIDTH,
        num_attention_heads=heads,
        head_dim=head_dim,
        num_hidden_layers=layers,
        layer_types=["linear_attention"] * layers,
    )
    oracle = random_weights(MiniMaxLightningAttention(config, 2))
    slopes = tuple(oracle.slope_rate.flatten().tolist())
    names, tensors = {"output_gate": "g_proj", "norm": "g_norm", "out_proj": "o_proj"}, {}
    for name, tensor in stored(oracle).items():
        module, _, kind = name.partition(".")
        tensors[f"{names.get(module, module)}.{kind}"] = tensor
    shape = Lightning(WIDTH, heads, head_dim, slopes, activated=True, normed=False, by_head=True)
    return oracle, shape, tensors


def mamba(shape: Mamba) -> Pair:
    """Jamba's, which must compute in one pass: from a cached state transformers continues wrongly."""
    config = JambaConfig(
        hidden_size=shape.hidden,
        mamba_expand=shape.inner // shape.hidden,
        mamba_d_state=shape.state,
        mamba_d_conv=shape.conv,
        mamba_dt_rank=shape.step_rank,
        mamba_conv_bias=shape.conv_bias,
        mamba_proj_bias=shape.bias,
        rms_norm_eps=shape.norm_eps,
    )
    oracle = random_weights(JambaMambaMixer(config, 0))
    for name, weight in oracle.named_parameters():
        weight.data += "norm" in name or name == "D"
    return oracle, shape, stored(oracle)


JAMBA = Mamba(WIDTH, inner=96, state=16, conv=4, step_rank=3, normed=True)
ODD_MAMBA = Mamba(
    WIDTH, inner=144, state=5, conv=3, step_rank=7, conv_bias=False, bias=True, normed=True, norm_eps=1e-4
)
PAIRS: dict[str, Callable[[], Pair]] = {
    "qwen3_5": lambda: delta_net(False, 2, 4, 16, 24, 4),
    "qwen3_5, short convolution": lambda: delta_net(False, 3, 3, 32, 16, 2),
    "qwen3_5, one key head": lambda: delta_net(False, 1, 6, 16, 16, 4),
    "qwen3_next": lambda: delta_net(True, 2, 4, 16, 24, 4),
    "qwen3_next, short convolution": lambda: delta_net(True, 3, 3, 32, 16, 2),
    "qwen3_next, one key head": lambda: delta_net(True, 1, 6, 16, 16, 4),
    "kimi": lambda: delta_attention(DeltaAttention(WIDTH, 4, 16, 4)),
    "kimi, odd heads": lambda: delta_attention(DeltaAttention(WIDTH, 3, 24, 3, norm_eps=1e-6)),
    "ling, bounded": lambda: delta_attention(DeltaAttention(WIDTH, 3, 16, 4, low_rank=False, lowest=-5.0)),
    "ling, not bounded": lambda: delta_attention(DeltaAttention(WIDTH, 2, 32, 4, low_rank=False)),
    "minimax": lambda: lightning(4, 16),
    "minimax, odd heads": lambda: lightning(3, 24),
    "minimax, one head": lambda: lightning(1, 40),
    "jamba": lambda: mamba(JAMBA),
    "jamba, odd, with other biases": lambda: mamba(ODD_MAMBA),
}


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def ours(shape: Layer, tensors: Tensors, dtype: torch.dtype = torch.float32) -> RecurrentMixer[Any]:
    return RECURRENT[type(shape)](shape, Weights({name: t.to(dtype) for name, t in tensors.items()}, dtype))


def zero_state(shape: Layer, dtype: torch.dtype = torch.float32, rows: int = 2) -> LayerState:
    sizes = dict(shape.states)
    conv = torch.zeros(rows, *sizes["conv"], dtype=dtype) if "conv" in sizes else None
    return LayerState(torch.zeros(rows, *sizes["recurrent"]), conv)


def run(layer: RecurrentMixer[Any], x_LD: Tensor, decoded: int) -> tuple[Tensor, Tensor]:
    """Outputs of a sequence whose last tokens are decoded, and its state."""
    state, prefilled = zero_state(layer.shape, x_LD.dtype), len(x_LD) - decoded
    prefill = StepBatch(NONE, torch.arange(prefilled), (Slice(0, prefilled, 0, 1, NONE, 0),), NONE, (), NONE)
    outs = [layer.forward(x_LD[:prefilled], prefill, state)]
    for t in range(prefilled, len(x_LD)):
        step = StepBatch(NONE, torch.tensor([t]), (), torch.tensor([1]), (NONE,), NONE)
        outs.append(layer.forward(x_LD[t : t + 1], step, state))
    return torch.cat(outs), state.recurrent[1]


def theirs(oracle: nn.Module, x_LD: Tensor) -> Tensor:
    also = {"position_embeddings": None, "attention_mask": None} if "MiniMax" in type(oracle).__name__ else {}
    out = oracle(x_LD.float()[None], **also)
    return (out[0] if isinstance(out, tuple) else out)[0]


@pytest.mark.parametrize(("tokens", "decoded"), [(1, 0), (64, 0), (150, 10), (200, 0)])
@pytest.mark.parametrize("name", PAIRS)
def test_prefill_and_decode_agree_with_transformers(name: str, tokens: int, decoded: int) -> None:
    oracle, shape, tensors = PAIRS[name]()
    x_LD = torch.randn(tokens, WIDTH)
    wanted_LD, (out_LD, _) = theirs(oracle, x_LD), run(ours(shape, tensors), x_LD, decoded)
    assert (out_LD - wanted_LD).abs().max() < 1e-5 * wanted_LD.abs().max()


@pytest.mark.parametrize("name", PAIRS)
def test_bfloat16_is_within_a_hundredth_and_has_float32_states(name: str) -> None:
    oracle, shape, tensors = PAIRS[name]()
    layer, x_LD = ours(shape, tensors, torch.bfloat16), torch.randn(100, WIDTH).bfloat16()
    for parameter in oracle.parameters():
        parameter.data = parameter.data.bfloat16().float()
    wanted_LD, (out_LD, state_X) = theirs(oracle, x_LD), run(layer, x_LD, 5)
    assert (out_LD.dtype, state_X.dtype) == (torch.bfloat16, torch.float32)
    assert (out_LD - wanted_LD).norm() < 0.01 * wanted_LD.norm()
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


def test_bound_on_decays_changes_the_output() -> None:
    _, shape, tensors = PAIRS["ling, bounded"]()
    x_LD = torch.randn(70, WIDTH)
    bounded, tighter, free = (run(ours(replace(shape, lowest=of), tensors), x_LD, 0)[0] for of in (-5.0, -0.5, None))
    assert all((bounded - other).abs().max() > 0.01 * bounded.abs().max() for other in (tighter, free))


@pytest.mark.parametrize("others", [(1,), (5, 200), (64, 400, 3)])
def test_whole_chunks_have_the_same_bits_wherever_their_rows_begin(others: tuple[int, ...]) -> None:
    """Alone they are read where the projection left them, among other sequences from a copy."""
    _, shape, tensors = PAIRS["minimax, odd heads"]()
    layer, x_LD = ours(shape, tensors), torch.randn(256, WIDTH)
    wanted_LD, wanted_HKK = run(layer, x_LD, decoded=0)
    lengths = (*others, len(x_LD))
    slices = tuple(Slice(sum(lengths[:i]), n, 0, i, NONE, 0) for i, n in enumerate(lengths))
    rows_ND, state = torch.cat((torch.randn(sum(others), WIDTH), x_LD)), zero_state(shape, rows=len(lengths))
    out_ND = layer.forward(rows_ND, StepBatch(NONE, torch.arange(len(rows_ND)), slices, NONE, (), NONE), state)
    assert torch.equal(out_ND[sum(others) :], wanted_LD)
    assert torch.equal(state.recurrent[-1], wanted_HKK)


def test_a_segments_state_is_used_at_another_position_by_turning_its_keys() -> None:
    """S ← T·S + R(p)·S₀ (HyPIC, equation 7), with T = λ^tokens."""
    heads, head_dim, before, tokens = 3, 16, 91, 77
    shape = Lightning(WIDTH, heads, head_dim, tuple(alibi_slopes(heads)), rotary=Rotary(8), norm_groups=3)
    layer = ours(shape, {name: torch.randn(size) * 0.3 for name, size in shape.tensors().items()})
    x_LD = torch.randn(before + tokens, WIDTH)
    prefix_HKK, segment_HKK, wanted_HKK = (run(layer, x, 0)[1] for x in (x_LD[:before], x_LD[before:], x_LD))
    turned_VHK = segment_HKK.permute(2, 0, 1).contiguous()
    rotate_into(turned_VHK, rotary_table(shape.rotary, "cpu").at(torch.full((head_dim,), before)))
    transition_H11 = (-torch.tensor(shape.slopes) * tokens).exp()[:, None, None]
    composed_HKK = transition_H11 * prefix_HKK + turned_VHK.permute(1, 2, 0)
    assert (composed_HKK - wanted_HKK).abs().max() < 1e-6 * wanted_HKK.abs().max()
    apart_HKK = transition_H11 * prefix_HKK + segment_HKK
    assert (apart_HKK - wanted_HKK).abs().max() > 1e-2 * wanted_HKK.abs().max()


def test_inputs_of_the_scan_are_left_as_they_are() -> None:
    _, shape, tensors = PAIRS["jamba"]()
    mixed_ntC, gates_nt1 = torch.randn(2, 64, 96), torch.ones(2, 64, 1)
    before = mixed_ntC.clone()
    ours(shape, tensors).prepare(mixed_ntC, gates_nt1)
    assert torch.equal(mixed_ntC, before)
