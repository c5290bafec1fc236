"""Sliding-window attention against a plain one, and against itself in other cuts, slots and company."""

import pytest
import torch

from headwater.mixers.slices import Slice
from tests.mixers.window.rig import LENGTH, NONE, Rig, shape_of

WINDOWS = (1, 20, 65, 100, 600, 1000)


@pytest.mark.parametrize("window", WINDOWS)
def test_agrees_with_the_formulas(window: int) -> None:
    rig = Rig(shape_of(window))
    assert (rig.prefill(3).double() - rig.plain()).abs().max() < 1e-4


@pytest.mark.parametrize("window", WINDOWS)
def test_decode_agrees_with_the_formulas(window: int) -> None:
    rig = Rig(shape_of(window))
    wanted = rig.plain()
    for begun in (1, 90, 640):
        rig.prefill(3, length=begun)
        decoded = [rig.run([], [(3, p)], rig.x[p : p + 1]) for p in range(begun, begun + 20)]
        assert (torch.cat(decoded).double() - wanted[begun : begun + 20]).abs().max() < 1e-4, begun


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", WINDOWS)
def test_cuts_change_no_bit(window: int, dtype: torch.dtype) -> None:
    rig = Rig(shape_of(window), dtype)
    whole = rig.prefill(3)
    assert not whole.isnan().any(), "read what was never written"
    for cuts in [(64,), (512,), (448, 576), tuple(range(64, LENGTH, 64))]:
        assert torch.equal(rig.prefill(5, cuts), whole), cuts
        assert torch.equal(rig.states.bytes_RB[5], rig.states.bytes_RB[3]), cuts


@pytest.mark.parametrize("window", WINDOWS)
def test_the_end_of_a_slice_changes_no_bit(window: int) -> None:
    rig = Rig(shape_of(window))
    whole = rig.prefill(3)
    for length in (1, 2, 5, 63, 65, 200, 511, 513):
        assert torch.equal(rig.prefill(5, length=length), whole[:length]), length


@pytest.mark.parametrize("window", WINDOWS)
def test_saved_window_states_equal_those_of_a_run_ending_there(window: int) -> None:
    rig = Rig(shape_of(window))
    saves = tuple((position, 6 + i) for i, position in enumerate(range(64, LENGTH, 64)))
    rig.prefill(3, (128, 448), saves=saves)
    for position, row in saves:
        rig.prefill(4, length=position)
        assert torch.equal(rig.states.bytes_RB[row], rig.states.bytes_RB[4]), position


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "kv_heads"), [(1, 2), (100, 1), (100, 6), (600, 2)])
def test_company_and_slots_change_no_bit(window: int, kv_heads: int, dtype: torch.dtype) -> None:
    """Sequences of all lengths decode by themselves, then together and with a prefill, in adjacent slots and others."""
    lengths = (1, 2, 64, 99, 100, 101, 300, 599, 700)
    alone = Rig(shape_of(window, kv_heads=kv_heads), dtype)
    whole, wanted = alone.prefill(0), []
    for length in lengths:
        alone.prefill(1, length=length)
        wanted.append(alone.run([], [(1, length)], alone.x[length : length + 1]))
    for slots in (range(2, 11), (9, 3, 17, 4, 20, 11, 5, 7, 13)):
        rig = Rig(shape_of(window, kv_heads=kv_heads), dtype)
        for slot, length in zip(slots, lengths, strict=True):
            rig.prefill(slot, length=length)
        rows = torch.cat([rig.x[:LENGTH], *(rig.x[n : n + 1] for n in lengths)])
        one = Slice(0, LENGTH, 0, 22, NONE, 0)
        out = rig.run([one], list(zip(slots, lengths, strict=True)), rows)
        assert torch.equal(out[:LENGTH], whole)
        assert torch.equal(out[LENGTH:], torch.cat(wanted))
        assert not out.isnan().any()
