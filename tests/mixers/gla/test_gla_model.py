"""A hybrid of gated linear attention and full attention, put together without a family.

T tokens, D model width, H heads, K key width.
"""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headwater.layers.attention import GroupedAttention
from headwater.layers.gla import GatedLinearAttention
from headwater.models.build import build_model
from headwater.models.families.reading import block
from headwater.models.hybrid import HybridModel
from headwater.models.tensors import CheckpointTensors
from headwater.spec import Architecture, ModelSpec
from tests.contract.recurrences.gated_linear_attention import reference
from tests.support import Bench

WIDTH, VOCAB, EPS = 32, 100, 1e-5
RECURRENT = GatedLinearAttention(WIDTH, 3, 8, 16)
ATTENTION = GroupedAttention(WIDTH, 4, 2, 8)
SPEC = ModelSpec.of(
    Architecture(
        model_type="test",
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        blocks=(block(0, "norm", RECURRENT, "attn"), block(1, "norm", ATTENTION, "attn")),
        max_length=4096,
        norm_eps=EPS,
    ),
    "float32",
)
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    shapes = {f"layers.{i}.attn.{name}": shape for i in (0, 1) for name, shape in SPEC.layers[i].tensors().items()}
    shapes |= {name: (WIDTH,) for name in ("layers.0.norm.weight", "layers.1.norm.weight", "norm.weight")}
    shapes |= {name: (VOCAB, WIDTH) for name in ("embed_tokens.weight", "lm_head.weight")}
    random = {name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    random["layers.0.attn.gk_proj.1.bias"].add_(6.0)  # states last for thousands of tokens
    return random


@pytest.fixture(scope="module")
def model(tensors: Tensors, tmp_path_factory: pytest.TempPathFactory) -> HybridModel:
    folder: Path = tmp_path_factory.mktemp("gla")
    stored = {(name if name == "lm_head.weight" else f"model.{name}"): tensor for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    return build_model(SPEC, CheckpointTensors(folder, torch.float32, torch.device("cpu")))


def logits_of(tensors: Tensors, tokens: list[int]) -> torch.Tensor:
    """The model's function in float64, token by token where it is recurrent."""
    w = {name: tensor.double() for name, tensor in tensors.items()}
    of = [{name.removeprefix(f"layers.{i}.attn."): t for name, t in w.items()} for i in (0, 1)]
    x_TD = w["embed_tokens.weight"][tokens]
    x_TD = x_TD + reference(RECURRENT, of[0], _normed(x_TD, w["layers.0.norm.weight"]))[0]
    x_TD = x_TD + _attended(of[1], _normed(x_TD, w["layers.1.norm.weight"]))
    return _normed(x_TD, w["norm.weight"]) @ w["lm_head.weight"].T


def _normed(x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
    return x_TD / (x_TD.square().mean(-1, keepdim=True) + EPS).sqrt() * weight_D


def _attended(w: Tensors, x_TD: torch.Tensor) -> torch.Tensor:
    q_HTK, k_HTK, v_HTK = (
        (x_TD @ w[f"{name}_proj.weight"].T).unflatten(1, (-1, 8)).transpose(0, 1) for name in ("q", "k", "v")
    )
    k_HTK, v_HTK = (t.repeat_interleave(2, 0) for t in (k_HTK, v_HTK))
    later_TT = torch.ones(len(x_TD), len(x_TD)).triu(1).bool()
    weight_HTT = (q_HTK @ k_HTK.mT * 8**-0.5).masked_fill(later_TT, float("-inf")).softmax(-1)
    return (weight_HTT @ v_HTK).transpose(0, 1).flatten(1) @ w["o_proj.weight"].T


def test_logits_are_those_of_float64_in_prefill_and_in_decoding(model: HybridModel, tensors: Tensors) -> None:
    tokens = random.Random(0).choices(range(VOCAB), k=212)
    bench = Bench(model, n_pages=8, poison=True)
    seq = bench.sequence(len(tokens))
    rows = [bench.prefill(seq, tokens[:200], cuts=(64, 192))]
    rows += [bench.step([], [(seq, token)]) for token in tokens[200:]]
    assert (torch.cat(rows) - logits_of(tensors, tokens)).abs().max() < 1e-4


def test_slices_and_company_change_no_bit(model: HybridModel) -> None:
    tokens = random.Random(1).choices(range(VOCAB), k=300)
    bench = Bench(model, poison=True)
    whole_TV = bench.prefill(bench.sequence(300), tokens)
    bench = Bench(model, poison=True)
    seq, other = bench.sequence(300), bench.sequence(300)
    rows = [
        bench.step([(other, tokens[b - 64 : b]), (seq, tokens[a:b])], every_row=True)[64:]
        for a, b in pairwise((0, 64, 192, 256, 300))
    ]
    assert torch.equal(torch.cat(rows), whole_TV)


def test_distant_tokens_change_logits(model: HybridModel) -> None:
    tokens = random.Random(2).choices(range(VOCAB), k=1000)
    bench = Bench(model)
    last, other = (
        bench.step([(bench.sequence(1000), changed)]) for changed in (tokens, [(tokens[0] + 1) % VOCAB, *tokens[1:]])
    )
    assert (last - other).abs().max() > 1e-4


def test_bytes_kept_of_a_draft_equal_the_counted_ones(model: HybridModel) -> None:
    bench = Bench(model)
    seq = bench.sequence(20)
    bench.step([(seq, list(range(10)))])
    bench.step([], [(seq, 3), (seq, 4), (seq, 5)], drafted=(2,), accepted=(0,))
    assert sum(part[0, 0].nbytes for parts in bench.states.kept.values() for part in parts) == SPEC.draft_bytes
