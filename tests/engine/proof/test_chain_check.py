"""The self-check of several rows of one sequence finds every layer exact, and names one that is not."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="numba is not installed")

from headwater import kernels
from headwater.draft.drafter import MOST_DRAFTS
from headwater.engine.proof.chain_check import ACCEPTED, ROWS, SEQUENCES, SPLIT, broken_chains, kept_layers
from headwater.engine.proof.selfcheck import self_check
from headwater.kernels import attention as attention_kernels
from headwater.layers.attention import GroupedAttention, Rotary, WindowAttention
from headwater.layers.feed_forward import Mlp
from headwater.layers.gdn import DeltaNet
from headwater.layers.kda import DeltaAttention
from headwater.layers.layer import Layer
from headwater.layers.lightning import Lightning
from headwater.layers.mamba import Mamba
from headwater.layers.mamba2 import Mamba2
from headwater.layers.mla import LatentAttention
from headwater.memory.arena import Arena
from headwater.mixers import attention, numerics, softmax
from headwater.mixers.batch import StepBatch, WithAccepted
from headwater.mixers.cpu.recurrent import GatedDeltaNetKernel
from headwater.mixers.linear import guarded_modes
from tests.engine.proof.test_selfcheck import spec

WIDE = 32
LAYERS = {
    "gated delta net": DeltaNet(WIDE, 2, 4, 16, 24, 4),
    "delta attention": DeltaAttention(WIDE, heads=3, head_dim=24, conv=4),
    "lightning": Lightning(WIDE, 2, 16, (0.1, 0.02), rotary=Rotary(8)),
    "mamba": Mamba(WIDE, inner=24, state=8, conv=4, step_rank=6),
    "mamba2": Mamba2(WIDE, heads=4, head_dim=16, state=24, groups=2, conv=4),
    "attention": GroupedAttention(WIDE, 4, 2, 16, gated=True, normed=True, rotary=Rotary(8)),
    "attention, odd": GroupedAttention(WIDE, 3, 1, 20, rotary=Rotary(10)),
    "window": WindowAttention(WIDE, 4, 2, 16, rotary=Rotary(8), window=20),
    "window, odd": WindowAttention(WIDE, 3, 1, 20, window=7),
    "window, wide": WindowAttention(WIDE, 2, 1, 16, window=3000),
    "window of one": WindowAttention(WIDE, 2, 2, 16, window=1),
    "latents": LatentAttention(WIDE, heads=4, latent=32, nope_dim=16, rope_dim=16, v_dim=16, rotary=Rotary(16)),
    "latents, odd": LatentAttention(WIDE, heads=5, latent=20, nope_dim=12, rope_dim=6, v_dim=10),
}
AT_ONCE = f"at {SEQUENCES[0]} rows of a sequence"
DRAFTED = [f"at {MOST_DRAFTS} drafts of a sequence, of which {most} are accepted" for most in ACCEPTED]
WITH_DRAFTS = len(ROWS) - 2  # rows of the step that has drafts: all but the last ones of two sequences


def found(layer: Layer, dtype: str = "float32") -> list[str]:
    """Return the names that the check has for a layer, without its kind."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(getattr(torch, dtype))

    named = broken_chains(layer, spec(dtype), random, "cpu", guarded_modes()[0])
    return [name.removeprefix(f"{layer.kind} ") for name in named]


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.full)], ids=["kernels", "torch"])
def _computed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(kernels, "available", lambda: False)


@pytest.mark.usefixtures("_computed_by")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_is_found_exact(name: str, dtype: str) -> None:
    before = numerics.current()
    assert found(LAYERS[name], dtype) == []
    assert numerics.current() is before


def changed_sequences(change: Callable[[StepBatch, Any], Any]) -> property:
    whole = StepBatch.decode_sequences.func
    return property(lambda batch: change(batch, whole(batch)))


def test_a_state_that_is_promoted_one_row_too_far_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_too_far(batch: StepBatch, sequences: tuple[Any, ...]) -> tuple[Any, ...]:
        slots, firsts, drafts = sequences
        return slots, firsts, np.minimum(drafts + 1, firsts[1:])

    monkeypatch.setattr(StepBatch, "decode_sequences", changed_sequences(one_too_far))
    assert found(LAYERS["gated delta net"]) == DRAFTED


def test_rows_that_read_the_state_before_the_step_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last row advances the state."""

    def each_its_own(batch: StepBatch, sequences: tuple[Any, ...]) -> tuple[Any, ...]:
        rows, slots = np.arange(batch.n_decode + 1), batch.decode_slot_B.numpy()
        last_of_slot = np.append(slots[1:] != slots[:-1], True)
        return slots, rows, rows[:-1] + last_of_slot

    monkeypatch.setattr(StepBatch, "check_slots", lambda batch: None)
    monkeypatch.setattr(StepBatch, "decode_sequences", changed_sequences(each_its_own))
    assert AT_ONCE in found(LAYERS["mamba2"])


def test_a_ring_that_is_written_first_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepBatch, "decode_parts", property(lambda batch: ((batch.decode_rows, batch),)))
    monkeypatch.setattr(StepBatch, "check_slots", lambda batch: None)
    assert found(LAYERS["window"]) == [AT_ONCE, *DRAFTED]


@pytest.mark.parametrize("name", ["attention", "attention, odd"])
def test_a_row_that_sees_later_keys_of_its_sequence_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attend, lengths = attention_kernels.attend, StepBatch.decode_lengths.func

    def seeing_all(q: Any, keys: Any, values: Any, tables: Any, positions: Any, *others: Any) -> None:
        attend(q, keys, values, tables, positions + (len(positions) > 1), *others)

    monkeypatch.setattr(attention_kernels, "attend", seeing_all)
    monkeypatch.setattr(
        StepBatch, "decode_lengths", property(lambda batch: [n + (batch.n_decode > 1 < n % 64) for n in lengths(batch)])
    )
    assert AT_ONCE in found(LAYERS[name])


@pytest.mark.parametrize("name", ["attention", "attention, odd", "latents", "latents, odd"])
def test_row_that_misses_the_first_key_of_a_split_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row whose own key begins a split does not see it, if it is computed with others."""
    attend, batches = attention_kernels.attend, attention.paged_batches
    assert SPLIT % attention_kernels.SPLIT == SPLIT % softmax.KEYS == 0

    def without_it(q: Any, keys: Any, values: Any, tables: Any, positions: Any, *others: Any) -> None:
        unseen = (len(positions) > 1) & (positions % attention_kernels.SPLIT == 0)
        attend(q, keys, values, tables, positions - unseen, *others)

    def shortened(lengths: list[int], *others: Any) -> Any:
        return batches([n - (len(lengths) > 1 == n % softmax.KEYS) for n in lengths], *others)

    monkeypatch.setattr(attention_kernels, "attend", without_it)
    monkeypatch.setattr(attention, "paged_batches", shortened)
    assert AT_ONCE in found(LAYERS[name])


@pytest.mark.parametrize("name", ["gated delta net", "lightning"])
def test_a_rejected_draft_that_is_replayed_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step after one without accepted drafts uses the first draft's inputs instead of its own."""
    copies = WithAccepted.copies.func

    def of_drafts(whole: WithAccepted) -> tuple[Any, Any]:
        sources, keeps = copies(whole)
        own, slots = whole.own_B.tolist(), whole.batch.decode_slot_B.tolist()
        for row in own if not len(whole.drafts.row_A) else ():
            if row == 0 or slots[row] != slots[row - 1]:
                sources[row] = -1 - slots[row] * MOST_DRAFTS
        return sources, keeps

    monkeypatch.setattr(WithAccepted, "copies", property(of_drafts))
    assert found(LAYERS[name]) == DRAFTED[:1]


@pytest.mark.parametrize("name", ["attention, odd", "latents", "latents, odd"])
def test_keys_of_rejected_drafts_that_are_not_overwritten_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write, of_drafts = Arena.write, set[tuple[int, int]]()

    def once(self: Arena, layer: int, page_W: torch.Tensor, offset_W: torch.Tensor, *rows_WX: torch.Tensor) -> None:
        places = list(zip(page_W.tolist(), offset_W.tolist(), strict=True))
        if len(places) == WITH_DRAFTS:
            of_drafts.update(places)
        elif 1 < len(places) < WITH_DRAFTS:
            new_W = torch.tensor([place not in of_drafts for place in places])
            page_W, offset_W, *rows_WX = (x_W[new_W] for x_W in (page_W, offset_W, *rows_WX))
        write(self, layer, page_W, offset_W, *rows_WX)

    monkeypatch.setattr(Arena, "write", once)
    assert found(LAYERS[name]) == DRAFTED[:-1]


def test_the_last_of_all_drafts_that_is_not_kept_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before it is replayed in its place: the other counts of accepted drafts do not show it."""
    copies = WithAccepted.copies.func

    def without_last(whole: WithAccepted) -> tuple[Any, Any]:
        sources, keeps = copies(whole)
        last = sources == -MOST_DRAFTS  # of the first slot
        return sources + last, keeps

    monkeypatch.setattr(WithAccepted, "copies", property(without_last))
    assert found(LAYERS["gated delta net"]) == DRAFTED[-1:]


def test_layers_of_equal_shapes_and_other_heads_are_all_checked() -> None:
    layers: list[Layer] = [
        GroupedAttention(WIDE, 4, 2, 16),
        GroupedAttention(WIDE, 2, 1, 32),
        GroupedAttention(WIDE, 4, 2, 16, rotary=Rotary(8)),
        GroupedAttention(WIDE, 4, 2, 16, rotary=Rotary(8, neighbours=True)),
        Mamba2(WIDE, heads=4, head_dim=16, state=24, groups=2, conv=4),
        Mamba2(WIDE, heads=4, head_dim=16, state=24, groups=2, conv=4, norm_first=True),
    ]
    assert layers[0].tensors() == layers[1].tensors()
    assert set(kept_layers(layers)) == set(layers)


def test_layers_that_differ_only_in_decays_are_checked_once() -> None:
    slower = Lightning(WIDE, 2, 16, (0.01, 0.002), rotary=Rotary(8))
    kept = kept_layers([*LAYERS.values(), slower, Mlp(WIDE, 48)])
    assert len(kept) == len(LAYERS)
    assert not any(isinstance(layer, Mlp) for layer in kept)


def test_the_self_check_of_a_model_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that changes the last of many rows: fewer rows are checked only with the kernels."""
    whole = GatedDeltaNetKernel.decode_into

    def changed(self: GatedDeltaNetKernel, out_BX: torch.Tensor, products: Any, batch: StepBatch, memory: Any) -> None:
        whole(self, out_BX, products, batch, memory)
        if len(out_BX) > 7:
            out_BX[-1] += 1e-6

    monkeypatch.setattr(GatedDeltaNetKernel, "decode_into", changed)
    check = self_check(spec())
    assert check.broken_by == f"gated_delta_net {AT_ONCE}"
    assert not check.deterministic
