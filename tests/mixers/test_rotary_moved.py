"""Keys that are rotated on from where they stood."""

from __future__ import annotations

import pytest
import torch

from headwater.layers.attention import Rotary
from headwater.mixers.rotary import rotary_table, rotate_into


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("by", [0, 1, 63, 5_000, 100_000])
def test_a_key_rotated_on_is_the_key_rotated_there(by: int, neighbours: bool) -> None:
    rotary = Rotary(32, neighbours=neighbours)
    table = rotary_table(rotary, "cpu")
    k_TGD = torch.randn(200, 3, 48, generator=torch.Generator().manual_seed(0))
    from_T = torch.arange(200)
    moved_TGD, wanted_TGD = k_TGD.clone(), k_TGD.clone()
    rotate_into(moved_TGD, table.at(from_T), neighbours)
    rotate_into(moved_TGD, table.between(from_T, from_T + by), neighbours)
    rotate_into(wanted_TGD, table.at(from_T + by), neighbours)
    assert (moved_TGD - wanted_TGD).abs().max() < 1e-6 * wanted_TGD.abs().max()


def test_one_turn_for_all_is_that_of_position_zero() -> None:
    """But for the rounding of the table's angles, at most half of the last place of a float32 below twice `by`."""
    table = rotary_table(Rotary(32), "cpu")
    for by in (0, 1, 77, 4_000):
        turn = table.between(torch.tensor([0]), torch.tensor([by]))
        assert (table.turn(by) - turn).abs().max() < 1e-6 + by * 2**-24
