"""The common part of all layers with a recurrent state: chunked prefill, batched decode, composition with segments.

A mixer (a subclass) defines the projections, the contribution of a chunk, the state update, and the output.

N rows of a step (prefill, then decode), P prefill rows, B decoding sequences, S sequences of a block,
n chunks, t = 64 tokens, H heads, M = n·H (or S·H): chunks and heads as one batch, K key width, V value width,
C channels, D model width, R rows of the state memory, X any trailing dimensions of the mixer.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from headwater.layers.layer import Layer
from headwater.mixers import tails
from headwater.mixers.batch import StepBatch
from headwater.mixers.convolution import ShortConvolution, windows
from headwater.mixers.drafts import Kept, with_accepted
from headwater.mixers.linear import Linear
from headwater.mixers.slices import CHUNK, Chunk, Round, Slice, blocks

Shape = TypeVar("Shape", bound=Layer)
DECODE_ELEMENTS = 1 << 20  # of states, 4 MB, which stay in cache between the decay and the read
_of_thread = threading.local()


@dataclass(frozen=True)
class Rows:
    """All rows of a step between the layer's two projections.

    A recurrence takes tokens in chunks of 64. A shorter chunk is padded with rows whose gates are zeros (and whose
    `mixed` is zeros before the convolution): such a row must leave the state as it is.
    """

    mixed_NC: Tensor  # inputs of the convolution, or of the recurrence if the layer has no convolution
    gates_NX: Tensor  # float32, one or more trailing dimensions: decays, steps, writing strengths
    z_NX: Tensor  # gates of the output; one or more trailing dimensions

    @cached_property
    def out_NX(self) -> Tensor:
        """Input of `out_proj`, to be written; as `z_NX`."""
        return torch.empty_like(self.z_NX, memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class SegmentState:
    """The states that one recurrent layer stores for a segment (HYPIC, section 4.2)."""

    transition_X: Tensor | None  # T of the segment's interior; None stands for the identity
    zero_start_X: Tensor  # S₀: the interior's state from a start at zeros, as if the segment began at position 0
    conv_Cw: Tensor | None  # last inputs of the convolution, if the layer has one


@dataclass(frozen=True)
class LayerState:
    """All rows of one layer's state memory. Rows may be strided; each is contiguous."""

    recurrent: Tensor  # [R, X] float32; last inputs of a short convolution, in the model's dtype
    conv: Tensor | None = None  # [R, C, W − 1]: the last inputs of the convolution, oldest first
    transition: Tensor | None = None  # [R, X] float32: the product of all transitions since it was the identity
    segments: tuple[SegmentState, ...] = ()  # segments of the step, which slices name by index
    kept: Kept = field(default_factory=Kept)  # inputs of drafts
    tail: Tensor | None = None  # [rows of the tail memory, tokens, X]: inputs that tails keep

    @contextmanager
    def put_back(self, slot_B: Tensor) -> Iterator[None]:
        """Put the states in these slots back at last: [B] int64."""
        parts = [self.recurrent] if self.conv is None else [self.recurrent, self.conv]
        before = [part_RX[slot_B] for part_RX in parts]
        yield
        for part_RX, before_BX in zip(parts, before, strict=True):
            part_RX[slot_B] = before_BX


class Prepared(Protocol):
    """The contributions of n chunks, head by head, which do not depend on the state before them."""

    def advance_into(self, at: slice, state_MKV: Tensor, read_MtV: Tensor) -> None:
        """Advance several sequences by one chunk each: update their states in place, write what they read.

        `at` are the chunks' rows (a run of M = sequences × heads). States are contiguous.
        """

    def transition_into(self, at: slice, transition_X: Tensor) -> None:
        """Apply the transition of one chunk to a running one: T ← T_chunk · T, in place (contiguous)."""


class RecurrentMixer(ABC, Generic[Shape]):
    """Template of a recurrent layer; owns weights only. A state is [H, K, V], or [K, V] in a layer without heads."""

    shape: Shape
    out_proj: Linear
    convolution: ShortConvolution | None = None
    chunks_a_block: int  # chunks whose intermediates fit in cache

    # -- the family's own part -------------------------------------------------

    @abstractmethod
    def products(self, x_ND: Tensor, batch: StepBatch) -> tuple[Tensor, ...]:
        """Compute the products with weights that come before the recurrence, [N, …] each."""

    @abstractmethod
    def without_gate(self, products: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return views of the products without the output's gate: the columns that a tail keeps of a token."""

    @abstractmethod
    def rows(self, products: tuple[Tensor, ...], batch: StepBatch) -> Rows:
        """Compute everything else before convolution and recurrence, row by row; may overwrite the products."""

    def project(self, x_ND: Tensor, batch: StepBatch) -> Rows:
        """Compute everything before convolution and recurrence, row by row."""
        return self.rows(self.products(x_ND, batch), batch)

    @abstractmethod
    def prepare(self, mixed_ntC: Tensor, gates_ntX: Tensor) -> Prepared:
        """Do all work on n chunks that needs no state; `mixed_ntC` is float32, and convolved if there is one."""

    def identity(self) -> Tensor:
        """Return the transition of no tokens, in this family's smallest form, float32: factors of one by default."""
        return torch.ones(self.shape.transition or ())

    def carried(self, transition_X: Tensor, state_X: Tensor) -> Tensor:
        """Return T·S in new memory: one sequence's state after tokens of that transition which write nothing."""
        return transition_X.view(*transition_X.shape, *(1,) * (state_X.dim() - transition_X.dim())) * state_X

    def moved(self, zero_start_X: Tensor, by: int) -> Tensor:
        """Return R(by)·S₀, the state of tokens that stand `by` positions later. The same, unless keys rotate."""
        return zero_start_X

    @abstractmethod
    def decode(self, mixed_BC: Tensor, gates_BX: Tensor, state_BX: Tensor) -> Tensor:
        """Process one token of each of B sequences: return what it reads, [B, ...]; update the states in place.

        `mixed_BC` is float32, and convolved if there is a convolution. States may be strided by sequence.
        """

    @abstractmethod
    def finish_into(self, rows: Rows, at: slice, read_nX: Tensor) -> None:
        """Write `out_NX` of some rows (norm, output gate) from what they read, one token a row."""

    # -- forward ---------------------------------------------------------------

    def forward(self, x_ND: Tensor, batch: StepBatch, state: LayerState) -> Tensor:
        """Compute the layer for all rows of a step; update the states in `state` and copy them to the rows of saves."""
        out_NX = tails.outputs(self, self.products(x_ND, batch), batch, state)
        return self.out_proj(out_NX, batch.n_prefill)

    def outputs(self, products: tuple[Tensor, ...], batch: StepBatch, state: LayerState) -> Tensor:
        """Return the inputs of the last projection from the products before the recurrence; update states."""
        rows = self.rows(products, batch)
        for together in batch.rounds:
            self.prefill_into(rows, together, state)
        batch.check_slots()
        decoding(rows, batch, state, self._decode_into)
        return rows.out_NX.flatten(1)

    def prefill_into(self, rows: Rows, together: Round, state: LayerState) -> None:
        """Compute one round of slices in chunks: write the outputs of its rows, update states and transitions."""
        self.compose_into(state, together.slices)
        slices = sorted(together.slices, key=lambda s: -s.length)
        for at in range(0, len(slices), self.chunks_a_block):
            group = slices[at : at + self.chunks_a_block]
            # One sequence is updated in place; several must be contiguous to be one batch, and are copied.
            slots = [s.slot for s in group]
            state_SX = state.recurrent[slots[0]].unsqueeze(0) if len(slots) == 1 else state.recurrent[slots]
            for n_active, chunks in blocks(group, self.chunks_a_block):
                self._block_into(rows, chunks, state, state_SX[:n_active])

    def _block_into(self, rows: Rows, chunks: list[Chunk], state: LayerState, state_SX: Tensor) -> None:
        """Compute several chunks of each of a few sequences, in order; update `state_SX` in place."""
        n_active = len(state_SX)
        reads: list[Tensor] = []
        window_nLX = self._windows(rows, chunks, state)
        prepared = self._prepared(rows, chunks, window_nLX)
        for first in range(0, len(chunks), n_active):
            at = slice(first, first + n_active)
            reads += advance(prepared, at, state_SX)
            self._apply_transitions(prepared, first, [chunk.parent for chunk in chunks[at]], state)
            for i, chunk in enumerate(chunks[at]):
                for row in chunk.state_rows:
                    state.recurrent[row] = state_SX[i]
                    if self.convolution is not None and state.conv is not None:
                        state.conv[row] = self.convolution.tail(window_nLX[first + i], chunk.length)
        for chunk, read_X in zip(chunks, reads, strict=True):
            self.finish_into(rows, chunk.rows, read_X.transpose(0, -2)[: chunk.length])

    def transitions_into(self, rows: Rows, slices: Sequence[Slice], state: LayerState) -> None:
        """Update the transitions of slices whose states a kernel updates; call it before the convolution's inputs move.

        So a slice's states have the bits of the kernel, whether its transition is needed or not.
        """
        for s in slices:
            for _, chunks in blocks([s], self.chunks_a_block) if s.transition is not None else ():
                prepared = self._prepared(rows, chunks, self._windows(rows, chunks, state))
                for i in range(len(chunks)):
                    self._apply_transitions(prepared, i, [s], state)

    def _prepared(self, rows: Rows, chunks: list[Chunk], window_nLX: Tensor) -> Prepared:
        gates_ntX = windows(rows.gates_NX, chunks)
        return self.prepare(self.convolution(window_nLX) if self.convolution else window_nLX, gates_ntX)

    def _windows(self, rows: Rows, chunks: list[Chunk], state: LayerState) -> Tensor:
        """Collect the inputs of `prepare` before the convolution: float32, padded with zeros."""
        if self.convolution is not None and state.conv is not None:
            return windows(rows.mixed_NC, chunks, self.convolution.before, state.conv)
        mixed_NC, adjacent = rows.mixed_NC, slice(chunks[0].first, chunks[0].first + len(chunks) * CHUNK)
        if chunks[-1].parent is chunks[0].parent and chunks[-1].rows.stop == adjacent.stop:  # one sequence, all full
            whole_ntC: Tensor = mixed_NC[adjacent].float().unflatten(0, (len(chunks), CHUNK))
            return whole_ntC
        return windows(mixed_NC, chunks)

    def _apply_transitions(self, prepared: Prepared, first: int, slices: list[Slice], state: LayerState) -> None:
        """Apply the transitions of prepared chunks from `first` on, for the slices that need theirs."""
        heads = math.prod(state.recurrent.shape[1:-2])
        for index, s in enumerate(slices, first):
            if s.transition is not None and state.transition is not None:
                at = slice(index * heads, (index + 1) * heads)
                prepared.transition_into(at, state.transition[s.transition])

    def _decode_into(self, rows: Rows, decoding: slice, slot_B: Tensor, state: LayerState) -> None:
        """Process a token of each of these decoding sequences, a few at a time if states are large."""
        slots = slot_B.tolist()
        n_at_once = max(1, DECODE_ELEMENTS * len(state.recurrent) // state.recurrent.numel())
        for at in range(0, len(slots), n_at_once):
            some = slots[at : at + n_at_once]
            adjacent = slice(some[0], some[0] + len(some))
            in_order = some == list(range(adjacent.start, adjacent.stop))
            where = adjacent if in_order else torch.tensor(some, device=state.recurrent.device)
            of_step = slice(decoding.start + at, decoding.start + at + len(some))
            read_BX = self.decode_at(rows.mixed_NC[of_step], rows.gates_NX[of_step], where, state)
            self.finish_into(rows, of_step, read_BX)

    def decode_at(self, mixed_BC: Tensor, gates_BX: Tensor, slots: slice | Tensor, state: LayerState) -> Tensor:
        """Process one token of each of the sequences in these slots: return what it reads, update their states."""
        convolved_BC = self.convolved_at(mixed_BC, slots, state)
        with rows_of(state.recurrent, slots) as state_BX:
            return self.decode(convolved_BC, gates_BX, state_BX)

    def convolved_at(self, mixed_BC: Tensor, slots: slice | Tensor, state: LayerState) -> Tensor:
        """Convolve one token of each sequence, if there is a convolution: [B, C] float32; update the states of it."""
        if self.convolution is None or state.conv is None:
            return mixed_BC.float()
        with rows_of(state.conv, slots) as conv_BCw:
            return self.convolution.decode(mixed_BC, conv_BCw)

    # -- segments (HYPIC, section 4.2, equations 6 and 7) ----------------------

    def composed(self, state_X: Tensor, segment: SegmentState, at: int) -> Tensor:
        """Return T·S + R(at)·S₀: the state after a segment that begins at position `at`, from the state before it."""
        moved_X = self.moved(segment.zero_start_X, at)
        if segment.transition_X is None:
            return state_X + moved_X
        return self.carried(segment.transition_X, state_X).add_(moved_X)

    def zero_start(self, end_X: Tensor, transition_X: Tensor, head_X: Tensor) -> Tensor:
        """Return S₀ = S_end − T·S_head, from the states after a segment's interior and before it."""
        return end_X - self.carried(transition_X, head_X)

    def compose_into(self, state: LayerState, slices: Sequence[Slice]) -> None:
        """Replace the states in the slots of slices by the states after the segments that the slices compose with."""
        for s in slices:
            for index, at in s.composes:
                segment = state.segments[index]
                state.recurrent[s.slot] = self.composed(state.recurrent[s.slot], segment, at)
                if state.conv is not None and segment.conv_Cw is not None:
                    state.conv[s.slot] = segment.conv_Cw


def decoding(rows: Rows, batch: StepBatch, state: LayerState, decode_into: DecodeInto) -> None:
    """Write the outputs of decoding rows by a function that processes a token of each of several sequences."""
    if not batch.speculates:
        for at, part in batch.decode_parts:
            decode_into(rows, at, part.decode_slot_B, state)
        return
    at, whole = batch.decode_rows, batch.with_accepted
    mixed_BC, gates_BX = with_accepted((rows.mixed_NC[at], rows.gates_NX[at]), batch, state.kept)
    z_BX = rows.z_NX.new_zeros(len(mixed_BC), *rows.z_NX.shape[1:])
    z_BX[whole.own_B] = rows.z_NX[at]
    out_BX = torch.empty_like(z_BX)
    true, drafts = whole.batch.true_and_drafted
    for (row_B, step), slot_B in ((true, whole.own_B[:0]), (drafts, drafts[1].decode_slot_B)):
        some = Rows(mixed_BC[row_B], gates_BX[row_B], z_BX[row_B])
        with state.put_back(slot_B):
            decoding(some, step, state, decode_into)
        out_BX[row_B] = some.out_NX
    rows.out_NX[at] = out_BX[whole.own_B]


DecodeInto = Callable[[Rows, slice, Tensor, LayerState], None]  # rows of a step, some of them, their slots, states


def advance(prepared: Prepared, at: slice, state_SX: Tensor) -> Tensor:
    """Advance S sequences by one chunk each (`at` of n): update states in place; return what they read [S, H, t, V]."""
    heads = math.prod(state_SX.shape[1:-2])
    shape = *state_SX.shape[:-2], CHUNK, state_SX.shape[-1]
    read_SX = torch.empty(shape, dtype=torch.float32, device=state_SX.device)
    of_heads = slice(at.start * heads, at.stop * heads)
    prepared.advance_into(of_heads, state_SX.flatten(0, -3), read_SX.flatten(0, -3))
    return read_SX


@contextmanager
def rows_of(memory_RX: Tensor, slots: slice | Tensor) -> Iterator[Tensor]:
    """Yield some rows of the state memory for an update in place: a view if they are adjacent, else a copy."""
    if isinstance(slots, slice):
        yield memory_RX[slots]
    else:
        row_BX = memory_RX.index_select(0, slots)
        yield row_BX
        memory_RX.index_copy_(0, slots, row_BX)


def scratch(like_X: Tensor) -> Tensor:
    """Return contiguous float32 memory of that shape, which this thread's next call reuses.

    Touching fresh memory costs 0.3 ms a MB. The memory grows with the largest request. On a GPU, whose allocator caches
    blocks, it is new.
    """
    if like_X.device.type != "cpu":
        return torch.empty_like(like_X, dtype=torch.float32, memory_format=torch.contiguous_format)
    n = math.prod(like_X.shape)
    memory: Tensor | None = getattr(_of_thread, "memory", None)
    if memory is None or len(memory) < n:
        with torch.inference_mode(False):  # to be written both within that mode and without
            memory = _of_thread.memory = torch.empty(n, device=like_X.device)
    return memory[:n].view(like_X.shape)


def decayed_by_channel(
    q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, g_THK: Tensor, state_HKV: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence token by token, the plain form that tests compare chunks and decode steps with.

    Return outputs [T, H, V] and the state after the last token, in the dtype of the arguments (float64 works).
    Gated Linear Attention (Yang et al. 2023), equation 3, with g the logarithm of its decay α: each key channel of the
    state (or with g [T, H, 1], each head) forgets at its own rate, and k vᵀ is added. Queries come scaled.
    """
    state_HKV = state_HKV.clone()
    out_THV = torch.empty_like(v_THV)
    for t in range(q_THK.shape[0]):
        state_HKV *= g_THK[t].exp().unsqueeze(-1)
        state_HKV += k_THK[t].unsqueeze(-1) * v_THV[t].unsqueeze(1)
        out_THV[t] = (state_HKV * q_THK[t].unsqueeze(-1)).sum(1)
    return out_THV, state_HKV


def rank_one_step(q_BHK: Tensor, k_BHK: Tensor, v_BHV: Tensor, decay: Tensor, state_BHKV: Tensor) -> Tensor:
    """Process one token of each of B sequences by S' = decay · S + k vᵀ: return o = S'ᵀ q; update states in place.

    States may have any stride. q reads the decayed state in a product of two rows (a single row is another kernel,
    whose bits depend on the batch): o = decay · Sᵀ q + (k·q) v.
    """
    # The decayed states are contiguous, as one batch of all heads must be.
    decayed_BHKV = torch.mul(state_BHKV, decay, out=scratch(state_BHKV))
    q_M2K = q_BHK.reshape(-1, 1, q_BHK.shape[-1]).repeat(1, 2, 1)  # expanded, each matrix would be its own product
    read_BHV = torch.bmm(q_M2K, decayed_BHKV.flatten(0, 1))[:, 0].view(v_BHV.shape)
    torch.addcmul(decayed_BHKV, k_BHK.unsqueeze(-1), v_BHV.unsqueeze(-2), out=state_BHKV)
    return torch.addcmul(read_BHV, (q_BHK * k_BHK).sum(-1, keepdim=True), v_BHV)


def queries_keys_values(mixed_XC: Tensor, key_heads: int, key_width: int, value_width: int) -> tuple[Tensor, Tensor]:
    """Split channels [q | k | v] into queries and keys, [X, 2, G, K], and values, [X, H, V]."""
    n_qk = 2 * key_heads * key_width
    qk_X2GK = mixed_XC[..., :n_qk].unflatten(-1, (2, key_heads, key_width))
    return qk_X2GK, mixed_XC[..., n_qk:].unflatten(-1, (-1, value_width))
