"""Promises of every recurrent mixer, whatever its recurrence. A mixer is tested once it is in the table.

L tokens of a sequence, B decoding sequences, D model width.
"""

from collections.abc import Callable

import pytest
import torch

from headwater.mixers import recurrent
from headwater.models.build import RECURRENT
from tests.contract.layer_rig import LayerRig, Piece, relative_error
from tests.contract.recurrences import RECURRENCES, Case
from tests.contract.recurrences.case import tokens
from tests.support import FULL

LONGEST, TOGETHER = 513, 19  # tokens, sequences of a step
SOME_LENGTHS = [*range(1, LONGEST, 7), 63, 64, 65, LONGEST]
LENGTHS = range(1, LONGEST + 1) if FULL else [*range(1, 130), *(n for n in SOME_LENGTHS if n >= 130)]
SETTINGS = [(torch.float32, 2), (torch.bfloat16, 1)]  # dtype and threads
pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")


def test_every_recurrent_layer_is_held_to_the_contract() -> None:
    held = {type(layer) for recurrence in RECURRENCES.values() for layer in recurrence.shapes.values()}
    assert held == set(RECURRENT)


def test_fast_equals_the_reference_at_every_length_in_ragged_batches(mixer: Case) -> None:
    """Every length with the first shape of each kind, every seventh and those about a page's end with the others.

    `make test` has every length up to two pages and one token.
    """
    x_LD = tokens(LONGEST)
    wanted_LD, _ = mixer.reference(x_LD)
    first_shape = mixer.layer is next(iter(mixer.of.shapes.values()))
    lengths = LENGTHS if first_shape else SOME_LENGTHS
    for first in range(0, len(lengths), TOGETHER):
        together = lengths[first : first + TOGETHER]
        outs = LayerRig(mixer).step([Piece(x_LD[:n], slot) for slot, n in enumerate(together)])
        for n, out_LD in zip(together, outs, strict=True):
            assert relative_error(out_LD, wanted_LD[:n]) < 1e-5, n


@pytest.mark.pairs(kinds="mixer")
@pytest.mark.parametrize("length", [1, 64, 65, LONGEST])
def test_the_state_is_that_of_the_reference(mixer: Case, length: int) -> None:
    x_LD, rig = tokens(length), LayerRig(mixer)
    rig.step([Piece(x_LD, 0)])
    _, wanted_X = mixer.reference(x_LD)
    assert relative_error(rig.state.recurrent[0], wanted_X) < 1e-5


@pytest.mark.pairs(kinds="mixer")
@pytest.mark.parametrize(("dtype", "threads"), SETTINGS)
def test_a_cut_at_a_page_boundary_changes_no_bit(mixer: Case, dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    x_LD, whole = tokens(LONGEST).to(dtype), LayerRig(mixer, dtype)
    (wanted_LD,) = whole.step([Piece(x_LD, 3)])
    for cuts in [(64,), (512,), (192, 256, 448), tuple(range(64, 513, 64))]:
        parts, ends = LayerRig(mixer, dtype), (*cuts, LONGEST)
        outs = [parts.step([Piece(x_LD[a:b], 5, a)])[0] for a, b in zip((0, *cuts), ends, strict=True)]
        assert torch.equal(torch.cat(outs), wanted_LD), cuts
        assert parts.same_state(5, whole, 3), cuts


def test_states_saved_within_a_run_equal_those_of_a_run_ending_there(mixer: Case) -> None:
    x_LD, rig = tokens(LONGEST), LayerRig(mixer)
    saves = tuple((end, 10 + i) for i, end in enumerate(range(64, LONGEST, 64)))
    rig.step([Piece(tokens(200, 2), 1), Piece(x_LD, 0, saves=saves), Piece(tokens(300, 3), 2)])
    for end, row in saves:
        ended = LayerRig(mixer)
        ended.step([Piece(x_LD[:end], 0)])
        assert rig.same_state(row, ended, 0), end
    unused = rig.state.recurrent[10 + len(saves) :]
    assert unused.isnan().all()


def test_decoding_agrees_with_the_reference(mixer: Case) -> None:
    x_LD, rig = tokens(90), LayerRig(mixer)
    wanted_LD, wanted_X = mixer.reference(x_LD)
    rig.step([Piece(x_LD[:70], 7)])
    outs = [rig.step([], x_LD[t : t + 1], (7,))[0] for t in range(70, 90)]
    assert relative_error(torch.cat(outs), wanted_LD[70:]) < 1e-5
    assert relative_error(rig.state.recurrent[7], wanted_X) < 1e-5


def test_a_decoded_token_is_close_to_a_prefilled_one(mixer: Case) -> None:
    x_LD, rig = tokens(129), LayerRig(mixer)
    rig.step([Piece(x_LD[:128], 0), Piece(x_LD[:128], 1)])
    (prefilled_LD,) = rig.step([Piece(x_LD[128:], 0, 128)])
    (decoded_BD,) = rig.step([], x_LD[128:], (1,))
    assert relative_error(decoded_BD, prefilled_LD.double()) < 1e-5
    assert relative_error(rig.state.recurrent[1], rig.state.recurrent[0].double()) < 1e-5
    assert rig.same_conv(0, rig, 1)


@pytest.mark.pairs(kinds="mixer")
@pytest.mark.parametrize(("dtype", "threads"), SETTINGS)
def test_other_sequences_in_the_step_change_no_bit(mixer: Case, dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    x_LD, x_BD = tokens(150).to(dtype), tokens(1, 5).to(dtype)
    alone = LayerRig(mixer, dtype)
    alone.step([Piece(tokens(100, 4).to(dtype), 1)])
    (wanted_LD,) = alone.step([Piece(x_LD, 0)])
    (decoded_BD,) = alone.step([], x_BD, (1,))
    for others in ((64,), (700, 1, 65), (5,) * 12):
        among = LayerRig(mixer, dtype)
        neighbours = [Piece(tokens(n, 10 + i).to(dtype), 20 + i) for i, n in enumerate(others)]
        among.step([Piece(tokens(100, 4).to(dtype), 1), *neighbours])
        slots = (*range(20, 20 + len(others)), 1)
        x_all_BD = torch.cat((tokens(len(others), 6).to(dtype), x_BD))
        outs = among.step([*neighbours, Piece(x_LD, 0)], x_all_BD, slots)
        assert torch.equal(outs[-2], wanted_LD)
        assert torch.equal(outs[-1][-1:], decoded_BD)
        assert among.same_state(0, alone, 0)
        assert among.same_state(1, alone, 1)


def test_decoding_in_adjacent_and_in_scattered_slots_gives_the_same_bits(mixer: Case) -> None:
    x_BD = tokens(5, 7)
    adjacent, scattered = LayerRig(mixer), LayerRig(mixer)
    for rig, slots in ((adjacent, (2, 3, 4, 5, 6)), (scattered, (9, 1, 30, 4, 17))):
        rig.step([Piece(tokens(30, seed), slot) for seed, slot in enumerate(slots)])
    (wanted_BD,) = adjacent.step([], x_BD, (2, 3, 4, 5, 6))
    (got_BD,) = scattered.step([], x_BD, (9, 1, 30, 4, 17))
    assert torch.equal(got_BD, wanted_BD)
    for row, other in zip((9, 1, 30, 4, 17), (2, 3, 4, 5, 6), strict=True):
        assert scattered.same_state(row, adjacent, other)


@pytest.mark.pairs(kinds="mixer")
@pytest.mark.parametrize("slots", [(2, 3, 4, 5, 6), (9, 1, 30, 4, 17)])
def test_decoding_a_few_sequences_at_a_time_gives_the_same_bits(
    mixer: Case, slots: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    x_BD = tokens(5, 7)
    together, apart = LayerRig(mixer), LayerRig(mixer)
    for rig in (together, apart):
        rig.step([Piece(tokens(30, seed), slot) for seed, slot in enumerate(slots)])
    (wanted_BD,) = together.step([], x_BD, slots)
    monkeypatch.setattr(recurrent, "DECODE_ELEMENTS", 2 * apart.state.recurrent[0].numel())
    decoded = []
    monkeypatch.setattr(apart.layer, "decode", _counted(apart.layer.decode, decoded))
    (got_BD,) = apart.step([], x_BD, slots)
    assert decoded == [2, 2, 1]
    assert torch.equal(got_BD, wanted_BD)
    assert all(apart.same_state(row, together, row) for row in slots)


def _counted(decode: Callable[..., torch.Tensor], counts: list[int]) -> Callable[..., torch.Tensor]:
    def counted(mixed_BC: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        counts.append(len(mixed_BC))
        return decode(mixed_BC, *rest)

    return counted
