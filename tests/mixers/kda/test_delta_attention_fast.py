"""The chunked rule and the decode step against the token-by-token one, where gates and keys are at their extremes."""

from __future__ import annotations

import pytest
import torch

from headwater.mixers.gdn import decode_step, delta_rule
from headwater.mixers.kda import prepare
from headwater.mixers.slices import CHUNK

CHUNKS, HEADS, WIDTH = 3, 3, 32
LENGTH = CHUNKS * CHUNK
FLUSHED = torch.finfo(torch.float32).tiny  # smaller numbers are zero, here as in the server
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(gate: float | None = None, strength: float | None = None, spread: float = 1.0, burst: float = 1.0) -> Inputs:
    """Random queries and keys [T, 2, H, K], values, log decays [T, H, K], writing strengths; keys differ by `spread`.

    Every seventh token's decays in every other channel are `burst` times as strong.
    """
    generator = torch.Generator().manual_seed(0)
    qk_T2HK = torch.randn(LENGTH, 2, HEADS, WIDTH, generator=generator)
    qk_T2HK[:, 1] = qk_T2HK[:1, 1] + spread * (qk_T2HK[:, 1] - qk_T2HK[:1, 1])
    v_THV = torch.randn(LENGTH, HEADS, WIDTH, generator=generator)
    g_THK = -torch.rand(LENGTH, HEADS, WIDTH, generator=generator)
    beta_TH = torch.rand(LENGTH, HEADS, generator=generator)
    g_THK[::7, :, ::2] *= burst
    g_THK = g_THK if gate is None else torch.full_like(g_THK, gate)
    return qk_T2HK, v_THV, g_THK, beta_TH if strength is None else torch.full_like(beta_TH, strength)


def exact(given: Inputs, state_HKV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    qk_T2HK, v_THV, g_THK, beta_TH = (t.double() for t in given)
    q_THK, k_THK = (qk_T2HK / (qk_T2HK.square().sum(-1, keepdim=True) + 1e-6).sqrt()).unbind(1)
    return delta_rule(q_THK * WIDTH**-0.5, k_THK, v_THV, g_THK, beta_TH, state_HKV.double())


def chunked(given: Inputs, state_HKV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    chunks = prepare(*(t.unflatten(0, (CHUNKS, CHUNK)) for t in given))
    state_HKV, outs = state_HKV.clone(), []
    for i in range(CHUNKS):
        outs.append(torch.empty(HEADS, CHUNK, WIDTH))
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
    "forgetting in bursts": {"burst": 300.0},
    "forgetting in bursts far stronger than what is between": {"burst": 1e30},
    "nothing forgotten": {"gate": 0.0},
    "next to nothing forgotten": {"gate": -1e-7},
    "nothing written": {"strength": 0.0},
    "overwritten": {"strength": 1.0},
    "overwritten and kept": {"strength": 1.0, "gate": 0.0},
    "keys almost equal": {"spread": 1e-3, "strength": 1.0, "gate": 0.0},
    "keys equal": {"spread": 0.0, "strength": 1.0, "gate": -1e-3},
}


@pytest.mark.parametrize("run", [chunked, decoded])
@pytest.mark.parametrize("extreme", EXTREMES)
def test_extreme_gates_and_keys_by_channel_stay_within_1e_5_of_float64(run, extreme: str) -> None:
    given = inputs(**EXTREMES[extreme])
    state_HKV = torch.randn(HEADS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        got = run(given, state_HKV)
    for fast, wanted in zip(got, exact(given, state_HKV), strict=True):
        assert fast.isfinite().all()
        assert (fast - wanted).abs().max() <= max(1e-5 * wanted.abs().max(), FLUSHED)


def test_padding_without_decay_and_writing_keeps_the_states_bits() -> None:
    qk_T2HK, v_THV, g_THK, beta_TH = inputs()
    state_HKV = torch.randn(HEADS, WIDTH, WIDTH)
    _, after_HKV = chunked((qk_T2HK, v_THV, torch.zeros_like(g_THK), torch.zeros_like(beta_TH)), state_HKV)
    assert torch.equal(after_HKV, state_HKV)


def test_chunks_prepared_together_or_apart_have_the_same_bits() -> None:
    given = [t.unflatten(0, (CHUNKS, CHUNK)) for t in inputs()]
    together = prepare(*given)
    for i in range(CHUNKS):
        apart = prepare(*(t[i : i + 1] for t in given))
        for name in ("read_MRK", "value_MtV", "inverse_Mtt", "attend_Mtt", "write_MtK", "decay_MX1"):
            heads = getattr(together, name)[i * HEADS : (i + 1) * HEADS]
            assert torch.equal(heads, getattr(apart, name)), name


def test_transition_equals_the_update_of_a_state_without_values() -> None:
    qk_T2HK, v_THV, g_THK, beta_TH = inputs()
    state_HKV = torch.randn(HEADS, WIDTH, WIDTH)
    nothing = (qk_T2HK, torch.zeros_like(v_THV), g_THK * 0.01, beta_TH)
    chunks = prepare(*(t.unflatten(0, (CHUNKS, CHUNK)) for t in nothing))
    transition_HKK = torch.eye(WIDTH).repeat(HEADS, 1, 1)
    for i in range(CHUNKS):
        chunks.transition_into(slice(i * HEADS, (i + 1) * HEADS), transition_HKK)
    _, wanted_HKV = exact(nothing, state_HKV)
    moved_HKV = transition_HKK.double() @ state_HKV.double()
    assert (moved_HKV - wanted_HKV).abs().max() < 1e-5 * wanted_HKV.abs().max()


def test_sequence_decodes_to_the_same_bits_by_itself_and_among_others() -> None:
    n, heads, width = 16, 5, 128
    generator = torch.Generator().manual_seed(2)
    qkv_B3HK = torch.randn(n, 3, heads, width, generator=generator)
    g_BHK = -torch.rand(n, heads, width, generator=generator)
    beta_BH = torch.rand(n, heads, generator=generator)
    state_BHKV = torch.randn(n, heads, width, width, generator=generator)
    given = (qkv_B3HK[:, :2], qkv_B3HK[:, 2], g_BHK, beta_BH)
    together_BHKV = state_BHKV.clone()
    out_BHV = decode_step(*given, together_BHKV)
    for b in range(n):
        alone_1HKV = state_BHKV[b : b + 1].clone()
        assert torch.equal(decode_step(*(t[b : b + 1] for t in given), alone_1HKV)[0], out_BHV[b])
        assert torch.equal(alone_1HKV[0], together_BHKV[b])
