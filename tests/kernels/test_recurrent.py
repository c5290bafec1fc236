"""Kernels that decode layers with a recurrent state, against their references, and among other sequences."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("numba", reason="numba is not installed")

from headwater.kernels.compiling import use_threads
from headwater.mixers.cpu.recurrent import KERNELS, RecurrentOnCpu, on_cpu
from headwater.models.build import layer_classes
from tests.contract.layer_rig import LayerRig, Piece
from tests.contract.recurrences import EXTREMES, MIXERS, Case
from tests.contract.recurrences.case import tokens

DTYPES = (torch.float32, torch.bfloat16)
BEFORE = 30  # tokens that are prefilled before any is decoded
SLOTS = (9, 1, 30, 4, 17, 2, 3)


def has_kernel(case: Case) -> bool:
    return type(case.build()) in KERNELS


CASES = {name: case for name, case in MIXERS.items() if has_kernel(case)}
GATES = {name: case for name, case in EXTREMES.items() if has_kernel(case)}


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield
    use_threads(torch.get_num_threads())


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


class KernelRig(LayerRig):
    """A layer with its kernel; memory has more between rows than a layer's states, as other layers' stand there."""

    def __init__(self, case: Case, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(case, dtype)
        self.layer: Any = on_cpu(self.layer)
        state = self.state
        self.state = replace(state, recurrent=spaced(state.recurrent), conv=spaced(state.conv))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer.mixer, name)


def close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Within float32's error of sums; 1e-30 stands for nothing, as kernels' sigmoids end at 1e-38."""
    return float((got.double() - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max()) + 1e-30


def spaced(rows_RX: torch.Tensor | None) -> torch.Tensor | None:
    if rows_RX is None:
        return None
    wide_RY = rows_RX.new_full((len(rows_RX), 2 * rows_RX[0].numel() + 64), float("nan"))
    return wide_RY[:, 64 : 64 + rows_RX[0].numel()].view(rows_RX.shape)


def prefilled(case: Case, slots: tuple[int, ...], dtype: torch.dtype, rig: type[LayerRig] = KernelRig) -> LayerRig:
    """Sequence i of `SLOTS` stands in the i-th slot, whichever slots these are."""
    of = rig(case, dtype)
    of.step([Piece(tokens(BEFORE, SLOTS.index(slot)).to(dtype), slot) for slot in slots])
    return of


def decoded(rig: LayerRig, slots: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Three decoded tokens of each sequence, [3, D], in the order of slots."""
    steps = []
    for step in range(3):
        x_BD = torch.cat([tokens(1, 100 * step + SLOTS.index(slot)) for slot in slots]).to(dtype)
        steps.append(rig.step([], x_BD, slots)[0])
    return list(torch.stack(steps, 1))


def differing(case: Case, dtype: torch.dtype, of: type[LayerRig] = KernelRig) -> list[tuple[int, ...]]:
    """Sequences decoded together whose outputs or states differ from those that all seven have together."""
    whole = prefilled(case, SLOTS, dtype, of)
    wanted = dict(zip(SLOTS, decoded(whole, SLOTS, dtype), strict=True))
    found = []
    for threads, slots in ((1, SLOTS[:1]), (1, SLOTS[::-1]), (2, SLOTS[2:4]), (2, SLOTS[-3:]), (2, SLOTS)):
        use_threads(threads)
        rig = prefilled(case, slots, dtype, of)
        got = decoded(rig, slots, dtype)
        same = all(torch.equal(out, wanted[slot]) for slot, out in zip(slots, got, strict=True))
        if not (same and all(rig.same_state(slot, whole, slot) for slot in slots)):
            found.append(slots)
    return found


def test_layers_on_a_cpu_have_kernels() -> None:
    assert layer_classes("cpu").recurrent is on_cpu
    for case in CASES.values():
        assert isinstance(on_cpu(case.build()), RecurrentOnCpu)


@pytest.mark.parametrize("name", [*CASES, *GATES])
def test_decoding_agrees_with_the_reference(name: str) -> None:
    case = {**CASES, **GATES}[name]
    x_LD, rig = tokens(BEFORE + 20), KernelRig(case)
    wanted_LD, wanted_X = case.reference(x_LD)
    rig.step([Piece(x_LD[:BEFORE], 7)])
    outs = [rig.step([], x_LD[t : t + 1], (7,))[0] for t in range(BEFORE, len(x_LD))]
    assert close(torch.cat(outs), wanted_LD[BEFORE:])
    assert close(rig.state.recurrent[7], wanted_X)


def test_another_decay_is_far_from_the_reference(case: Case) -> None:
    """The control of the test above: states that are not those of the sequence."""
    x_LD, rig = tokens(BEFORE + 1), KernelRig(case)
    wanted_LD, _ = case.reference(x_LD)
    rig.step([Piece(x_LD[:BEFORE], 7)])
    rig.state.recurrent[7] *= 0.99
    assert not close(rig.step([], x_LD[BEFORE:], (7,))[0], wanted_LD[BEFORE:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_sequence_has_the_same_bits_among_others_and_on_any_threads(case: Case, dtype: torch.dtype) -> None:
    assert differing(case, dtype) == []


def test_a_kernel_that_mixes_rows_is_found(case: Case) -> None:
    class Mixing(KernelRig):
        def __init__(self, case: Case, dtype: torch.dtype) -> None:
            super().__init__(case, dtype)
            kernel = self.layer.kernel
            self.layer.kernel = self
            self.whole = kernel

        def decode_into(self, out_BX: torch.Tensor, *rest: Any) -> None:
            self.whole.decode_into(out_BX, *rest)
            out_BX += 1e-3 * len(out_BX)

    assert differing(case, torch.float32, Mixing) == [SLOTS[:1], SLOTS[2:4], SLOTS[-3:]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_inputs_of_convolutions_are_those_of_torch(case: Case, dtype: torch.dtype) -> None:
    rigs = [prefilled(case, SLOTS, dtype, of) for of in (KernelRig, LayerRig)]
    for rig in rigs:
        decoded(rig, SLOTS, dtype)
    assert all(rigs[0].same_conv(slot, rigs[1], slot) for slot in SLOTS)


ONE_STEP = (9, 9, 9, 1, 30, 30)  # slots of the rows of a step: three tokens of a sequence, one, and two


def after_tokens(
    case: Case, dtype: torch.dtype, of: type[LayerRig], steps: list[list[int]], n_threads: int
) -> tuple[torch.Tensor, LayerRig]:
    """Decode the tokens of `ONE_STEP`, these together in each step; return what they read, and the rig."""
    use_threads(n_threads)
    rig, x_BD = prefilled(case, SLOTS[:3], dtype, of), tokens(len(ONE_STEP), 200).to(dtype)
    out_BD = torch.empty_like(x_BD)
    for rows in steps:
        (out_BD[rows],) = rig.step([], x_BD[rows], tuple(ONE_STEP[row] for row in rows))
    return out_BD, rig


IN_TURN = [[0, 3, 4], [1, 5], [2]]


@pytest.mark.pairs
@pytest.mark.parametrize("of", [KernelRig, LayerRig])
@pytest.mark.parametrize("dtype", DTYPES)
def test_recurrence_of_several_tokens_in_one_step_equals_them_in_turn(
    case: Case, dtype: torch.dtype, of: type[LayerRig]
) -> None:
    wanted_BD, in_turn = after_tokens(case, dtype, of, IN_TURN, 2)
    for n_threads, steps in ((1, [[*range(6)]]), (2, [[*range(6)]]), (2, [[0, 1, 3], [2, 4, 5]])):
        got_BD, rig = after_tokens(case, dtype, of, steps, n_threads)
        assert torch.equal(got_BD, wanted_BD)
        assert all(rig.same_state(slot, in_turn, slot) for slot in SLOTS[:3])


def test_tokens_that_were_computed_from_the_same_state_are_found(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: each row reads the state before the step, as if it were the first."""
    wanted_BD, _ = after_tokens(case, torch.float32, KernelRig, IN_TURN, 1)
    whole = KernelRig.step

    def from_one_state(rig: KernelRig, pieces: list[Piece], *rest: Any) -> list[torch.Tensor]:
        if pieces:
            return whole(rig, pieces, *rest)
        before, outs = states_of(rig), []
        for x_D, slot in zip(*rest, strict=True):
            outs += whole(rig, [], x_D[None], (slot,))
            restore_states(rig, before)
        return [torch.cat(outs)]

    monkeypatch.setattr(KernelRig, "step", from_one_state)
    got_BD, _ = after_tokens(case, torch.float32, KernelRig, [[*range(6)]], 1)
    first = [row for row, slot in enumerate(ONE_STEP) if slot not in ONE_STEP[:row]]
    assert torch.equal(got_BD[first], wanted_BD[first])
    assert not any(torch.equal(got_BD[row], wanted_BD[row]) for row in range(6) if row not in first)


def states_of(rig: LayerRig) -> list[torch.Tensor | None]:
    return [part if part is None else part.clone() for part in (rig.state.recurrent, rig.state.conv)]


def restore_states(rig: LayerRig, before: list[torch.Tensor | None]) -> None:
    for part, kept in zip((rig.state.recurrent, rig.state.conv), before, strict=True):
        if part is not None and kept is not None:
            part.copy_(kept)


@pytest.mark.parametrize("of", [KernelRig, LayerRig])
def test_a_slot_that_two_sequences_have_is_refused(case: Case, of: type[LayerRig]) -> None:
    rig = prefilled(case, SLOTS[:3], torch.float32, of)
    with pytest.raises(ValueError, match=r"^3 decoding sequences have slots \[9, 1, 9\]: each needs one of its own$"):
        rig.step([], tokens(3, 200), (9, 1, 9))


def test_only_rows_of_the_slots_are_written(case: Case) -> None:
    rig = prefilled(case, SLOTS, torch.float32)
    decoded(rig, SLOTS, torch.float32)
    others = [row for row in range(len(rig.state.recurrent)) if row not in SLOTS]
    for part in (rig.state.recurrent, rig.state.conv):
        assert part is None or part[others].isnan().all()
        assert part is None or not part[list(SLOTS)].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_with_prefill_decodes_to_the_same_bits(case: Case, dtype: torch.dtype) -> None:
    apart, together = prefilled(case, SLOTS[:2], dtype), prefilled(case, SLOTS[:2], dtype)
    x_LD, x_BD = tokens(70, 50).to(dtype), tokens(2, 51).to(dtype)
    (prefilled_LD,) = apart.step([Piece(x_LD, 12)])
    (decoded_BD,) = apart.step([], x_BD, SLOTS[:2])
    outs = together.step([Piece(x_LD, 12)], x_BD, SLOTS[:2])
    assert torch.equal(outs[0], prefilled_LD)
    assert torch.equal(outs[1], decoded_BD)
    assert all(together.same_state(row, apart, row) for row in (12, *SLOTS[:2]))


def test_prefill_has_the_bits_of_torch(case: Case) -> None:
    x_LD, (kernel, torchs) = tokens(150), (KernelRig(case), LayerRig(case))
    assert torch.equal(kernel.step([Piece(x_LD, 0)])[0], torchs.step([Piece(x_LD, 0)])[0])
    assert kernel.same_state(0, torchs, 0)


def test_replaced_state_memory_is_used_at_once(case: Case) -> None:
    rig, other = (prefilled(case, SLOTS[:1], torch.float32) for _ in range(2))
    decoded(rig, SLOTS[:1], torch.float32)
    layer, other.layer = other.layer, rig.layer
    (wanted_1D,) = LayerRig.step(rig, [], tokens(1, 5), SLOTS[:1])
    decoded(other, SLOTS[:1], torch.float32)
    (got_1D,) = other.step([], tokens(1, 5), SLOTS[:1])
    assert layer is not rig.layer
    assert torch.equal(got_1D, wanted_1D)
