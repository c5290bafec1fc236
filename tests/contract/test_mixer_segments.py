"""Prompts made of segments: composed states equal those of one pass over all tokens, at any position.

L tokens of a sequence, D model width.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch

from tests.contract.layer_rig import LayerRig, Piece, relative_error
from tests.contract.recurrences import EXTREMES, Case
from tests.contract.recurrences.case import tokens

PREFIX, REST, SEAM = 70, 30, 8  # tokens
FLUSHED = torch.finfo(torch.float32).tiny
pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")


@dataclass(frozen=True)
class Prompt:
    """A prefix, segments with these token counts between head and tail, and a rest."""

    interiors: tuple[int, ...]
    head: int = SEAM
    tail: int = SEAM

    @property
    def starts(self) -> list[int]:
        """Positions at which segments begin, and the end of the last one."""
        ends = [PREFIX]
        for interior in self.interiors:
            ends.append(ends[-1] + self.head + interior + self.tail)
        return ends

    @property
    def tokens(self) -> torch.Tensor:
        return tokens(self.starts[-1] + REST)

    def made(self, rig: LayerRig) -> None:
        for start, end in pairwise(self.starts):
            rig.make(self.tokens[start:end], self.head, self.tail)

    def pieces(self, slot: int) -> list[Piece]:
        """Return the pieces that are computed around the interiors."""
        x_LD, first, composes, pieces = self.tokens, 0, (), []
        for i, (start, interior) in enumerate(zip(self.starts, self.interiors, strict=False)):
            cut = start + self.head
            if cut > first:
                pieces.append(Piece(x_LD[first:cut], slot, first, composes=composes))
                composes = ()
            composes += ((i, start),)
            first = cut + interior
        return [*pieces, Piece(x_LD[first:], slot, first, composes=composes)]


def close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((got.double() - wanted).abs().max() <= max(1e-5 * wanted.abs().max(), FLUSHED))


def is_one_pass(mixer: Case, prompt: Prompt) -> bool:
    """All that is computed, and the state after it."""
    rig = LayerRig(mixer)
    prompt.made(rig)
    pieces = prompt.pieces(5)
    outs = rig.step(pieces)
    wanted_LD, wanted_X = mixer.reference(prompt.tokens)
    right = [close(out, wanted_LD[p.start : p.start + len(out)]) for p, out in zip(pieces, outs, strict=True)]
    return all(right) and close(rig.state.recurrent[5], wanted_X)


@pytest.mark.pairs(kinds="mixer")
@pytest.mark.parametrize("interior", [1, 17, 64, 200])
def test_a_state_composed_with_a_segment_is_that_of_one_pass(mixer: Case, interior: int) -> None:
    assert is_one_pass(mixer, Prompt((interior,)))


def test_states_composed_with_several_segments_are_those_of_one_pass(mixer: Case) -> None:
    assert is_one_pass(mixer, Prompt((17, 200, 1, 64)))


@pytest.mark.parametrize("extreme", EXTREMES)
def test_composed_states_at_extreme_gates_are_those_of_one_pass(extreme: str) -> None:
    assert is_one_pass(EXTREMES[extreme], Prompt((17, 200)))


def test_segments_without_tails_whose_heads_only_warm_the_convolution_up(mixer: Case) -> None:
    """HYPIC, section 4.2: the leading tokens that a convolution looks back from are computed, and nothing else."""
    assert is_one_pass(mixer, Prompt((100, 65), head=getattr(mixer.layer, "conv", 1) - 1, tail=0))


@pytest.mark.pairs(kinds="mixer")
@pytest.mark.parametrize("interior", [1, 17, 64, 200])
def test_naive_addition_adds_the_segments_zero_start_state(mixer: Case, interior: int) -> None:
    """HYPIC, section 3.1: S + R(at)·S_{C|0}, the segment's convolution having begun with zeros."""
    x_LD, rig = tokens(PREFIX + interior), LayerRig(mixer)
    rig.make(x_LD[PREFIX:], 0, 0)
    (made,) = rig.state.segments
    rig.state = replace(rig.state, segments=(replace(made, transition_X=None),))
    rig.step([Piece(x_LD[:PREFIX], 5)])
    before_X = rig.state.recurrent[5].clone()
    rig.step([Piece(x_LD[:0], 5, PREFIX, composes=((0, PREFIX),)), Piece(x_LD[:9], 6)])
    assert torch.equal(rig.state.recurrent[5], before_X + rig.layer.moved(made.zero_start_X, PREFIX))
    _, prefix_X = mixer.reference(x_LD[:PREFIX])
    _, zero_start_X = mixer.reference(x_LD[PREFIX:])
    assert close(rig.state.recurrent[5], prefix_X + rig.layer.moved(zero_start_X.float(), PREFIX))


def test_an_identity_as_a_transition_is_naive_addition(mixer: Case) -> None:
    rig = LayerRig(mixer)
    rig.make(tokens(100), 0, 0)
    (made,) = rig.state.segments
    state_X = torch.randn(made.zero_start_X.shape, generator=torch.Generator().manual_seed(0))
    naive_X = rig.layer.composed(state_X, replace(made, transition_X=None), 30)
    carried_X = rig.layer.composed(state_X, replace(made, transition_X=rig.layer.identity()), 30)
    assert close(carried_X, naive_X.double())


def test_naive_addition_errs_by_the_missing_transition(mixer: Case) -> None:
    """Equation 5: (T − 1)·S."""
    rig = LayerRig(mixer)
    rig.make(tokens(100), SEAM, SEAM)
    (made,) = rig.state.segments
    state_X = torch.randn(made.zero_start_X.shape, generator=torch.Generator().manual_seed(0))
    naive_X = rig.layer.composed(state_X, replace(made, transition_X=None), 30)
    error_X = mixer.moved(made.transition_X, state_X) - state_X.double()
    assert close(rig.layer.composed(state_X, made, 30), naive_X.double() + error_X)


@pytest.mark.pairs(kinds="mixer")
@pytest.mark.parametrize("interior", [1, 17, 64, 200])
def test_the_zero_start_state_is_that_of_the_interior_after_zeros(mixer: Case, interior: int) -> None:
    x_LD, rig = tokens(SEAM + interior), LayerRig(mixer)
    rig.make(x_LD, SEAM, 0)
    rig.step([Piece(x_LD[:SEAM], 2)])
    head_X, end_X = rig.state.recurrent[2].clone(), rig.state.recurrent[0]
    rig.state.recurrent[2] = 0
    rig.step([Piece(x_LD[SEAM:], 2, SEAM)])
    (made,) = rig.state.segments
    # what is left of a subtraction is as exact as what was subtracted
    assert (made.zero_start_X - rig.state.recurrent[2]).abs().max() < 1e-6 * end_X.abs().max()
    assert torch.equal(rig.layer.zero_start(end_X, made.transition_X, head_X), made.zero_start_X)


def test_a_transition_carries_a_state_as_the_reference_does(mixer: Case) -> None:
    rig = LayerRig(mixer)
    rig.make(tokens(100), SEAM, SEAM)
    (made,) = rig.state.segments
    state_X = torch.randn(made.zero_start_X.shape, generator=torch.Generator().manual_seed(0))
    carried_X = rig.layer.carried(made.transition_X, state_X)
    assert close(carried_X, mixer.moved(made.transition_X, state_X))
    assert tuple(made.transition_X.shape) == mixer.layer.transition
    assert mixer.layer.composes


def test_a_segment_that_does_not_move_is_as_it_was(mixer: Case) -> None:
    rig = LayerRig(mixer)
    rig.make(tokens(100), SEAM, SEAM)
    zero_start_X = rig.state.segments[0].zero_start_X
    before_X = zero_start_X.clone()
    assert torch.equal(rig.layer.moved(zero_start_X, 0), before_X)
    rig.layer.moved(zero_start_X, 1000)
    assert torch.equal(zero_start_X, before_X)


def test_a_request_made_of_segments_changes_no_bit_of_others(mixer: Case) -> None:
    prompt, x_LD, x_BD = Prompt((17, 64)), tokens(150, 4), tokens(1, 5)
    alone, among = LayerRig(mixer), LayerRig(mixer)
    alone.step([Piece(tokens(64, 6), 7), Piece(tokens(100, 7), 8)])
    wanted = alone.step([Piece(x_LD, 7, 64)], x_BD, (8,))
    among.step([Piece(tokens(64, 6), 7), Piece(tokens(100, 7), 8)])
    prompt.made(among)
    first, *others = prompt.pieces(5)
    outs = among.step([first, Piece(x_LD, 7, 64), *others], x_BD, (8,))
    assert torch.equal(outs[1], wanted[0])
    assert torch.equal(outs[-1], wanted[-1])
    assert among.same_state(7, alone, 7)
    assert among.same_state(8, alone, 8)


def test_several_slices_of_a_slot_are_one_sequence(mixer: Case) -> None:
    """Bit for bit where they are cut at pages, whether in one step or in several."""
    x_LD, together, apart = tokens(300), LayerRig(mixer), LayerRig(mixer)
    pieces = [Piece(x_LD[a:b], 5, a) for a, b in pairwise((0, 64, 192, 300))]
    outs = together.step([pieces[0], Piece(tokens(90, 2), 6), *pieces[1:]])
    wanted = [apart.step([piece])[0] for piece in pieces]
    assert torch.equal(torch.cat([outs[0], *outs[2:]]), torch.cat(wanted))
    assert together.same_state(5, apart, 5)


def test_slices_may_be_cut_anywhere(mixer: Case) -> None:
    x_LD, rig = tokens(300), LayerRig(mixer)
    wanted_LD, wanted_X = mixer.reference(x_LD)
    outs = rig.step([Piece(x_LD[a:b], 5, a) for a, b in pairwise((0, 1, 3, 70, 71, 200, 300))])
    assert relative_error(torch.cat(outs), wanted_LD) < 1e-5
    assert relative_error(rig.state.recurrent[5], wanted_X) < 1e-5


def test_a_slice_may_compose_and_compute_nothing(mixer: Case) -> None:
    """As where a leg ends with a segment that has no tail."""
    prompt, rig = Prompt((30, 40), head=getattr(mixer.layer, "conv", 1) - 1, tail=0), LayerRig(mixer)
    prompt.made(rig)
    *pieces, last = prompt.pieces(5)
    rig.step([*pieces, Piece(last.x_LD[:0], 5, last.start, composes=last.composes)])
    _, wanted_X = mixer.reference(prompt.tokens[: last.start])
    assert close(rig.state.recurrent[5], wanted_X)
