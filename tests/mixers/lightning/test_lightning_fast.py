"""Chunks and decode steps against the token-by-token recurrence, where decays are at their extremes."""

import pytest
import torch

from headwater.layers.lightning import alibi_slopes, geometric_slopes
from headwater.mixers.lightning import Decays, decode_step, fixed_decay, prepare
from headwater.mixers.slices import CHUNK

HEADS, WIDTH, LENGTH, SCALE = 4, 24, 170, 24**-0.5
EXTREMES = {
    "ordinary": alibi_slopes(HEADS),
    "nothing forgotten": [0.0] * HEADS,
    "next to nothing forgotten": [1e-9, 1e-7, 1e-6, 1e-5],
    "forgotten within a chunk": [1.0, 2.0, 5.0, 20.0],
    "forgotten at once": [90.0, 200.0, 1e5, 1e30],
}
FLUSHED = torch.finfo(torch.float32).tiny  # smaller numbers are flushed to zero, here as in the server


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Queries, keys and values [T, 3, H, K], and a state."""
    generator = torch.Generator().manual_seed(0)
    qkv_T3HK = torch.randn(LENGTH, 3, HEADS, WIDTH, generator=generator)
    return qkv_T3HK, torch.randn(HEADS, WIDTH, WIDTH, generator=generator)


def chunked(qkv_T3HK: torch.Tensor, decays: Decays, state_HKK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All chunks prepared at once; zeros fill up the last one."""
    lengths = [min(CHUNK, LENGTH - first) for first in range(0, LENGTH, CHUNK)]
    filled = torch.zeros(len(lengths) * CHUNK, *qkv_T3HK.shape[1:])
    filled[:LENGTH] = qkv_T3HK
    chunks = prepare(filled.unflatten(0, (-1, CHUNK)), torch.tensor(lengths), decays)
    state_HKK, outs = state_HKK.clone(), []
    for i in range(len(lengths)):
        outs.append(torch.empty(HEADS, CHUNK, WIDTH))
        chunks.advance_into(slice(i * HEADS, (i + 1) * HEADS), state_HKK, outs[-1])
    return torch.cat(outs, 1).transpose(0, 1)[:LENGTH], state_HKK


def decoded(qkv_T3HK: torch.Tensor, decays: Decays, state_HKK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    state_1HKK = state_HKK[None].clone()
    outs = [decode_step(qkv_T3HK[t : t + 1], decays, state_1HKK) for t in range(LENGTH)]
    return torch.cat(outs), state_1HKK[0]


@pytest.mark.parametrize("run", [chunked, decoded])
@pytest.mark.parametrize("extreme", EXTREMES)
def test_extreme_decays_stay_within_1e_5_of_float64(run, extreme: str) -> None:
    qkv_T3HK, state_HKK = inputs()
    slope_H = torch.tensor(EXTREMES[extreme], dtype=torch.float64)
    q_THK, k_THK, v_THK = qkv_T3HK.double().unbind(1)
    wanted = fixed_decay(q_THK * SCALE, k_THK, v_THK, slope_H, state_HKK.double())
    for got, exact in zip(run(qkv_T3HK, Decays.of(slope_H, SCALE), state_HKK), wanted, strict=True):
        assert got.isfinite().all()
        assert (got - exact).abs().max() <= max(1e-5 * exact.abs().max(), FLUSHED)


def test_a_chunk_without_tokens_leaves_the_state_bit_for_bit() -> None:
    _, state_HKK = inputs()
    decays = Decays.of(torch.tensor(alibi_slopes(HEADS)), 1.0)
    chunks = prepare(torch.zeros(1, CHUNK, 3, HEADS, WIDTH), torch.tensor([0]), decays)
    after_HKK = state_HKK.clone()
    chunks.advance_into(slice(0, HEADS), after_HKK, torch.empty(HEADS, CHUNK, WIDTH))
    assert torch.equal(after_HKK, state_HKK)
    assert torch.equal(chunks.decay_nH, torch.ones(1, HEADS))


def test_no_power_of_a_decay_is_above_one() -> None:
    for slopes in EXTREMES.values():
        decays = Decays.of(torch.tensor(slopes), 1.0)
        for power in (decays.power_PH, decays.attend_Htt, decays.read_Ht1):
            assert ((power >= 0) & (power <= 1)).all()


def test_slopes_are_alibis() -> None:
    """Press et al. 2022: 1/2 … 1/256 for 8 heads, and for 16 the geometric means between them as well."""
    assert geometric_slopes(8) == alibi_slopes(8) == [2.0**-n for n in range(1, 9)]
    assert alibi_slopes(16) == pytest.approx([2 ** (-n / 2) for n in range(1, 17)])
    assert alibi_slopes(12) == pytest.approx([*(2.0**-n for n in range(1, 9)), *(2 ** -(n + 0.5) for n in range(4))])
    assert alibi_slopes(1) == [2.0**-8]
