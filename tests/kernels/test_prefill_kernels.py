"""Kernels that prefill recurrent layers, against their references, and among other sequences."""

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("numba", reason="numba is not installed")

from headwater.kernels.compiling import use_threads
from headwater.layers.gdn import DeltaNet
from tests.contract.layer_rig import LayerRig, Piece
from tests.contract.recurrences import Case
from tests.contract.recurrences.case import WIDTH, tokens
from tests.contract.recurrences.gated_delta_net import GATED_DELTA_NET
from tests.contract.recurrences.short_conv import SHORT_CONV
from tests.kernels.test_recurrent import DTYPES, KernelRig, close

SHAPES = {
    "shared keys": DeltaNet(WIDTH, 2, 4, 32, 80, 4),
    "whole panels": DeltaNet(WIDTH, 2, 2, 16, 128, 4, by_key_head=True),
    "odd heads": DeltaNet(WIDTH, 3, 3, 48, 16, 2, norm_eps=1e-5),
    "negative eigenvalues": DeltaNet(WIDTH, 2, 2, 32, 64, 4, apart=True, strength=2.0),
}
CASES = {name: Case(shape, GATED_DELTA_NET) for name, shape in SHAPES.items()}
CASES |= {f"short convolution, {name}": Case(shape, SHORT_CONV) for name, shape in SHORT_CONV.shapes.items()}
GATES = {name: Case(SHAPES["shared keys"], GATED_DELTA_NET, name) for name in GATED_DELTA_NET.extremes}
LONG = 150  # tokens: two chunks and a part of one


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield
    use_threads(torch.get_num_threads())


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def same(rig: LayerRig, row: int, other: LayerRig, other_row: int) -> bool:
    return rig.same_state(row, other, other_row)


@pytest.mark.parametrize("name", [*CASES, *GATES])
def test_prefill_agrees_with_the_reference(name: str) -> None:
    case = {**CASES, **GATES}[name]
    x_LD, rig = tokens(LONG), KernelRig(case)
    wanted_LD, wanted_X = case.reference(x_LD)
    assert rig.layer.prefill is not None
    assert close(rig.step([Piece(x_LD, 7)])[0], wanted_LD)
    assert close(rig.state.recurrent[7], wanted_X)


def test_another_state_is_far_from_the_reference(case: Case) -> None:
    """The control of the test above: a state that is not the sequence's."""
    x_LD, rig = tokens(LONG), KernelRig(case)
    wanted_LD, _ = case.reference(x_LD)
    rig.step([Piece(x_LD[:64], 7)])
    rig.state.recurrent[7] *= 0.99
    assert not close(rig.step([Piece(x_LD[64:], 7, 64)])[0], wanted_LD[64:])


def test_widths_that_are_not_whole_vectors_are_computed_by_torch() -> None:
    x_LD, case = tokens(LONG), Case(DeltaNet(WIDTH, 2, 4, 16, 24, 4), GATED_DELTA_NET)
    rig, torchs = KernelRig(case), LayerRig(case)
    assert rig.layer.prefill is None
    assert torch.equal(rig.step([Piece(x_LD, 0)])[0], torchs.step([Piece(x_LD, 0)])[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", [64, 128])
def test_a_prompt_in_two_steps_has_the_bits_of_one(case: Case, dtype: torch.dtype, cut: int) -> None:
    x_LD, whole, cold = tokens(LONG).to(dtype), KernelRig(case, dtype), KernelRig(case, dtype)
    (wanted_LD,) = whole.step([Piece(x_LD, 3, saves=((cut, 5),))])
    first = cold.step([Piece(x_LD[:cut], 9)])
    assert same(cold, 9, whole, 5)
    rest = cold.step([Piece(x_LD[cut:], 9, cut)])
    assert torch.equal(torch.cat(first + rest), wanted_LD)
    assert same(cold, 9, whole, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_later_tokens(case: Case, dtype: torch.dtype) -> None:
    x_LD, rig = tokens(LONG).to(dtype), KernelRig(case, dtype)
    (wanted_LD,) = rig.step([Piece(x_LD, 0)])
    for length in (1, 2, 7, 16, 63, 65, 130):
        assert torch.equal(rig.step([Piece(x_LD[:length], 1)])[0], wanted_LD[:length])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_and_state_do_not_depend_on_unread_rows(case: Case, dtype: torch.dtype) -> None:
    for length in (1, 6, 64, LONG):
        x_LD, rig = tokens(length).to(dtype), KernelRig(case, dtype)
        (wanted_LD,) = rig.step([Piece(x_LD, 0)])
        for unread in range(min(64, length + 1)):
            (got_LD,) = rig.step([Piece(x_LD, 1, unread=unread)])
            assert torch.equal(got_LD[unread:], wanted_LD[unread:]), (length, unread)
            assert same(rig, 1, rig, 0), (length, unread)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prompt_has_the_same_bits_among_others_and_on_any_threads(case: Case, dtype: torch.dtype) -> None:
    prompts = [tokens(n, n).to(dtype) for n in (LONG, 3, 64, 97)]
    alone, together = KernelRig(case, dtype), KernelRig(case, dtype)
    use_threads(1)
    wanted = [alone.step([Piece(x_LD, i, saves=((len(x_LD), 20 + i),))])[0] for i, x_LD in enumerate(prompts)]
    for threads in (1, 2, 3):
        use_threads(threads)
        pieces = [Piece(x_LD, i, saves=((len(x_LD), 20 + i),)) for i, x_LD in enumerate(prompts)][::-1]
        assert all(map(torch.equal, together.step(pieces), wanted[::-1]))
        assert all(same(together, row, alone, row) for i in range(len(prompts)) for row in (i, 20 + i))


@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_inputs_of_convolutions_are_those_of_torch(case: Case, dtype: torch.dtype) -> None:
    x_LD, rigs = tokens(LONG).to(dtype), (KernelRig(case, dtype), LayerRig(case, dtype))
    for rig in rigs:
        rig.step([Piece(x_LD[:1], 4), Piece(x_LD[:128], 6, saves=((64, 7),))])
        rig.step([Piece(x_LD[1:2], 4, 1), Piece(x_LD[128:], 6, 128, saves=((LONG, 8),))])
    ours, theirs = (rig.state.recurrent if rig.state.conv is None else rig.state.conv for rig in rigs)
    assert all(torch.equal(ours[row], theirs[row]) for row in (4, 6, 7, 8))


def test_only_rows_of_slots_and_saves_are_written(case: Case) -> None:
    rig = KernelRig(case)
    rig.step([Piece(tokens(LONG), 2, saves=((64, 5), (LONG, 6)))])
    others = [row for row in range(len(rig.state.recurrent)) if row not in (2, 5, 6)]
    for part in filter(torch.is_tensor, (rig.state.recurrent, rig.state.conv)):
        assert part[others].isnan().all()
        assert not part[[2, 5, 6]].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_slice_whose_transition_is_needed_has_the_same_bits(case: Case, dtype: torch.dtype) -> None:
    x_LD, (with_it, without) = tokens(LONG).to(dtype), (KernelRig(case, dtype), KernelRig(case, dtype))
    with_it.state.transition[1] = with_it.layer.mixer.identity()
    (got_LD,), (wanted_LD,) = with_it.step([Piece(x_LD, 3, transition=1)]), without.step([Piece(x_LD, 3)])
    assert torch.equal(got_LD, wanted_LD)
    assert same(with_it, 3, without, 3)
    torchs = LayerRig(case, dtype)
    torchs.state.transition[1] = torchs.layer.identity()
    torchs.step([Piece(x_LD, 3, transition=1)])
    assert torch.equal(with_it.state.transition[1], torchs.state.transition[1])


def test_slices_of_one_sequence_are_computed_in_order(case: Case) -> None:
    x_LD, rig, other = tokens(LONG), KernelRig(case), KernelRig(case)
    (wanted_LD,) = rig.step([Piece(x_LD, 3)])
    outs = other.step([Piece(x_LD[:64], 3), Piece(x_LD[64:], 3, 64)])
    assert torch.equal(torch.cat(outs), wanted_LD)
    assert same(other, 3, rig, 3)
