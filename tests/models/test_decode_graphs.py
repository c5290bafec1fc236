"""Decode steps that are recorded and replayed: the bits of eager ones, whatever changed since they were recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="no Triton here: it comes with the test extra")

from headwater.memory.arena import Arena
from headwater.memory.slots import StateMemory
from headwater.mixers.batch import StepBatch
from headwater.mixers.gpu import attention as gpu
from headwater.models import decode_graphs
from headwater.models.decode_graphs import CudaRecorder
from headwater.models.hybrid import HybridModel
from headwater.models.load import load_model
from tests.checkpoints import SMALLEST
from tests.covering import cells
from tests.models.decode_rig import Pair, Replaying, decode, prefilled
from tests.replay import Replay, Waited, recorded

pytestmark = pytest.mark.usefixtures("wide_blocks")


def recorder_of(arena: Arena, states: StateMemory) -> Replay:
    return Replay(arena.pages, states.bytes_RB)


@dataclass
class Recorded:
    """A model whose steps are recorded: whatever waits is an error."""

    model: HybridModel

    def forward(self, batch, arena, states) -> torch.Tensor:
        with recorded():
            return self.model.forward(batch, arena, states)


REPLAYED = ("qwen3_window_odd_heads", "kimi_linear", "mamba2", "qwen3_5", "jamba")


@pytest.mark.parametrize("name", cells(REPLAYED, lambda name: name in REPLAYED[:2]))
def test_a_replayed_step_has_the_bits_of_an_eager_one(
    name: str, gpu_path: Callable[[bool], None], checkpoint: Callable[[str], Path]
) -> None:
    gpu_path(True)
    model = load_model(checkpoint(name), "float32").model
    pair = Pair(model, (9, 63, 2), recorder_of)
    for who in ([0, 1], [2, 1], [0], [2], [1, 0]):
        pair.decode(who)
    assert pair.graphs.recorder.count == 2, "of two sequences, and of one"


def test_longer_page_table_is_recorded_again(
    gpu_path: Callable[[bool], None], checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_path(True)
    monkeypatch.setattr(decode_graphs, "MIN_PAGES", 1)
    monkeypatch.setattr(gpu, "SPLIT", 64)
    model = load_model(checkpoint("qwen3"), "float32").model
    pair, counts = Pair(model, (63, 127, 190), recorder_of), []
    for who in ([0], [0], [0, 1], [0, 1], [0, 1], [0, 2], [2, 0]):
        pair.decode(who)
        counts.append(pair.graphs.recorder.count)
    assert counts == [1, 2, 3, 4, 4, 4, 4], "of 1 page; of 2; of two sequences with 2 pages; with 4"
    assert len(pair.graphs) == 4


def test_only_wanted_rows_have_logits(gpu_path: Callable[[bool], None], checkpoint: Callable[[str], Path]) -> None:
    gpu_path(True)
    model = load_model(checkpoint("mamba2"), "float32").model
    replayed = prefilled(Replaying(model, recorder_of), (5, 6, 7))
    step = replayed.model.forward
    wanted = []

    def forward(batch: StepBatch, *memory) -> torch.Tensor:
        return step(replace(batch, logits_row_R=torch.tensor(wanted, dtype=torch.int64)), *memory)

    replayed.model.forward = forward
    for wanted in ([0, 1, 2], [2, 0], []):
        assert decode(replayed, [0, 1, 2], 400).shape == (len(wanted), model.spec.vocab_size)


@pytest.mark.parametrize("name", SMALLEST.values())
def test_no_family_waits_for_the_device(
    name: str, gpu_path: Callable[[bool], None], checkpoint: Callable[[str], Path]
) -> None:
    gpu_path(True)
    bench = prefilled(load_model(checkpoint(name), "float32").model, (3, 2))
    bench.model = Recorded(bench.model)
    decode(bench, [0, 1], 400)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.max().item(),
        lambda x: int(x.max()),
        lambda x: x.tolist(),
        lambda x: x[x > 1],
        lambda x: x.nonzero(),
        lambda x: x.repeat_interleave(x.long()),
        lambda x: torch.tensor([1, 2]),
        lambda x: torch.zeros(3),
    ],
)
def test_wait_for_the_device_is_detected(wait: Callable[[torch.Tensor], object]) -> None:
    with torch.inference_mode(), recorded(), pytest.raises(Waited):
        wait(torch.arange(4.0, device="cpu"))


def test_a_replay_runs_no_python() -> None:
    x, ran = torch.ones(3), []

    def work() -> torch.Tensor:
        ran.append(1)
        return (x.view(3, 1) + len(ran)).flatten()

    done, again = Replay().record(work)
    assert torch.equal(done, torch.full((3,), 2.0))
    x += 1
    assert torch.equal(again(), torch.full((3,), 4.0)), "the number is that of the second run, the tensor is as it is"
    assert len(ran) == 2


# -- CUDA's recorder, with graphs that are none ------------------------------------------------------------------


@dataclass
class Cuda:
    """Stand-in for the part of `torch.cuda` that the recorder uses; it notes the calls."""

    fails: bool = False
    calls: list[str] = field(default_factory=list)

    def graph_pool_handle(self) -> str:
        return "pool"

    def CUDAGraph(self) -> Cuda:
        return self

    @contextmanager
    def graph(self, graph: object, pool: str, capture_error_mode: str) -> Iterator[None]:
        assert (graph, pool, capture_error_mode) == (self, "pool", "thread_local")
        self.calls.append("capture")
        yield
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")

    def replay(self) -> None:
        self.calls.append("replay")


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_that_cuda_cannot_record_stays_eager(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(fails)
    monkeypatch.setattr(decode_graphs.torch, "cuda", cuda)
    results = iter(torch.arange(4))

    def work() -> torch.Tensor:
        cuda.calls.append("work")
        return next(results)

    done, again = CudaRecorder().record(work)
    assert (int(done), cuda.calls) == (0, ["work", "capture", "work"])
    assert [int(again()), int(again())] == ([2, 3] if fails else [1, 1])
    assert cuda.calls[3:] == (["work"] if fails else ["replay"]) * 2
