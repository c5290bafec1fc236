"""Legs that continue a tail in mid-page on the GPU's path, in Triton's interpreter: the bits of a whole leg."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headwater.models.load import load_model
from tests.models.tail_rig import PAGE, Leg, TailBench, same

TOKENS = random.Random(4).choices(range(1, 200), k=180)
QUICK = ("qwen3_5", "qwen3_window_odd_heads")
FAMILIES = (*QUICK, "kimi_linear", "granite_moe", "mamba2", "jamba_moe", "ring", "qwen3_next")


@pytest.fixture(params=[pytest.param(n, marks=[] if n in QUICK else [pytest.mark.full]) for n in FAMILIES])
def rig(
    request: pytest.FixtureRequest, gpu_path: Callable[[bool], None], checkpoint: Callable[[str], Path]
) -> TailBench:
    gpu_path(True)
    return TailBench(load_model(checkpoint(request.param), "float32").model, TOKENS)


def test_leg_from_mid_page_has_bits_of_whole_leg_on_a_gpu(rig: TailBench) -> None:
    """With another leg after a tail, and a decoding sequence; also the states, and a checkpoint on the way."""
    start, end, lengths = PAGE, 2 * PAGE + 13, (63, 7)
    whole = rig.prefilled(start)
    (wanted,) = rig.step([Leg(whole, end, saves=((2 * PAGE, 20),))])
    saved, decoding = rig.state(20), rig.prefilled(10)
    legs = []
    for row, length in enumerate(lengths, 1):
        like, stored, _ = rig.stored(start + length)
        seq, kept = rig.resumed(like, stored, start + length, row)
        legs.append(Leg(seq, end, kept, row, saves=((2 * PAGE, 20 + row),)))
    *got, _ = rig.step(legs, [(decoding, 7)])
    assert same(got, [wanted[length:] for length in lengths])
    for leg in legs:
        assert torch.equal(rig.state(leg.seq.slot), rig.state(whole.slot))
        assert torch.equal(rig.state(leg.saves[0][1]), saved)
        assert same(rig.kv(leg.seq, start, end), rig.kv(whole, start, end))


def test_leg_without_rows_has_state_of_whole_leg_on_a_gpu(rig: TailBench) -> None:
    whole = rig.prefilled(PAGE)
    (wanted,) = rig.step([Leg(whole, PAGE + 20)])
    like, stored, _ = rig.stored(PAGE + 20)
    seq, kept = rig.resumed(like, stored, PAGE + 20)
    rig.advance(Leg(seq, seq.length, kept, 1))
    assert torch.equal(rig.state(seq.slot), rig.state(whole.slot))
    assert same([rig.model.logits(rig.tails.hidden_RC[1:2])[0]], [wanted[-1]])
