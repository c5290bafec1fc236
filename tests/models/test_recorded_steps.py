"""Decode steps that are recorded on a CPU: replayed, they have the bits of eager ones."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba", reason="numba is not installed")

from headwater.kernels import recording
from headwater.kernels.recording import CpuRecorder, Pool, constant, empty
from headwater.mixers import numerics
from headwater.mixers.batch import StepBatch
from headwater.mixers.numerics import Numerics
from headwater.models import decode_graphs
from headwater.models.hybrid import HybridModel
from headwater.models.load import load_model
from tests.checkpoints import SMALLEST
from tests.models.decode_rig import Pair

WHOLE = [
    "qwen3_5", "qwen3", "mamba2", "mamba", "jamba", "qwen3_window", "qwen3_windows_only", "bamba", "headwater_tiny",
    "qwen3_moe", "minimax",
]  # fmt: skip
READING = ["ling", "qwen3_window_odd_heads"]  # rotations looked up, torch's attention


class Noting(CpuRecorder):
    """A recorder that notes whether work was repeatable."""

    def __init__(self) -> None:
        super().__init__()
        self.repeatable: list[bool] = []

    def record(self, work):
        done, again = super().record(work)
        self.repeatable.append(again is not work)
        return done, again


RECORD_A_STEP = """
import sys, torch
from headwater.kernels.recording import CpuRecorder
result, again = CpuRecorder().record(lambda: torch.ones(2) + 1)
assert torch.equal(again(), torch.full((2,), 2.0))
print("torch._dynamo" in sys.modules)
"""


def test_recording_does_not_import_torchs_compiler() -> None:
    run = subprocess.run([sys.executable, "-c", RECORD_A_STEP], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


def compare(model: HybridModel, lengths: tuple[int, ...], steps: list[list[int]]) -> list[bool]:
    """Decode these sequences, step by step, both ways; return whether each shape was repeatable."""
    pair = Pair(model, lengths, lambda arena, states: Noting())
    for who in steps:
        pair.decode(who)
    return pair.graphs.recorder.repeatable


@pytest.fixture(autouse=True)
def compiled():
    """Products by kernels, whatever another test has left."""
    before = numerics.current()
    numerics.use(Numerics("compiled"))
    yield
    numerics.use(before)


@pytest.mark.parametrize("name", WHOLE)
def test_a_replayed_step_has_the_bits_of_an_eager_one(name: str, checkpoint: Callable[[str], Path]) -> None:
    model = load_model(checkpoint(name), "float32").model
    steps = [[0, 1], [1, 0], [2, 1], [0], [2], [0, 1], [2, 0, 1], [0, 2, 1], [1]]
    assert compare(model, (9, 63, 2), steps) == [True] * 3, "of two sequences, of one, and of three"


def test_steps_with_several_rows_of_a_sequence_are_recorded_second_time(
    checkpoint: Callable[[str], Path],
) -> None:
    model = load_model(checkpoint("qwen3_5"), "float32").model
    steps = [[0, 0, 1], [0, 1], [1, 1, 1, 0], [0, 1], [0, 1, 1], [1, 0, 0], [0, 0, 1]]
    assert compare(model, (9, 63), steps) == [True] * 2, "of two sequences with two rows, and with three"


# of two sequences: drafts, and accepted ones of the step before; four steps of one shape, and others between them
DRAFTING = [
    ((2, 1), ()), ((1, 2), (2, 1)), ((3, 0), (1, 0)), ((0, 3), (3, 0)), ((0, 0), (0, 2)), ((1, 0), (0, 0)),
    ((2, 1), (1, 0)), ((1, 2), (2, 1)), ((0, 0), (0, 0)), ((3, 0), ()), ((0, 0), (3, 0)), ((0, 1), ()), ((1, 0), ()),
    ((0, 0), (1, 0)),
]  # fmt: skip
DRAFTED = sorted({*WHOLE} - {"qwen3_window", "qwen3_windows_only"})


# of three: 9, 10, 9, 10, 8, 9, 6, 8, 9 and 10 rows
FILLED_UP = [
    ((2, 2, 2), ()), ((3, 1, 3), (2, 0, 1)), ((1, 4, 1), (3, 1, 0)), ((0, 3, 4), (0, 4, 1)), ((2, 3, 0), (0, 0, 4)),
    ((5, 0, 1), (2, 0, 0)), ((0, 3, 0), (5, 0, 1)), ((3, 1, 1), (0, 3, 0)), ((1, 1, 4), (3, 1, 0)),
    ((4, 2, 1), (1, 0, 4)),
]  # fmt: skip


def decode_with_drafts(model: HybridModel, steps=DRAFTING, lengths: tuple[int, ...] = (9, 61)) -> Pair:
    pair = Pair(model, lengths, lambda arena, states: Noting())
    for drafted, accepted in steps:
        who = [number for number, n in enumerate(drafted) for _ in range(1 + n)]
        pair.decode(who, drafted if any(drafted) else (), accepted)
    return pair


@pytest.mark.parametrize("name", DRAFTED)
def test_a_replayed_step_with_drafts_has_the_bits_of_an_eager_one(name: str, checkpoint: Callable[[str], Path]) -> None:
    recorder = decode_with_drafts(load_model(checkpoint(name), "float32").model).graphs.recorder
    assert len(recorder.repeatable) >= 3  # shapes
    assert all(recorder.repeatable)


@pytest.mark.parametrize("name", DRAFTED)
def test_steps_with_drafts_are_filled_up_to_few_shapes(name: str, checkpoint: Callable[[str], Path]) -> None:
    graphs = decode_with_drafts(load_model(checkpoint(name), "float32").model, FILLED_UP, (9, 61, 2)).graphs
    assert all(graphs.recorder.repeatable)
    rows = [3 + sum(drafted) for drafted, _ in FILLED_UP]
    assert {9, 10} <= {*rows}
    assert {(shape.rows, shape.sequences) for shape in graphs._known} >= {(9, 3), (10, 4)}


def test_the_control_a_step_filled_up_with_other_rows_differs(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def zeros(known_B: torch.Tensor, new_B: torch.Tensor) -> None:
        known_B.zero_()
        known_B[: len(new_B)] = new_B

    monkeypatch.setattr(decode_graphs, "_fill", zeros)
    with pytest.raises(AssertionError):
        decode_with_drafts(load_model(checkpoint("qwen3_5"), "float32").model, FILLED_UP, (9, 61, 2))


def test_a_step_with_drafts_is_replayed_in_bfloat16(checkpoint: Callable[[str], Path]) -> None:
    recorder = decode_with_drafts(load_model(checkpoint("qwen3_5"), "bfloat16").model).graphs.recorder
    assert all(recorder.repeatable)


def test_the_rows_of_a_recorded_step_are_those_of_each_step(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: with the rows of the step that was recorded, bits differ."""
    take = decode_graphs.AcceptedRows.take

    def once(rows: decode_graphs.AcceptedRows, batch: StepBatch) -> None:
        if not rows.own_B.any():
            take(rows, batch)

    monkeypatch.setattr(decode_graphs.AcceptedRows, "take", once)
    with pytest.raises(AssertionError):
        decode_with_drafts(load_model(checkpoint("qwen3_5"), "float32").model)


@pytest.mark.parametrize("name", ["qwen3_window", "qwen3_windows_only"])
def test_a_step_whose_drafts_are_in_rings_stays_eager(name: str, checkpoint: Callable[[str], Path]) -> None:
    recorder = decode_with_drafts(load_model(checkpoint(name), "float32").model).graphs.recorder
    assert not all(recorder.repeatable)


@pytest.mark.parametrize("name", sorted({*SMALLEST.values()} - {*WHOLE, *READING}))
def test_other_families_have_equal_bits_whether_repeatable_or_not(name: str, checkpoint: Callable[[str], Path]) -> None:
    model = load_model(checkpoint(name), "float32").model
    assert len(compare(model, (9, 63), [[0, 1], [1, 0], [0], [1], [0, 1]])) == 2


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_products_with_parts_of_several_formats_are_replayed(weights: str, checkpoint: Callable[[str], Path]) -> None:
    model = load_model(checkpoint("headwater_tiny"), "float32", weights=weights).model
    assert compare(model, (9, 63, 2), [[0], [0, 1], [2, 1], [2], [1, 0]]) == [True] * 2


def test_a_model_in_bfloat16_is_replayed(checkpoint: Callable[[str], Path]) -> None:
    model = load_model(checkpoint("qwen3_5"), "bfloat16").model
    assert compare(model, (9, 63, 2), [[0], [0, 1], [2, 1], [2], [1, 0]]) == [True] * 2


@pytest.mark.parametrize("name", READING)
def test_a_step_of_which_python_reads_numbers_stays_eager(name: str, checkpoint: Callable[[str], Path]) -> None:
    model = load_model(checkpoint(name), "float32").model
    assert compare(model, (9, 63), [[0, 1], [1, 0], [0, 1], [0, 1]]) == [False]


def test_longer_sequences_are_recorded_for_themselves(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_graphs, "MIN_PAGES", 1)
    monkeypatch.setattr(decode_graphs, "MIN_TOKENS", 64)
    steps = [[0], [0], [0], [0], [1], [1]]
    for name, recordings in (("qwen3", 3), ("qwen3_windows_only", 3), ("mamba2", 3)):
        model = load_model(checkpoint(name), "float32").model
        assert compare(model, (62, 128), steps) == [True] * recordings, name


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.tolist(),
        lambda x: x.max().item(),
        lambda x: int(x.max()),
        lambda x: x[x > 1],
        lambda x: x.nonzero(),
        lambda x: torch.bincount(x.long()),
        lambda x: x.repeat_interleave(x.long()),
    ],
)
def test_work_of_which_python_reads_numbers_is_not_repeated(read: Callable[[torch.Tensor], object]) -> None:
    def work() -> torch.Tensor:
        read(torch.arange(4.0))
        return torch.ones(1)

    assert CpuRecorder().record(work)[1] is work


def test_operations_are_repeated_without_python() -> None:
    x, ran = torch.ones(3), []

    def work() -> torch.Tensor:
        ran.append(1)
        y = x * 2
        y[1:] += x[1:]
        return y.view(3, 1).flatten()

    with torch.inference_mode():
        done, again = CpuRecorder().record(work)
        assert done.tolist() == [2, 3, 3]
        x += 1
        assert again().tolist() == [4, 6, 6]
    assert len(ran) == 1


def test_constants_are_not_computed_again() -> None:
    x = torch.ones(3)

    def work() -> torch.Tensor:
        with constant():
            doubled = x * 2
            most = int(doubled.max())
        return doubled + most

    _, again = CpuRecorder().record(work)
    x += 1
    assert again().tolist() == [4.0] * 3


def test_a_recording_that_fails_leaves_none() -> None:
    def work() -> torch.Tensor:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        CpuRecorder().record(work)
    assert recording.current() is None


def test_memory_of_dropped_results_is_used_again() -> None:
    pool = Pool()
    first = pool.empty((4, 1000), torch.float32)
    second = pool.empty((4, 1000), torch.float32)
    at = first.data_ptr()
    assert second.data_ptr() != at
    view = first[:, 3:]
    del first
    assert pool.empty((4, 1000), torch.float32).data_ptr() != at, "a view is left"
    del view
    assert pool.empty((4000,), torch.bfloat16).data_ptr() == at
    assert pool.empty((5, 1000), torch.float32).data_ptr() not in (at, second.data_ptr()), "too small"


def test_memory_outside_recordings_is_fresh() -> None:
    kept = [empty(3, 5) for _ in range(3)]
    assert len({tensor.data_ptr() for tensor in kept}) == 3
    assert kept[0].shape == (3, 5)
