"""Attention over latents by kernels: beside torch's, and in bits that depend on a row's own sequence alone."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba", reason="numba is not installed")

from headwater.kernels import attention
from headwater.layers.attention import Rotary
from headwater.layers.mla import LatentAttention
from headwater.mixers.batch import Slice
from headwater.mixers.cpu.attention import AttentionStepOnCpu
from headwater.mixers.cpu.mla import LatentAttentionOnCpu, latent_attention_of
from headwater.mixers.mla import LatentAttentionMixer
from headwater.mixers.weights import Weights
from tests.mixers.mla.test_latent_attention import KIMI, WIDTH, Rig

LENGTHS = (1, 5, 64, 65, 128, 129, 300, 513)
SHAPES = (
    LatentAttention(WIDTH, heads=5, latent=48, nope_dim=24, rope_dim=16, v_dim=24),
    LatentAttention(WIDTH, heads=9, latent=32, nope_dim=16, rope_dim=16, v_dim=8, rotary=Rotary(16), gated=True),
)


class KernelRig(Rig):
    """The same layer with kernels."""

    def __init__(self, shape, dtype="float32"):
        super().__init__(shape, dtype)
        self.layer = LatentAttentionOnCpu(0, shape, Weights(self.weights, self.dtype))
        self.steps = AttentionStepOnCpu


def rows_of(rig, seed=0):
    """Prefill sequences but for their last tokens; return the rows that remain."""
    pages, rows = torch.randperm(64, generator=torch.Generator().manual_seed(seed)).tolist(), []
    for length in LENGTHS:
        table = torch.tensor([pages.pop() for _ in range(-(-length // 64))])
        if length > 1:
            rig.run([Slice(0, length - 1, 0, 0, table, 0)], [], rig.x[: length - 1])
        rows.append((length - 1, table))
    return rows


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 3e-5), ("bfloat16", 0.1)])
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_is_as_torchs(shape, dtype, tolerance):
    by_torch, by_kernels = Rig(shape, dtype), KernelRig(shape, dtype)
    wanted, got = (rig.run([], rows_of(rig), rig.x[: len(LENGTHS)]) for rig in (by_torch, by_kernels))
    assert not got.isnan().any()
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def test_company_order_and_places_of_pages_change_no_bit(monkeypatch):
    rig, n = KernelRig(SHAPES[1]), len(LENGTHS)
    rows, x = rows_of(rig), rig.x[:n]
    together = rig.run([], rows, x)

    def apart():
        return torch.cat([rig.run([], rows[at], x[at]) for at in (slice(0, 1), slice(1, 3), slice(3, n))])

    assert torch.equal(apart(), together)
    assert torch.equal(rig.run([], rows[::-1], x.flip(0)).flip(0), together)
    assert torch.equal(rig.run([], rows_of(rig, seed=1), x), together)
    attend = attention.attend
    monkeypatch.setattr(attention, "attend", lambda q, *args: attend(q * (1 + 1e-6 * (len(args[3]) == 2)), *args))
    assert not torch.equal(apart(), together)


@pytest.mark.parametrize("of", [Rig, KernelRig])
def test_tokens_of_a_sequence_in_one_step_have_the_bits_of_one_after_the_other(of):
    rig = of(SHAPES[1])
    table = rows_of(rig)[6][1]
    rows = [(LENGTHS[6] - 10 + i, table) for i in range(7)]
    in_turn = torch.cat([rig.run([], [row], rig.x[i : i + 1]) for i, row in enumerate(rows)])
    assert torch.equal(rig.run([], rows, rig.x[:7]), in_turn)


def test_latents_that_are_no_whole_vectors_are_left_to_torch():
    rig = Rig(KIMI)
    assert type(latent_attention_of(0, KIMI, Weights(rig.weights))) is LatentAttentionMixer
