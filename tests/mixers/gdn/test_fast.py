"""The chunked rule and the decode step against the token-by-token one, where gates and keys are at their extremes."""

from __future__ import annotations

import pytest
import torch

from headwater.mixers.gdn import decode_step, delta_rule, prepare
from headwater.mixers.slices import CHUNK

CHUNKS, KEY_HEADS, HEADS, WIDTH = 3, 2, 4, 32
LENGTH = CHUNKS * CHUNK
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(gate: float | None = None, strength: float | None = None, spread: float = 1.0, burst: float = 1.0) -> Inputs:
    """Random queries and keys [T, 2, G, K], values, log decays and writing strengths; keys differ by `spread`.

    Every seventh token's decay is `burst` times as strong.
    """
    generator = torch.Generator().manual_seed(0)
    qk_T2GK = torch.randn(LENGTH, 2, KEY_HEADS, WIDTH, generator=generator)
    qk_T2GK[:, 1] = qk_T2GK[:1, 1] + spread * (qk_T2GK[:, 1] - qk_T2GK[:1, 1])
    v_THV = torch.randn(LENGTH, HEADS, WIDTH, generator=generator)
    g_TH = -torch.rand(LENGTH, HEADS, generator=generator)
    beta_TH = torch.rand(LENGTH, HEADS, generator=generator)
    g_TH[::7] *= burst
    g_TH = g_TH if gate is None else torch.full_like(g_TH, gate)
    return qk_T2GK, v_THV, g_TH, beta_TH if strength is None else torch.full_like(beta_TH, strength)


def exact(given: Inputs, state_HKV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    qk_T2GK, v_THV, g_TH, beta_TH = (t.double() for t in given)
    qk_T2GK = qk_T2GK / (qk_T2GK.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    q_THK, k_THK = qk_T2GK.repeat_interleave(HEADS // KEY_HEADS, 2).unbind(1)
    return delta_rule(q_THK * WIDTH**-0.5, k_THK, v_THV, g_TH, beta_TH, state_HKV.double())


def chunked(given: Inputs, state_HKV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    chunks = prepare(*(t.unflatten(0, (CHUNKS, CHUNK)) for t in given))
    state_HKV, outs = state_HKV.clone(), []
    for i in range(CHUNKS):
        outs.append(torch.empty(HEADS, CHUNK, WIDTH))
        chunks.advance_into(slice(i * HEADS, (i + 1) * HEADS), state_HKV, outs[-1])
    return torch.cat(outs, 1).transpose(0, 1), state_HKV


def decoded(given: Inputs, state_HKV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    state_1HKV = state_HKV[None].clone()
    qk_T2GK, v_THV, g_TH, beta_TH = given
    rows = zip(*(t.split(1) for t in (qk_T2GK, v_THV, g_TH.unsqueeze(-1), beta_TH)), strict=True)
    outs = [decode_step(*row, state_1HKV) for row in rows]
    return torch.cat(outs), state_1HKV[0]


# Smaller numbers are flushed to zero, here as in the server.
FLUSHED = torch.finfo(torch.float32).tiny

EXTREMES = {
    "ordinary": {},
    "state forgotten at once": {"gate": -200.0},
    "sums of decays far below the smallest exponent": {"gate": -1e30},
    "forgetting in bursts": {"burst": 300.0},
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
def test_extreme_gates_and_keys_stay_within_1e_5_of_float64(run, extreme: str) -> None:
    given = inputs(**EXTREMES[extreme])
    state_HKV = torch.randn(HEADS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))
    for got, wanted in zip(run(given, state_HKV), exact(given, state_HKV), strict=True):
        assert got.isfinite().all()
        assert (got - wanted).abs().max() <= max(1e-5 * wanted.abs().max(), FLUSHED)


def test_padding_without_decay_and_writing_keeps_the_states_bits() -> None:
    qk_T2GK, v_THV, _, _ = inputs()
    idle_TH = torch.zeros(LENGTH, HEADS)
    state_HKV = torch.randn(HEADS, WIDTH, WIDTH)
    _, after_HKV = chunked((qk_T2GK, v_THV, idle_TH, idle_TH), state_HKV)
    assert torch.equal(after_HKV, state_HKV)


def test_chunks_prepared_together_or_apart_have_the_same_bits() -> None:
    given = [t.unflatten(0, (CHUNKS, CHUNK)) for t in inputs()]
    together = prepare(*given)
    for i in range(CHUNKS):
        apart = prepare(*(t[i : i + 1] for t in given))
        for name in ("read_MRK", "value_MtV", "inverse_Mtt", "attend_Mtt", "write_MtK", "decay_MX1"):
            heads = getattr(together, name)[i * HEADS : (i + 1) * HEADS]
            assert torch.equal(heads, getattr(apart, name)), name
