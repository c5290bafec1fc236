"""Transitions of every recurrent mixer, compared with the reference."""

import pytest
import torch

from tests.contract.layer_rig import LayerRig, Piece, relative_error
from tests.contract.recurrences import Case
from tests.contract.recurrences.case import tokens

START, PREFIX, FROM_ZERO = 128, 3, 5  # tokens before the range; rows of a state after them, and of zeros
pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")


def run(mixer: Case, length: int, company: bool = False) -> tuple[LayerRig, torch.Tensor]:
    """A range after a real prefix, and after the zero state (the convolution's state is the prefix's both times).

    Returns also the state before the range.
    """
    x_LD, rig = tokens(START + length), LayerRig(mixer)
    rig.step([Piece(x_LD[:START], PREFIX)])
    rig.copy(PREFIX, FROM_ZERO)
    rig.state.recurrent[FROM_ZERO] = 0
    before_X = rig.state.recurrent[PREFIX].clone()
    for row in (0, 1):
        rig.state.transition[row] = rig.layer.identity()
    range_LD = x_LD[START:]
    others = [Piece(tokens(n, n), 10 + n % 7) for n in (65, 200)] if company else []
    rig.step([Piece(range_LD, PREFIX, START, transition=0), *others, Piece(range_LD, FROM_ZERO, START, transition=1)])
    return rig, before_X


@pytest.mark.pairs(kinds="mixer")
@pytest.mark.parametrize("length", [1, 63, 64, 65, 200, 512])
def test_state_is_the_transitioned_previous_one_plus_the_zero_start_state(mixer: Case, length: int) -> None:
    rig, before_X = run(mixer, length)
    after_X, zero_start_X = rig.state.recurrent[PREFIX], rig.state.recurrent[FROM_ZERO]
    moved_X = mixer.moved(rig.state.transition[0], before_X)
    assert relative_error(moved_X + zero_start_X.double(), after_X.double()) < 1e-6
    if length <= mixer.of.remembers(mixer.layer):  # else this would hold for any transition
        assert moved_X.abs().max() > 0.05 * after_X.abs().max()


def test_the_transition_of_no_tokens_leaves_every_state(mixer: Case) -> None:
    state_X = torch.randn(dict(mixer.layer.states)["recurrent"], dtype=torch.float64)
    assert torch.equal(mixer.moved(LayerRig(mixer).layer.identity(), state_X), state_X)


def test_the_transition_does_not_depend_on_the_state_or_on_company(mixer: Case) -> None:
    rig, _ = run(mixer, 200)
    among, _ = run(mixer, 200, company=True)
    assert torch.equal(rig.state.transition[0], rig.state.transition[1])
    assert torch.equal(among.state.transition[0], rig.state.transition[0])


def test_asking_for_the_transition_changes_no_bit(mixer: Case) -> None:
    x_LD, with_it, without = tokens(300), LayerRig(mixer), LayerRig(mixer)
    with_it.state.transition[0] = with_it.layer.identity()
    (got_LD,) = with_it.step([Piece(x_LD, 0, transition=0)])
    (wanted_LD,) = without.step([Piece(x_LD, 0)])
    assert torch.equal(got_LD, wanted_LD)
    assert with_it.same_state(0, without, 0)


@pytest.mark.pairs(kinds="mixer")
@pytest.mark.parametrize("cuts", [(64,), (192,), (64, 128, 192, 256)])
def test_transition_continues_over_slices_without_a_changed_bit(mixer: Case, cuts: tuple[int, ...]) -> None:
    x_LD, rig = tokens(300), LayerRig(mixer)
    for row in (0, 1):
        rig.state.transition[row] = rig.layer.identity()
    rig.step([Piece(x_LD, 0, transition=0)])
    for a, b in zip((0, *cuts), (*cuts, 300), strict=True):
        rig.step([Piece(x_LD[a:b], 1, a, transition=1)])
    assert torch.equal(rig.state.transition[1], rig.state.transition[0])


def test_transition_is_stored_in_the_familys_smallest_form(mixer: Case) -> None:
    """At most a matrix of keys by keys a head; a diagonal or a number a head takes no more than that."""
    shape = LayerRig(mixer).layer.identity().shape
    assert tuple(shape) == mixer.of.transition(mixer.layer)
