"""Requests that are composed of segments, against those that are computed from the first token on.

Composing is exact for one layer. So it is for a model of one block, at any position, and for a segment with which a
request begins, whatever the model.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headwater.layers.architecture import Architecture, Block, Part
from headwater.layers.attention import GroupedAttention, Rotary, WindowAttention
from headwater.layers.layer import Layer
from headwater.layers.mla import LatentAttention
from headwater.layers.rotary_scaling import Yarn
from headwater.mixers.slices import Slice
from headwater.models.build import build_model
from headwater.models.hybrid import HybridModel
from headwater.models.load import load_model
from headwater.models.tensors import CheckpointTensors
from headwater.spec import ModelSpec
from tests.checkpoints import SMALLEST
from tests.checkpoints.tokenizer import VOCAB
from tests.contract.recurrences import RECURRENCES, Case
from tests.contract.recurrences.case import WIDTH
from tests.models.segment_rig import SegmentRig

GROUPED = GroupedAttention(WIDTH, 4, 2, 16, rotary=Rotary(8))
LATENT = LatentAttention(WIDTH, heads=3, latent=24, nope_dim=16, rope_dim=8, v_dim=16)
ATTENTION = {
    "partly rotated": GROUPED,
    "all rotated, normed": replace(GROUPED, rotary=Rotary(16, 1e6), normed=True, gated=True),
    "scaled, of another amplitude": replace(GROUPED, rotary=Rotary(16, scaling=Yarn(4.0, 256), amplitude=1.2)),
    "neighbours": replace(GROUPED, rotary=Rotary(12, neighbours=True)),
    "no positions": replace(GROUPED, rotary=None),
    "latent": LATENT,
    "latent, rotated": replace(LATENT, rotary=Rotary(8)),
    "latent, neighbours": replace(LATENT, rotary=Rotary(8, neighbours=True), gated=True),
    "a window below interiors": WindowAttention.of(replace(GROUPED, rotary=Rotary(16)), 20),
    "a window as an interior": WindowAttention.of(GROUPED, 33),
    "a window across segments": WindowAttention.of(replace(GROUPED, rotary=Rotary(12, neighbours=True)), 150),
    "a window of all tokens, no positions": WindowAttention.of(replace(GROUPED, rotary=None), 400),
}
RECURRENT = {kind: next(iter(recurrence.shapes.values())) for kind, recurrence in RECURRENCES.items()}
RECURRENT["lightning, rotated"] = RECURRENCES["lightning"].shapes["ring"]
WINDOWS = ("qwen3_window", "qwen3_windows_only", "qwen3_window_odd_heads", "qwen3_moe_window")  # 100, 192, 37, 100
PAIRS = [
    *((kind, "partly rotated") for kind in RECURRENT),
    *(("gated_delta_net", form) for form in ATTENTION if form != "partly rotated"),
]


def one_block(folder: Path, recurrent: Layer, attention: Layer) -> HybridModel:
    """A model whose one block has both layers in parallel."""
    block = Block("norms.0.weight", (Part(recurrent, "recurrent"), Part(attention, "attention")))
    spec = ModelSpec.of(Architecture("test", VOCAB, WIDTH, (block,), 4096, 1e-6), "float32")
    generator = torch.Generator().manual_seed(0)
    recurrence = next(r for r in RECURRENCES.values() if type(recurrent) in map(type, r.shapes.values()))
    tensors = {f"recurrent.{name}": tensor for name, tensor in Case(recurrent, recurrence).tensors().items()}
    for name, shape in attention.tensors().items():
        tensors[f"attention.{name}"] = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    tensors |= {name: torch.ones(WIDTH) for name in ("norms.0.weight", "norm.weight")}
    tensors["embed_tokens.weight"] = torch.randn(VOCAB, WIDTH, generator=generator)
    head = torch.randn(VOCAB, WIDTH, generator=generator)
    save_file(
        {**{f"model.{name}": tensor for name, tensor in tensors.items()}, "lm_head.weight": head},
        folder / "model.safetensors",
    )
    return build_model(spec, CheckpointTensors(folder, torch.float32, torch.device("cpu")))


def text(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    assert got.isfinite().all(), "read what was never written"
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())


@pytest.mark.parametrize(("kind", "form"), PAIRS)
@pytest.mark.parametrize("split", [False, True], ids=["one step", "a step for each run"])
def test_a_block_composed_at_any_position_is_that_of_one_pass(
    kind: str, form: str, split: bool, tmp_path: Path
) -> None:
    """Segments in other orders and at other places than they were made at, and one of them twice."""
    rig = SegmentRig(one_block(tmp_path, RECURRENT[kind], ATTENTION[form]))
    first, second = rig.make(text(116, 1)), rig.make(text(49, 2))
    parts = [text(37, 3), second, first, text(5, 4), second, text(40, 5)]
    tokens = [token for part in parts for token in getattr(part, "tokens", part)]
    plain = rig.sequence(len(tokens))
    wanted = rig.prefill(plain, tokens)
    composed, logits = rig.compose(parts, split)
    assert len(logits) == len(tokens) - (100 + 2 * 33)
    assert error(torch.stack(list(logits.values())), wanted[list(logits)]) < 1e-5
    assert error(rig.state(composed, 0), rig.state(plain, 0)) < 1e-5
    assert error(rig.kept(composed, 1), rig.kept(plain, 1)) < 1e-5


@pytest.mark.parametrize("name", [*SMALLEST.values(), "granite_rope", "kimi_linear_groups", *WINDOWS])
def test_a_request_that_begins_with_a_segment_is_that_of_one_pass(name: str, checkpoint: Callable[[str], Path]) -> None:
    """All layers, and decoded tokens."""
    rig = SegmentRig(load_model(checkpoint(name), "float32").model)
    parts = [rig.make(text(150, 1)), text(60, 2)]
    tokens = [*parts[0].tokens, *parts[1]]
    plain = rig.sequence(len(tokens) + 8)
    wanted = rig.prefill(plain, tokens)
    composed, logits = rig.compose(parts)
    assert (torch.stack(list(logits.values())) - wanted[list(logits)]).abs().max() < 1e-4
    for layer in rig.model.mixers.recurrent:
        assert error(rig.state(composed, layer), rig.state(plain, layer)) < 1e-4
    for layer in (*rig.model.mixers.attention, *rig.model.mixers.windows):
        assert error(rig.kept(composed, layer), rig.kept(plain, layer)) < 1e-4
    assert rig.greedy(composed, logits[len(tokens) - 1], 4) == rig.greedy(plain, wanted[-1], 4)


@pytest.mark.parametrize("name", [*SMALLEST.values(), *WINDOWS])
def test_the_first_layers_are_those_of_one_pass_at_any_position(name: str, checkpoint: Callable[[str], Path]) -> None:
    """Compare states and KV of the first layers, whose inputs depend only on the tokens."""
    rig = SegmentRig(load_model(checkpoint(name), "float32").model)
    parts = [text(37, 1), rig.make(text(150, 2)), text(60, 3)]
    tokens = [*parts[0], *parts[1].tokens, *parts[2]]
    plain = rig.sequence(len(tokens))
    rig.prefill(plain, tokens)
    composed, _ = rig.compose(parts)
    mixers, first = rig.model.mixers, len(rig.model.spec.blocks[0].parts)
    held = [layer for layer in (*mixers.recurrent, *mixers.attention, *mixers.windows) if layer < first]
    assert held
    for layer in held:
        read = rig.state if layer in mixers.recurrent else rig.kept
        assert error(read(composed, layer), read(plain, layer)) < 1e-5


@pytest.mark.parametrize("name", [*SMALLEST.values(), *WINDOWS])
def test_prompt_of_only_seams_equals_one_pass(name: str, checkpoint: Callable[[str], Path]) -> None:
    """Slices of one slot in one step, which begin at any position."""
    rig = SegmentRig(load_model(checkpoint(name), "float32").model)
    tokens = text(150, 1)
    wanted = rig.prefill(rig.sequence(150), tokens)
    sequence = rig.sequence(150)
    slices = (Slice(a, b - a, a, sequence.slot, sequence.table, 0) for a, b in pairwise((0, 8, 46, 63, 64, 150)))
    assert (rig.run(tokens, tuple(slices)) - wanted).abs().max() < 1e-4


def test_transitions_are_laid_out_as_mixers_have_them(tmp_path: Path) -> None:
    for kind, layer in RECURRENT.items():
        folder = tmp_path / kind
        folder.mkdir()
        model = one_block(folder, layer, GROUPED)
        (part,) = model.spec.transition.parts
        identity = model.mixers.recurrent[0].identity()
        assert (part.layer, part.name, part.dtype_name) == (0, "transition", "float32")
        assert (part.shape, torch.float32) == (tuple(identity.shape), identity.dtype)
