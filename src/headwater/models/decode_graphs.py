"""Decode steps as CUDA graphs: the launches of a step are recorded once for a number of sequences, then replayed.

A graph runs on memory that stays where it is. So a step's tokens, positions, slots and page tables are copied into
tensors that are there to stay; lengths and pages follow from them on the device. What layers launch for decoding
sequences must depend on their number alone. A graph's batch is exactly as high as the step's, and where page tables are
filled up nothing is read: a replayed step has the bits of an eager one.

B decoding sequences, T pages of a table, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from headwater.memory.arena import Arena
from headwater.memory.slots import StateMemory
from headwater.mixers.batch import StepBatch
from headwater.models.hybrid import HybridModel

LEAST_PAGES = 16  # of a recorded page table; longer ones are powers of two

Work = Callable[[], torch.Tensor]

log = logging.getLogger("headwater.models")


class Recorder(Protocol):
    """Recorder of work that can be repeated without running its Python."""

    def record(self, work: Work) -> tuple[torch.Tensor, Work]:
        """Do the work once; return its result, and a function that repeats it on the same memory."""


class CudaRecorder:
    """CUDA graphs. All take their memory from one pool: they run one after the other, and only results are read."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Work) -> tuple[torch.Tensor, Work]:
        """The work is done before it is captured: that compiles kernels and sets up libraries; capture runs nothing.

        Where capture fails, the work itself is what does it again.
        """
        done = work()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = work()
        except RuntimeError as error:
            log.warning("a decode step cannot be recorded as a CUDA graph, and stays without: %s", error)
            return done, work

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return done, replay


@dataclass(frozen=True)
class Inputs:
    """Inputs of a recorded step, in the memory that its graph reads."""

    token_B: torch.Tensor
    position_B: torch.Tensor
    slot_B: torch.Tensor
    table_BT: torch.Tensor

    @classmethod
    def empty(cls, n: int, width: int, device: torch.device) -> Inputs:
        zeros_B = torch.zeros(n, dtype=torch.int64, device=device)
        return cls(zeros_B, zeros_B.clone(), zeros_B.clone(), zeros_B.new_zeros(n, width))

    def take(self, batch: StepBatch) -> None:
        """Copy the inputs of a step with as many sequences, and tables of at most as many pages."""
        at = batch.decode_rows
        self.token_B.copy_(batch.token_N[at])
        self.position_B.copy_(batch.position_N[at])
        self.slot_B.copy_(batch.decode_slot_B)
        if self.table_BT.shape[1]:
            table_BT = batch.decode_table_BT
            self.table_BT[:, : table_BT.shape[1]] = table_BT

    def batch(self) -> StepBatch:
        """A step on this memory whose every row's logits are wanted.

        Its tensors are views that nobody has seen yet: what layers keep of a step, they know by its tensors.
        """
        n = len(self.token_B)
        return StepBatch(
            token_N=self.token_B.view(n),
            position_N=self.position_B.view(n),
            slices=(),
            decode_slot_B=self.slot_B.view(n),
            decode_tables=self.table_BT.unbind(0),
            logits_row_R=torch.arange(n, device=self.token_B.device),
        )


class DecodeGraphs:
    """The graphs of one model over its memory, each recorded when its shape first comes up."""

    def __init__(self, model: HybridModel, arena: Arena, states: StateMemory, recorder: Recorder) -> None:
        self.model, self.arena, self.states, self.recorder = model, arena, states, recorder
        self._known: dict[tuple[int, int], tuple[Inputs, Work]] = {}

    @classmethod
    def over(cls, model: HybridModel, arena: Arena, states: StateMemory) -> DecodeGraphs | None:
        """Return the graphs of a model, or None without CUDA."""
        return cls(model, arena, states, CudaRecorder()) if arena.pages.device.type == "cuda" else None

    def __len__(self) -> int:
        return len(self._known)

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Run a step without prefill, as `HybridModel.forward` does over this memory."""
        shape = batch.n_decode, _width(batch)
        if shape in self._known:
            inputs, again = self._known[shape]
            inputs.take(batch)
            logits_BV = again()
        else:
            logits_BV = self._record(shape, batch)
        return logits_BV[batch.logits_row_R]

    def _record(self, shape: tuple[int, int], batch: StepBatch) -> torch.Tensor:
        inputs = Inputs.empty(*shape, batch.token_N.device)
        inputs.take(batch)
        logits_BV, again = self.recorder.record(lambda: self.model.forward(inputs.batch(), self.arena, self.states))
        self._known[shape] = inputs, again
        return logits_BV


def _width(batch: StepBatch) -> int:
    """Return the pages of a recorded table that holds the batch's; 0 for a model without pages."""
    longest = max(len(table) for table in batch.decode_tables)
    return max(LEAST_PAGES, 1 << (longest - 1).bit_length()) if longest else 0
