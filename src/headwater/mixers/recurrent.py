"""What all layers with a recurrent state share: slices become chunks, states move on, decoding is one batch.

A mixer says how rows are projected, what chunks contribute, how states move on, and how an output is made of what was
read.

N rows of a step (prefill, then decode, then idle), P prefill rows, B decoding sequences, S sequences of a block,
n chunks, t = 64 tokens, C channels, D model width, R rows of the state memory, X whatever the mixer takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from headwater.mixers.batch import Round, Slice, StepBatch
from headwater.mixers.chunks import CHUNK, Chunk, blocks
from headwater.mixers.composing import SegmentState, compose_into
from headwater.mixers.convolution import ShortConvolution
from headwater.mixers.gpu import has_kernels
from headwater.mixers.linear import Linear

if TYPE_CHECKING:  # it needs Triton, which is there with a GPU only
    from headwater.mixers.gpu.path import GpuPath, Kernels

Prepared = TypeVar("Prepared")
DECODED_AT_ONCE = 1 << 20  # elements of states: 4 MB, which stay in cache from when they decay until they are read


@dataclass(frozen=True)
class Rows:
    """All rows of a step between the layer's two projections.

    A recurrence takes tokens in chunks of 64. A chunk of fewer tokens is filled up with rows whose gates are zeros (and
    whose `mixed` is zeros before the convolution): with such a row the state must stay as it is.
    """

    mixed_NC: torch.Tensor  # inputs of the convolution, or of the recurrence where there is none
    gates_NX: torch.Tensor  # float32, one or more trailing dimensions: decays, steps, writing strengths
    z_NX: torch.Tensor | None  # gates of the output
    out_NX: torch.Tensor  # what `out_proj` takes, to be written; one or more trailing dimensions


@dataclass(frozen=True)
class LayerState:
    """All rows of one layer's state memory. Rows may be strided; each is contiguous."""

    recurrent: torch.Tensor  # [R, X] float32
    conv: torch.Tensor | None = None  # [R, C, W − 1]: the last inputs of the convolution, oldest first
    transition: torch.Tensor | None = None  # [R, X] float32: the product of all transitions since it was the identity
    segments: tuple[SegmentState, ...] = ()  # that slices compose their states with


class RecurrentMixer(ABC, Generic[Prepared]):
    """The template of a layer; owns weights only."""

    out_proj: Linear
    convolution: ShortConvolution | None = None
    chunks_a_block: int  # whose intermediates stay in cache
    read_shape: tuple[int, ...]  # of what 64 tokens read of their state: heads first, [H, t, V], if not said otherwise

    # -- what a mixer is -------------------------------------------------------

    @abstractmethod
    def project(self, x_ND: torch.Tensor, batch: StepBatch) -> Rows:
        """Everything that is done row by row before convolution and recurrence; `out_NX` is allocated here."""

    @abstractmethod
    def prepare(self, mixed_ntC: torch.Tensor, gates_ntX: torch.Tensor) -> Prepared:
        """All work on n chunks that needs no state; `mixed_ntC` is float32, and convolved where there is one."""

    @abstractmethod
    def advance_into(self, prepared: Prepared, at: slice, state_SX: torch.Tensor, read_SX: torch.Tensor) -> None:
        """One chunk of each of S sequences, those `at` the prepared ones: states move on in place, reads are written.

        `state_SX` is contiguous.
        """

    @abstractmethod
    def transition_into(self, prepared: Prepared, at: slice, transition_SX: torch.Tensor) -> None:
        """Apply the transitions of the same chunks to running ones: T ← T_chunk · T, in place (contiguous)."""

    @abstractmethod
    def identity(self) -> torch.Tensor:
        """The transition of no tokens, in this family's smallest form, float32."""

    @abstractmethod
    def carried(self, transition_X: torch.Tensor, state_X: torch.Tensor) -> torch.Tensor:
        """T·S, new: what tokens of that transition would make of one sequence's state if they wrote nothing."""

    def moved(self, zero_start_X: torch.Tensor, by: int) -> torch.Tensor:
        """R(by)·S₀: the state of tokens that stand `by` positions further on. The same, unless keys rotate."""
        return zero_start_X

    @abstractmethod
    def decode(self, mixed_BC: torch.Tensor, gates_BX: torch.Tensor, state_BX: torch.Tensor) -> torch.Tensor:
        """One token of each of B sequences: what it reads, [B, ...]; the states (strided by sequence) move on in place.

        `mixed_BC` is float32, and convolved where there is a convolution.
        """

    @abstractmethod
    def finish_into(self, rows: Rows, at: slice, read_nX: torch.Tensor) -> None:
        """Write `out_NX` of some rows (norm, output gate) from what they read, one token a row."""

    def by_token(self, read_X: torch.Tensor) -> torch.Tensor:
        """What one chunk read, `read_shape`, a token a row: [t, ...]."""
        return read_X.transpose(0, 1)

    def kernels(self) -> Kernels | None:
        """Triton kernels of the recurrence; without them, chunks and tokens are worked through on a GPU, too."""
        return None

    # -- what is the same for all ----------------------------------------------

    def forward(self, x_ND: torch.Tensor, batch: StepBatch, state: LayerState) -> torch.Tensor:
        """Rows of a step in, rows out; sequences' states move on in `state`, and are copied to the rows of saves."""
        rows = self.project(x_ND, batch)
        rows.out_NX[batch.decode_rows.stop :] = 0
        if has_kernels(x_ND.device):
            self._on_gpu_into(rows, batch, state)
        else:
            for together in batch.rounds:
                self._prefill_into(rows, together, state)
            if batch.n_decode:
                self._decode_into(rows, batch, state)
        return self.out_proj(rows.out_NX.flatten(1), batch.n_prefill)

    @cached_property
    def gpu(self) -> GpuPath:
        from headwater.mixers.gpu.path import GpuPath

        return GpuPath(self.kernels(), self.decode, self.convolution)

    def _on_gpu_into(self, rows: Rows, batch: StepBatch, state: LayerState) -> None:
        for together in batch.rounds:
            if self.gpu.kernels is None:
                self._prefill_into(rows, together, state)
            else:
                self._prefill_on_gpu_into(rows, together, state)
        if batch.n_decode:
            at = batch.decode_rows
            read_BX = self.gpu.decode(rows.mixed_NC[at], rows.gates_NX[at], batch, state.recurrent, state.conv)
            self.finish_into(rows, at, read_BX)

    def _prefill_on_gpu_into(self, rows: Rows, together: Round, state: LayerState) -> None:
        compose_into(self, state, together.slices)
        self._transitions_into(rows, together.slices, state)
        mixed_PC, gates_PX = together.of(rows.mixed_NC), together.of(rows.gates_NX)
        if not len(mixed_PC):
            return
        read_PX = self.gpu.prefill(mixed_PC, gates_PX, together.ragged, state.recurrent, state.conv)
        for at, read_nX in zip(together.rows, read_PX.split([at.stop - at.start for at in together.rows]), strict=True):
            self.finish_into(rows, at, read_nX)

    def _transitions_into(self, rows: Rows, slices: tuple[Slice, ...], state: LayerState) -> None:
        """What kernels leave out, made of chunks as on the CPU; it needs the convolution's inputs as they were before.

        So a slice's states have the bits of the kernel, whether its transition is wanted or not.
        """
        for s in slices:
            for _, chunks in blocks([s], self.chunks_a_block) if s.transition is not None else ():
                prepared = self._prepared(rows, chunks, self._windows(rows, chunks, state))
                for i in range(len(chunks)):
                    self._move_transitions(prepared, i, [s], state)

    def _prefill_into(self, rows: Rows, together: Round, state: LayerState) -> None:
        compose_into(self, state, together.slices)
        slices = sorted(together.slices, key=lambda s: -s.length)
        for at in range(0, len(slices), self.chunks_a_block):
            group = slices[at : at + self.chunks_a_block]
            # In place where there is one sequence; several must be contiguous to be one batch, and are copied.
            slots = [s.slot for s in group]
            state_SX = state.recurrent[slots[0]].unsqueeze(0) if len(slots) == 1 else state.recurrent[slots]
            for n_active, chunks in blocks(group, self.chunks_a_block):
                self._block_into(rows, chunks, state, state_SX[:n_active])

    def _block_into(self, rows: Rows, chunks: list[Chunk], state: LayerState, state_SX: torch.Tensor) -> None:
        """Several chunks of each of a few sequences, in order; `state_SX` moves on in place."""
        n_active = len(state_SX)
        window_nLX = self._windows(rows, chunks, state)
        prepared = self._prepared(rows, chunks, window_nLX)
        read_nX = state_SX.new_empty(len(chunks), *self.read_shape)
        for first in range(0, len(chunks), n_active):
            at = slice(first, first + n_active)
            self.advance_into(prepared, at, state_SX, read_nX[at])
            self._move_transitions(prepared, first, [chunk.slice for chunk in chunks[at]], state)
            for i, chunk in enumerate(chunks[at]):
                for row in chunk.state_rows:
                    state.recurrent[row] = state_SX[i]
                    if self.convolution is not None and state.conv is not None:
                        state.conv[row] = self.convolution.tail(window_nLX[first + i], chunk.length)
        for chunk, read_X in zip(chunks, read_nX, strict=True):
            self.finish_into(rows, chunk.rows, self.by_token(read_X)[: chunk.length])

    def _prepared(self, rows: Rows, chunks: list[Chunk], window_nLX: torch.Tensor) -> Prepared:
        gates_ntX = rows.gates_NX.new_zeros(len(chunks), CHUNK, *rows.gates_NX.shape[1:])
        for gates_tX, chunk in zip(gates_ntX, chunks, strict=True):
            gates_tX[: chunk.length] = rows.gates_NX[chunk.rows]
        return self.prepare(self.convolution(window_nLX) if self.convolution else window_nLX, gates_ntX)

    def _windows(self, rows: Rows, chunks: list[Chunk], state: LayerState) -> torch.Tensor:
        """What `prepare` takes, before the convolution: float32, zeros fill it up."""
        if self.convolution is not None and state.conv is not None:
            return self.convolution.windows(rows.mixed_NC, chunks, state.conv)
        mixed_NC, adjacent = rows.mixed_NC, slice(chunks[0].first, chunks[0].first + len(chunks) * CHUNK)
        if chunks[-1].slice is chunks[0].slice and chunks[-1].rows.stop == adjacent.stop:  # one sequence, all full
            return mixed_NC[adjacent].float().unflatten(0, (len(chunks), CHUNK))
        mixed_ntC = torch.empty((len(chunks), CHUNK, *mixed_NC.shape[1:]), dtype=torch.float32, device=mixed_NC.device)
        for mixed_tC, chunk in zip(mixed_ntC, chunks, strict=True):
            mixed_tC[: chunk.length] = mixed_NC[chunk.rows]
            mixed_tC[chunk.length :] = 0
        return mixed_ntC

    def _move_transitions(self, prepared: Prepared, first: int, slices: list[Slice], state: LayerState) -> None:
        """Those of the sequences that want theirs."""
        for i, s in enumerate(slices):
            if s.transition is not None and state.transition is not None:
                self.transition_into(prepared, slice(first + i, first + i + 1), state.transition[s.transition][None])

    def _decode_into(self, rows: Rows, batch: StepBatch, state: LayerState) -> None:
        """All decoding sequences, a few at a time where states are large."""
        first, slots = batch.decode_rows.start, batch.decode_slot_B.tolist()
        n_at_once = max(1, DECODED_AT_ONCE * len(state.recurrent) // state.recurrent.numel())
        for at in range(0, len(slots), n_at_once):
            some = slots[at : at + n_at_once]
            self._decode_some_into(rows, slice(first + at, first + at + len(some)), some, state)

    def _decode_some_into(self, rows: Rows, at: slice, slots: list[int], state: LayerState) -> None:
        """Those of some rows. Where slots are adjacent, states move on where they are, else in a copy."""
        one_by_one = slice(slots[0], slots[0] + len(slots))
        adjacent = slots == list(range(one_by_one.start, one_by_one.stop))
        slot_B = torch.empty(0) if adjacent else torch.tensor(slots, device=state.recurrent.device)
        mixed_BC = rows.mixed_NC[at]
        if self.convolution is None or state.conv is None:
            mixed_BC = mixed_BC.float()
        else:
            conv_BCw = state.conv[one_by_one] if adjacent else state.conv.index_select(0, slot_B)
            mixed_BC = self.convolution.decode(mixed_BC, conv_BCw)
            if not adjacent:
                state.conv.index_copy_(0, slot_B, conv_BCw)
        state_BX = state.recurrent[one_by_one] if adjacent else state.recurrent.index_select(0, slot_B)
        read_BX = self.decode(mixed_BC, rows.gates_NX[at], state_BX)
        if not adjacent:
            state.recurrent.index_copy_(0, slot_B, state_BX)
        self.finish_into(rows, at, read_BX)
