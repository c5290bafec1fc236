"""The chunked form and the decode step against the token-by-token one, where steps and decays are at their extremes."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from headwater.mixers.mamba2 import Chunks, Inputs, decode_step, prepare, state_space
from headwater.mixers.slices import CHUNK

CHUNKS, HEADS, GROUPS, WIDTH, STATE = 3, 6, 2, 16, 24
LENGTH = CHUNKS * CHUNK
FLUSHED = torch.finfo(torch.float32).tiny  # smaller numbers are zero, here as in the server


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(step: float = 1.0, burst: float = 1.0) -> Inputs:
    """Steps of up to `step`, every seventh of them `burst` times as long; T tokens."""
    dt_TH = step * random(LENGTH, HEADS, seed=2).abs()
    dt_TH[::7] *= burst
    return Inputs(
        random(LENGTH, HEADS, WIDTH),
        dt_TH,
        random(LENGTH, GROUPS, STATE, seed=3),
        random(LENGTH, GROUPS, STATE, seed=4),
    )


def mapped(given: Inputs, change) -> Inputs:
    return Inputs(*(change(getattr(given, field.name)) for field in fields(given)))


RATE_H, SKIP_H, STATE_HNP = -random(HEADS, seed=5).abs(), random(HEADS, seed=6), random(HEADS, STATE, WIDTH, seed=7)


def exact(given: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    x_THP, dt_TH, b_TGN, c_TGN = (getattr(given, field.name).double() for field in fields(given))
    return state_space(x_THP, dt_TH, RATE_H.double(), b_TGN, c_TGN, SKIP_H.double(), STATE_HNP.double())


def chunked(given: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    chunks = prepare(mapped(given, lambda t: t.unflatten(0, (CHUNKS, CHUNK))), RATE_H, SKIP_H)
    state_HNP, outs = STATE_HNP.clone(), []
    for i in range(CHUNKS):
        outs.append(torch.empty(HEADS, CHUNK, WIDTH))
        chunks.advance_into(slice(i * HEADS, (i + 1) * HEADS), state_HNP, outs[-1])
    return torch.cat(outs, 1).transpose(0, 1), state_HNP


def decoded(given: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    state_1HNP, outs = STATE_HNP[None].clone(), []
    for i in range(LENGTH):
        token = mapped(given, lambda t, i=i: t[i : i + 1].unsqueeze(1))
        outs.append(decode_step(token, RATE_H, SKIP_H, state_1HNP))
    return torch.cat(outs), state_1HNP[0]


EXTREMES = {
    "ordinary": {},
    "state forgotten at once": {"step": 1e3},
    "sums of decays far below the smallest exponent": {"step": 1e30},
    "forgetting in bursts": {"burst": 300.0},
    "everything forgotten in bursts": {"burst": 1e30},
    "little forgotten after bursts": {"step": 1e-3, "burst": 1e8},
    "next to nothing forgotten": {"step": 1e-6},
    "no step": {"step": 0.0},
}


@pytest.mark.parametrize("run", [chunked, decoded])
@pytest.mark.parametrize("extreme", EXTREMES)
def test_extreme_steps_stay_within_1e_5_of_float64(run, extreme: str) -> None:
    given = inputs(**EXTREMES[extreme])
    for got, wanted in zip(run(given), exact(given), strict=True):
        assert got.isfinite().all()
        assert (got - wanted).abs().max() <= max(1e-5 * wanted.abs().max(), FLUSHED)


def test_padding_with_no_step_leaves_the_state_bit_for_bit() -> None:
    _, after_HNP = chunked(inputs(step=0.0))
    assert torch.equal(after_HNP, STATE_HNP)


def test_chunks_prepared_together_or_apart_have_the_same_bits() -> None:
    given = mapped(inputs(), lambda t: t.unflatten(0, (CHUNKS, CHUNK)))
    together = prepare(given, RATE_H, SKIP_H)
    for i in range(CHUNKS):
        apart = prepare(mapped(given, lambda t, i=i: t[i : i + 1]), RATE_H, SKIP_H)
        for field in fields(Chunks):
            heads = getattr(together, field.name)[i * HEADS : (i + 1) * HEADS]
            assert torch.equal(heads, getattr(apart, field.name)), field.name
