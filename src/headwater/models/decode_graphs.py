"""Recorded decode steps: the launches of a step are recorded once for a number of sequences, then replayed.

On a GPU they are CUDA graphs, on a CPU the calls of kernels. A recorded step runs on memory that stays where it is. So
a step's tokens, positions, slots and page tables are copied into tensors that are there to stay; lengths and pages
follow from them in the kernels. On a CPU which rows are of one sequence, and which are drafts, is copied, too. The
launches of layers must depend only on numbers of rows and sequences. Where page tables are filled up nothing is read,
and a step with drafts is filled up with copies of its last row, so that fewer numbers of rows come up: a replayed step
has the bits of an eager one. A result is valid until the next step.

B decoding sequences, T pages of a table, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol

import numpy as np
import torch

from headwater import kernels
from headwater.kernels.recording import IDLE
from headwater.memory.arena import Arena
from headwater.memory.slots import StateMemory
from headwater.mixers import numerics
from headwater.mixers.batch import DROPPED, DraftRows, RecordedAccepted, RecordedBatch, StepBatch, WithAccepted
from headwater.models.hybrid import HybridModel

MIN_PAGES = 16  # of a recorded page table; longer ones are powers of two
MIN_ACCEPTED = 32  # accepted drafts for which a step is recorded that has or had any; more are powers of two
MIN_TOKENS = 1024  # of a recorded sequence without pages
STEPS_OF_ROWS = ((8, 1), (16, 2), (32, 4))  # (most rows, multiple): padded sizes of steps with drafts

Work = Callable[[], torch.Tensor]

log = logging.getLogger("headwater.models")


class Recorder(Protocol):
    """Recorder of work that can be repeated without running its Python."""

    takes_chains: bool  # steps with several rows of a sequence, too

    def record(self, work: Work) -> tuple[torch.Tensor, Work]:
        """Do the work once; return its result, and a function that repeats it on the same memory.

        The function is `work` if it cannot be recorded.
        """


class CudaRecorder:
    """CUDA graphs. All take their memory from one pool: they run one after the other, and only results are read."""

    takes_chains = False

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Work) -> tuple[torch.Tensor, Work]:
        """The work is done before it is captured: that compiles kernels and sets up libraries; capture runs nothing.

        If capture fails, the function is `work`.
        """
        done = work()
        graph = torch.cuda.CUDAGraph()
        collected = gc.isenabled()
        gc.disable()  # a graph that is destroyed while another one is captured ends the capture
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = work()
        except RuntimeError as error:
            log.warning("a decode step cannot be recorded as a CUDA graph, and stays without: %s", error)
            return done, work
        finally:
            if collected:
                gc.enable()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return done, replay


@dataclass(frozen=True)
class Shape:
    """Sizes that a step is recorded for."""

    rows: int
    pages: int  # of a page table; 0 for a model without pages
    tokens: int  # at most, of a sequence; 0 if layers do not ask
    sequences: int
    accepted: int | None  # room for drafts of the steps before; None: a step without drafts, and after one

    @classmethod
    def of(cls, batch: StepBatch, page_size: int, filled_up: bool = False) -> Shape:
        """Return the shape of a step; `filled_up`: rounded up to a recorded size, for a step padded by its last row."""
        pages = max(table.shape[0] for table in batch.decode_tables)
        pages = max(MIN_PAGES, _power_of_two(pages)) if pages else 0
        if pages or batch.position_N.device.type != "cpu":
            tokens = pages * page_size
        else:
            tokens = max(MIN_TOKENS, _power_of_two(batch.longest))
        accepted = max(MIN_ACCEPTED, _power_of_two(sum(batch.accepted))) if batch.speculates else None
        rows, sequences = batch.n_decode, len(batch.firsts) - 1
        if filled_up and accepted is not None:
            rows, sequences = filled_up_rows(rows), _power_of_two(sequences)
        return cls(rows, pages, tokens, sequences, accepted)

    @property
    def has_chains(self) -> bool:
        """True if sequences have several rows, or had drafts."""
        return self.rows > self.sequences or self.accepted is not None


class RecordedRows:
    """Sequences of a recorded step: their slots, first rows and first drafts, in the memory that kernels read."""

    def __init__(self, sequences: int) -> None:
        self.sequences = (
            np.zeros(sequences, np.int64),
            np.zeros(sequences + 1, np.int64),
            np.zeros(sequences, np.int64),
        )

    def take(self, batch: StepBatch) -> None:
        """Copy the sequences of a step; those beyond them have no rows."""
        for known, new in zip(self.sequences, batch.decode_sequences, strict=True):
            known[: len(new)] = new
            known[len(new) :] = batch.n_decode
        self.sequences[0][len(batch.firsts) - 1 :] = 0


class AcceptedRows(RecordedRows):
    """The rows of a recorded step with accepted drafts of steps before; rows beyond those of sequences are idle."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape.sequences)
        assert shape.accepted is not None
        rows = shape.rows + shape.accepted
        self.position_W = torch.zeros(rows, dtype=torch.int64)
        self.own_B = torch.zeros(shape.rows, dtype=torch.int64)
        self.copies = np.zeros(rows, np.int64), np.zeros(shape.rows, np.int64)

    def take(self, batch: StepBatch) -> None:
        """Copy the rows of a step with accepted drafts."""
        whole = batch.with_accepted
        super().take(whole.batch)
        self.position_W[: whole.batch.n_decode] = whole.batch.position_N
        _fill(self.own_B, whole.own_B)
        sources, keeps = whole.copies
        self.copies[0][:] = IDLE
        self.copies[0][: len(sources)] = sources
        self.copies[1][:] = DROPPED
        self.copies[1][: len(keeps)] = keeps

    def whole(self) -> WithAccepted:
        """Return these rows as they are in this memory."""
        none = self.position_W[:0]  # no new tensor: a recorded step would make it again
        rows = RecordedBatch(
            token_N=none,
            position_N=self.position_W,
            slices=(),
            decode_slot_B=none,
            decode_tables=(none,) * len(self.position_W),
            logits_row_R=none,
            table_BT=none,
            most=0,
            recorded_sequences=self.sequences,
        )
        unread = DraftRows(none, none, none)
        return RecordedAccepted(rows, self.own_B, unread, unread, copies=self.copies)


@dataclass(frozen=True)
class Inputs:
    """Inputs of a recorded step, in the memory that its graph reads."""

    token_B: torch.Tensor
    position_B: torch.Tensor
    slot_B: torch.Tensor
    row_B: torch.Tensor  # all rows
    table_BT: torch.Tensor
    held: list[torch.Tensor]  # page tables that were copied last, a row of `table_BT` each
    most: int  # tokens, at most, of a sequence
    rows: RecordedRows | None  # of sequences with several rows
    accepted: AcceptedRows | None

    @classmethod
    def empty(cls, shape: Shape, device: torch.device) -> Inputs:
        row_B = torch.arange(shape.rows, device=device)
        token_B, position_B, slot_B = row_B.new_zeros(3, shape.rows)
        table_BT = row_B.new_zeros(shape.rows, shape.pages)
        rows = RecordedRows(shape.sequences) if shape.has_chains else None
        accepted = None if shape.accepted is None else AcceptedRows(shape)
        held = [row_B[:0]] * shape.rows
        return cls(token_B, position_B, slot_B, row_B, table_BT, held, shape.tokens, rows, accepted)

    def take(self, batch: StepBatch) -> None:
        """Copy the inputs of a step of the same shape; the last row stands for those that the step lacks."""
        at = batch.decode_rows
        _fill(self.token_B, batch.token_N[at])
        _fill(self.position_B, batch.position_N[at])
        _fill(self.slot_B, batch.decode_slot_B)
        if self.table_BT.shape[1]:
            self._take_tables(batch.decode_tables)
        if self.rows is not None:
            self.rows.take(batch)
        if self.accepted is not None:
            self.accepted.take(batch)

    def _take_tables(self, tables: Sequence[torch.Tensor]) -> None:
        """Copy page tables; those that are the last step's are there already. A table is never changed in place."""
        for i, table in zip_longest(range(len(self.held)), tables, fillvalue=tables[-1]):
            held, size = self.held[i], table.shape[0]
            if held.data_ptr() != table.data_ptr() or held.shape[0] != size:
                self.table_BT[i, :size] = table
                self.held[i] = table  # kept, so that no other table takes its place in memory

    def batch(self, like: StepBatch) -> RecordedBatch:
        """A step on this memory whose every row's logits are wanted.

        Its tensors are new views, since layers identify the values that they keep of a step by its tensors. Work that
        needs other memory than this, and so cannot be repeated, reads the sequences of `like`.
        """
        n = len(self.token_B)
        parents = (*like.parents, *range(like.n_decode - 1, n - 1)) if self.accepted is not None else like.parents
        return RecordedBatch(
            token_N=self.token_B.view(n),
            position_N=self.position_B.view(n),
            slices=(),
            decode_slot_B=self.slot_B.view(n),
            decode_tables=self.table_BT.unbind(0),
            logits_row_R=self.row_B,
            wants_all=True,
            parents=parents,
            drafted=like.drafted,
            accepted=like.accepted,
            table_BT=self.table_BT.view(self.table_BT.shape),
            most=self.most,
            recorded_sequences=None if self.rows is None else self.rows.sequences,
            whole=None if self.accepted is None else self.accepted.whole(),
        )


def cpu_recorder() -> Recorder | None:
    """Return a recorder of calls of kernels; None if these do not compute steps."""
    if not (kernels.available() and numerics.current().mode == "compiled"):
        return None
    from headwater.kernels.recording import CpuRecorder

    return CpuRecorder()


class DecodeGraphs:
    """The graphs of one model over its memory, each recorded when its shape first comes up."""

    def __init__(
        self,
        model: HybridModel,
        arena: Arena,
        states: StateMemory,
        recorder: Recorder,
        hidden_NC: torch.Tensor | None = None,
    ) -> None:
        """With `hidden_NC` every step writes the hidden states of its rows to the first rows of it."""
        self.model, self.arena, self.states, self.recorder = model, arena, states, recorder
        self.hidden_NC = hidden_NC
        self._known: dict[Shape, tuple[Inputs, Work] | None] = {}  # None: such a step cannot be recorded
        self._seen = set[Shape]()  # of steps with several rows of a sequence
        self._fills_up = False  # known once a step with drafts was recorded: else layers read the rows themselves
        self.was_new = False  # whether the last step was of a shape that later ones repeat faster

    @classmethod
    def over(
        cls, model: HybridModel, arena: Arena, states: StateMemory, hidden_NC: torch.Tensor | None = None
    ) -> DecodeGraphs | None:
        """Return the recorded steps of a model, or None without a recorder."""
        recorder = CudaRecorder() if arena.pages.device.type == "cuda" else cpu_recorder()
        return None if recorder is None else cls(model, arena, states, recorder, hidden_NC)

    def __len__(self) -> int:
        return len(self._known)

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Run a step without prefill, as `HybridModel.forward` does over this memory.

        A step with several rows of a sequence is recorded if one of its shape comes up again.
        """
        shape = Shape.of(batch, self.arena.page_size, self._fills_up)
        takes = self.recorder.takes_chains or not shape.has_chains
        self.was_new = takes and shape not in self._known
        if shape.has_chains and (not takes or self._is_new(shape)):
            return self._forward(batch)
        if shape not in self._known:
            logits_BV = self._record(shape, batch)
        elif (known := self._known[shape]) is not None:
            inputs, again = known
            inputs.take(batch)
            logits_BV = again()
        else:
            return self._forward(batch)
        return logits_BV[: batch.n_decode] if batch.wants_all else logits_BV[batch.logits_row_R]

    def _forward(self, batch: StepBatch) -> torch.Tensor:
        hidden_NC = None if self.hidden_NC is None else self.hidden_NC[: batch.n_decode]
        return self.model.forward(batch, self.arena, self.states, hidden_NC=hidden_NC)

    def _is_new(self, shape: Shape) -> bool:
        new = shape not in self._seen
        self._seen.add(shape)
        return new

    def _record(self, shape: Shape, batch: StepBatch) -> torch.Tensor:
        inputs = Inputs.empty(shape, batch.token_N.device)
        inputs.take(batch)

        def work() -> torch.Tensor:
            return self._forward(inputs.batch(batch))

        logits_BV, again = self.recorder.record(work)
        self._known[shape] = None if again is work else (inputs, again)
        self._fills_up = self._fills_up or (again is not work and shape.accepted is not None)
        return logits_BV


def filled_up_rows(rows: int) -> int:
    """Return the number of rows of the recorded step that runs a step with drafts of `rows` rows."""
    multiple = next((multiple for most, multiple in STEPS_OF_ROWS if rows <= most), 8)
    return -(-rows // multiple) * multiple


def _fill(known_B: torch.Tensor, new_B: torch.Tensor) -> None:
    """Copy elements to the front; the last one stands for all that are missing."""
    n = new_B.shape[0]
    known_B[:n] = new_B
    if n < known_B.shape[0]:
        known_B[n:] = new_B[-1]


def _power_of_two(n: int) -> int:
    """Return the least power of two that is no less than `n`."""
    return 1 << max(0, n - 1).bit_length()
