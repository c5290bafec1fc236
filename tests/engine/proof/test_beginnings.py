"""The self-check of beginnings finds rows whose bits depend on the rows after them."""

import pytest
import torch

from headwater.engine.proof import beginnings
from headwater.layers.gdn import DeltaNet
from headwater.layers.kda import DeltaAttention
from headwater.layers.layer import Layer
from headwater.layers.lightning import Lightning
from headwater.layers.mamba import Mamba
from headwater.layers.mamba2 import Mamba2
from headwater.mixers import softmax
from headwater.mixers.weights import Weights
from headwater.models.build import RECURRENT

WIDTH = 64
LAYERS = (
    DeltaNet(WIDTH, 2, 4, 16, 16, 4),
    DeltaAttention(WIDTH, heads=3, head_dim=24, conv=4),
    Lightning(WIDTH, 2, 16, (0.1, 0.02)),
    Mamba2(WIDTH, heads=4, head_dim=16, state=24, groups=2, conv=4),
    Mamba(WIDTH, inner=24, state=8, conv=4, step_rank=6),
)


def random(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator).to(dtype)


def broken(layer: Layer, dtype: torch.dtype = torch.float32) -> list[str]:
    of = random(dtype)
    tensors = {name: of(*shape).float() / 8 for name, shape in layer.tensors().items()}
    mixer = RECURRENT[type(layer)](layer, Weights(tensors))
    return list(beginnings.broken_recurrence((layer, mixer), of, "cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.kind)
def test_beginnings_of_chunks_have_their_bits(layer: Layer, dtype: torch.dtype) -> None:
    assert broken(layer, dtype) == []


@pytest.mark.parametrize("layer", LAYERS[1:], ids=lambda layer: layer.kind)
def test_recurrence_that_depends_on_later_rows_is_named(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = RECURRENT[type(layer)]
    prepare = mixer.prepare

    def odd(self, mixed_ntC: torch.Tensor, gates_ntX: torch.Tensor):
        is_whole = gates_ntX.flatten(1)[:, -1] != 0  # else the last row is padding
        return prepare(self, mixed_ntC * (1 + is_whole[:, None, None]), gates_ntX)

    monkeypatch.setattr(mixer, "prepare", odd)
    assert broken(layer) == [f"{layer.kind} at the first {n} rows" for n in (1, 7, 31, 63)]


def test_attention_that_depends_on_its_first_row_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(beginnings.broken_attention(2, 2, 16, random(torch.bfloat16))) == []
    backwards = softmax.backwards

    def odd(q_TGQD: torch.Tensor, *more) -> torch.Tensor:
        return backwards(q_TGQD, *more) * (1 + len(q_TGQD) % 2)

    monkeypatch.setattr(softmax, "backwards", odd)
    named = list(beginnings.broken_attention(2, 2, 16, random(torch.float32)))
    assert named == [f"attention at the first {n} rows" for n in (1, 7, 31, 63)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 1, 40), (1, 3, 56), (4, 1, 80), (2, 1, 24), (2, 2, 64)], ids=str)
def test_queries_of_any_width_have_bits_at_any_place(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    of = random(dtype)
    assert not [name for _ in range(4) for name in beginnings.broken_attention(*shape, of)]
