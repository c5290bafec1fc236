"""Gates at their extremes: nothing overflows, and results are those of float64.

L tokens of a sequence, B decoding sequences, D model width.
"""

import pytest
import torch

from tests.contract.layer_rig import LayerRig, Piece
from tests.contract.recurrences import EXTREMES, Case
from tests.contract.recurrences.case import tokens

LENGTH, DECODED = 200, 5
FLUSHED = torch.finfo(torch.float32).tiny  # smaller values are zero, here as in the server
pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")


@pytest.fixture(params=EXTREMES)
def mixer(request: pytest.FixtureRequest) -> Case:
    return EXTREMES[request.param]


def close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((got.double() - wanted).abs().max() <= max(1e-5 * wanted.abs().max(), FLUSHED))


def test_outputs_and_states_at_extreme_gates_are_those_of_float64(mixer: Case) -> None:
    x_LD, rig = tokens(LENGTH + DECODED), LayerRig(mixer)
    outs = rig.step([Piece(x_LD[:LENGTH], 0)])
    prefilled_X = rig.state.recurrent[0].clone()
    outs += [rig.step([], x_LD[t : t + 1], (0,))[0] for t in range(LENGTH, LENGTH + DECODED)]
    wanted_LD, wanted_X = mixer.reference(x_LD)
    _, wanted_prefilled_X = mixer.reference(x_LD[:LENGTH])
    assert close(torch.cat(outs), wanted_LD)
    assert close(prefilled_X, wanted_prefilled_X)
    assert close(rig.state.recurrent[0], wanted_X)


def test_transitions_at_extreme_gates_move_states_as_float64_does(mixer: Case) -> None:
    x_LD, rig = tokens(LENGTH), LayerRig(mixer)
    rig.step([Piece(x_LD[:128], 0)])
    rig.copy(0, 1)
    rig.state.recurrent[1] = 0
    before_X = rig.state.recurrent[0].clone()
    rig.state.transition[0] = rig.layer.identity()
    rig.step([Piece(x_LD[128:], 0, 128, transition=0), Piece(x_LD[128:], 1, 128)])
    moved_X = mixer.moved(rig.state.transition[0], before_X)
    assert rig.state.transition[0].isfinite().all()
    assert close(moved_X + rig.state.recurrent[1], rig.state.recurrent[0].double())


def test_a_cut_at_a_page_boundary_changes_no_bit_at_extreme_gates(mixer: Case) -> None:
    x_LD, whole, parts = tokens(LENGTH), LayerRig(mixer), LayerRig(mixer)
    (wanted_LD,) = whole.step([Piece(x_LD, 0)])
    outs = [parts.step([Piece(x_LD[a:b], 0, a)])[0] for a, b in ((0, 64), (64, 192), (192, LENGTH))]
    assert torch.equal(torch.cat(outs), wanted_LD)
    assert parts.same_state(0, whole, 0)
