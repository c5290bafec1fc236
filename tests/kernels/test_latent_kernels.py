"""Attention over latents by kernels: close to torch's, with bits that depend only on a row's own sequence."""

import pytest
import torch

pytest.importorskip("numba", reason="numba is not installed")

from headwater.kernels import attention
from headwater.layers.attention import Rotary
from headwater.layers.mla import LatentAttention
from headwater.memory.arena import Arena
from headwater.mixers.cpu.attention import AttentionStepOnCpu, LatentAttentionOnCpu, latent_attention_of
from headwater.mixers.mla import LatentAttentionMixer
from headwater.mixers.slices import Slice
from headwater.mixers.weights import Weights
from tests.mixers.mla.test_latent_attention import KIMI, WIDTH, Rig

LENGTHS = (1, 5, 64, 65, 128, 129, 300, 513)
SHAPES = (
    LatentAttention(WIDTH, heads=5, latent=48, nope_dim=24, rope_dim=16, v_dim=24, scale=0.3),
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


def test_rows_in_groups_whose_scratch_is_small_have_the_same_bits(monkeypatch):
    rig, groups, attend = KernelRig(SHAPES[1]), [], attention.attend
    rows, x = rows_of(rig), rig.x[: len(LENGTHS)]
    together = rig.run([], rows, x)
    monkeypatch.setattr("headwater.mixers.cpu.attention.SCRATCH_BYTES", 1)
    monkeypatch.setattr(attention, "attend", lambda *args: (groups.append(len(args[4])), attend(*args)))
    assert torch.equal(rig.run([], rows, x), together)
    assert groups == [1] * len(LENGTHS)


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


FIRST, TOKENS = 62, 7  # tokens of a sequence of 300, across the end of a page


def tokens_of_one_sequence(rig, steps):
    """Decode tokens of a sequence, these together in each step; return what they read, and the sequence's rows.

    The rows from the first token on hold NaN before: they are not yet written.
    """
    table = rows_of(rig)[6][1]
    (pages,) = rig.arena.pages_of(0)
    of_sequence = pages.unflatten(1, (64, -1))
    for position in range(FIRST, LENGTHS[6]):
        of_sequence[table[position // 64], position % 64] = torch.nan
    reads = [rig.run([], [(FIRST + i, table) for i in rows], rig.x[rows]) for rows in steps]
    return torch.cat(reads), of_sequence[table].flatten(0, 1)[: FIRST + TOKENS]


AT_ONCE = [[*range(TOKENS)]]
IN_TURN = [[row] for row in range(TOKENS)]


@pytest.mark.parametrize("of", [Rig, KernelRig])
def test_latent_attention_of_several_tokens_in_one_step_equals_them_in_turn(of):
    rig = of(SHAPES[1])
    at_once, in_two = (tokens_of_one_sequence(rig, steps) for steps in (AT_ONCE, [[0, 1, 2], [3, 4, 5, 6]]))
    in_turn = tokens_of_one_sequence(rig, IN_TURN)
    assert all(map(torch.equal, at_once, in_turn))
    assert all(map(torch.equal, in_two, in_turn))


@pytest.mark.parametrize("of", [Rig, KernelRig])
@pytest.mark.parametrize("written", [[0, 1, 2, 3, 4, 6], [1, 0, 2, 3, 4, 5, 6]], ids=["one missing", "two exchanged"])
def test_wrong_rows_of_a_sequence_in_one_step_are_found(of, written, monkeypatch):
    """The control of the test above."""
    rig, write = of(SHAPES[1]), Arena.write

    def wrong(arena, layer, page_W, offset_W, latent_WX):
        if len(page_W) == TOKENS:
            of = sorted(written)
            page_W, offset_W, latent_WX = page_W[of], offset_W[of], latent_WX[written]
        write(arena, layer, page_W, offset_W, latent_WX)

    in_turn = tokens_of_one_sequence(rig, IN_TURN)
    monkeypatch.setattr(Arena, "write", wrong)
    at_once = tokens_of_one_sequence(rig, AT_ONCE)
    assert not any(map(torch.equal, at_once, in_turn))


def test_latents_that_are_not_whole_vectors_are_computed_by_torch():
    rig = Rig(KIMI)
    assert type(latent_attention_of(0, KIMI, Weights(rig.weights))) is LatentAttentionMixer
