"""The chunked recurrence and the decode step against the token-by-token one, where decays are at their extremes."""

from __future__ import annotations

import pytest
import torch

from headwater.mixers.gla import decayed_by_channel, decode_step, prepare
from headwater.mixers.slices import CHUNK

CHUNKS, HEADS, KEYS, VALUES = 3, 3, 16, 40
LENGTH = CHUNKS * CHUNK
FLUSHED = torch.finfo(torch.float32).tiny  # smaller numbers are zero, here as in the server
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(gate: float | None = None, burst: float = 1.0) -> Inputs:
    """Random queries and keys [T, 2, H, K], values, and log decays [T, H, K].

    Every seventh token's decays in every other channel are `burst` times as strong.
    """
    generator = torch.Generator().manual_seed(0)
    qk_T2HK = torch.randn(LENGTH, 2, HEADS, KEYS, generator=generator)
    v_THV = torch.randn(LENGTH, HEADS, VALUES, generator=generator)
    g_THK = -torch.rand(LENGTH, HEADS, KEYS, generator=generator)
    g_THK[::7, :, ::2] *= burst
    return qk_T2HK, v_THV, g_THK if gate is None else torch.full_like(g_THK, gate)


def exact(given: Inputs, state_HKV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    qk_T2HK, v_THV, g_THK = (t.double() for t in given)
    return decayed_by_channel(qk_T2HK[:, 0] * KEYS**-0.5, qk_T2HK[:, 1], v_THV, g_THK, state_HKV.double())


def chunked(given: Inputs, state_HKV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    chunks = prepare(*(t.unflatten(0, (CHUNKS, CHUNK)) for t in given))
    state_HKV, outs = state_HKV.clone(), []
    for i in range(CHUNKS):
        outs.append(torch.empty(HEADS, CHUNK, VALUES))
        chunks.advance_into(slice(i * HEADS, (i + 1) * HEADS), state_HKV, outs[-1])
    return torch.cat(outs, 1).transpose(0, 1), state_HKV


def decoded(given: Inputs, state_HKV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    state_1HKV = state_HKV[None].clone()
    outs = [decode_step(*row, state_1HKV) for row in zip(*(t.split(1) for t in given), strict=True)]
    return torch.cat(outs), state_1HKV[0]


EXTREMES = {
    "ordinary": {},
    "state forgotten at once": {"gate": -200.0},
    "sums of decays below all floats": {"gate": -3e38},
    "forgetting in bursts far stronger than what is between": {"burst": 1e30},
    "nothing forgotten": {"gate": 0.0},
    "next to nothing forgotten": {"gate": -1e-7},
}


@pytest.mark.parametrize("run", [chunked, decoded])
@pytest.mark.parametrize("extreme", EXTREMES)
def test_extreme_decays_by_channel_stay_within_1e_5_of_float64(run, extreme: str) -> None:
    given = inputs(**EXTREMES[extreme])
    state_HKV = torch.randn(HEADS, KEYS, VALUES, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        got = run(given, state_HKV)
    for fast, wanted in zip(got, exact(given, state_HKV), strict=True):
        assert fast.isfinite().all()
        assert (fast - wanted).abs().max() <= max(1e-5 * wanted.abs().max(), FLUSHED)


def test_padding_without_decay_and_keys_keeps_the_states_bits() -> None:
    qk_T2HK, v_THV, g_THK = inputs(gate=0.0)
    state_HKV = torch.randn(HEADS, KEYS, VALUES)
    _, after_HKV = chunked((torch.zeros_like(qk_T2HK), v_THV, g_THK), state_HKV)
    assert torch.equal(after_HKV, state_HKV)


def test_chunks_prepared_together_or_apart_have_the_same_bits() -> None:
    given = [t.unflatten(0, (CHUNKS, CHUNK)) for t in inputs()]
    together = prepare(*given)
    for i in range(CHUNKS):
        apart = prepare(*(t[i : i + 1] for t in given))
        for name in ("read_MtK", "within_MtV", "write_MtK", "value_MtV", "decay_MK1"):
            heads = getattr(together, name)[i * HEADS : (i + 1) * HEADS]
            assert torch.equal(heads, getattr(apart, name)), name


def test_sequence_decodes_to_the_same_bits_by_itself_and_among_others() -> None:
    n, heads, keys, values = 16, 3, 128, 200
    generator = torch.Generator().manual_seed(2)
    qk_B2HK = torch.randn(n, 2, heads, keys, generator=generator)
    v_BHV = torch.randn(n, heads, values, generator=generator)
    g_BHK = -torch.rand(n, heads, keys, generator=generator)
    state_BHKV = torch.randn(n, heads, keys, values, generator=generator)
    together_BHKV = state_BHKV.clone()
    out_BHV = decode_step(qk_B2HK, v_BHV, g_BHK, together_BHKV)
    for b in range(n):
        one = slice(b, b + 1)
        alone_1HKV = state_BHKV[one].clone()
        assert torch.equal(decode_step(qk_B2HK[one], v_BHV[one], g_BHK[one], alone_1HKV)[0], out_BHV[b])
        assert torch.equal(alone_1HKV[0], together_BHKV[b])
