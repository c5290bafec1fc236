"""Attention over the last tokens, whose keys and values are state and part of a checkpoint.

Prefill works in blocks at absolute positions. All queries of a block are computed over the same keys: the keys of the
block and of a window before it, whatever part of the block a slice contains. A mask hides keys that a query may not
see. So cuts change no bit. Decode groups sequences by the number of tokens in their rings.

A window composes with a segment that was computed apart (HYPIC, sections 4.2 and 4.3) by position, as attention does:
keys are re-rotated, values copied. Tokens leave the window as others enter, which is all that a transition does to a
recurrent state. So nothing is stored besides the ring, and composition with transitions equals naive addition.

N rows of a step (prefill first, then decode), R rows of the state memory, C model width, T tokens of a slice or a
segment, B decoding sequences of a batch, W tokens of the window, G KV heads, Q queries that share one, H = G Q heads,
D head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from headwater.layers.attention import WindowAttention
from headwater.mixers import softmax
from headwater.mixers.attention import Heads, Projected
from headwater.mixers.batch import DraftRows, StepBatch
from headwater.mixers.drafts import Kept
from headwater.mixers.slices import CHUNK, Slice
from headwater.mixers.softmax import DecodeBatch, decode_batches
from headwater.mixers.weights import Weights
from headwater.spec import KEY_BLOCK


@dataclass(frozen=True, slots=True)
class Block:
    """Queries [first, last) of one block and the keys [start, end) that they are computed over, as positions."""

    first: int
    last: int
    start: int
    end: int


class Window:
    """A sliding window: a query sees `size` tokens, its own included; `dtype` is that of queries and keys."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.size = size
        self.before = max(1, -(-(size - 1) // CHUNK)) * CHUNK  # keys that a block's first query may see, rounded up
        self.block = min(self.before, KEY_BLOCK)  # queries; as many as that, so that at most half of the work is masked
        self._dtype = dtype
        # -inf, then 0 up to the position of a query's own key if no key is before it, then -inf.
        reach = self.before + self.block
        self._band = torch.full((3 * reach + 1,), -torch.inf, dtype=dtype, device=device)
        self._band[reach + 1 - size : reach + 1] = 0

    def blocks(self, start: int, end: int) -> Iterator[Block]:
        """Yield the blocks of queries at positions [start, end)."""
        first = start
        while first < end:
            at = first // self.block * self.block
            last = min(at + self.block, end)
            yield Block(first, last, max(0, at - self.before), at + self.block)
            first = last

    def mask_from_last(self, block: Block) -> Tensor:
        """Return the mask for `softmax.backwards`: a key is seen from its own position on, for `size` tokens."""
        last_key = block.last - 1 - block.start
        return self._band[self.before + self.block - last_key :]

    def decodes(self, batch: StepBatch) -> tuple[DecodeBatch, ...]:
        """Group the step's decoding sequences by the number of ring rows that they read; once for all layers."""
        known: tuple[DecodeBatch, ...] | None = batch.derived.get(self)
        if known is None:
            batch.check_slots()
            lengths = [min(length, self.size) for length in batch.decode_lengths]
            known = decode_batches(lengths, self._dtype, batch.position_N.device, self.size)
            batch.derived[self] = known
        return known


@cache
def window_of(size: int, dtype: torch.dtype, device: str) -> Window:
    """Return the window that all layers of this size share."""
    return Window(size, dtype, device)


@dataclass(frozen=True)
class Rings:
    """Keys or values of one layer's last tokens: the token at position p is in ring row p mod W.

    A ring with fewer than W tokens is zeros after them.
    """

    memory_RWGD: Tensor  # strided by row
    kept: Kept = field(default_factory=Kept)  # of drafts

    def runs(self, start: int, end: int) -> Iterator[tuple[slice, slice]]:
        """Yield the ring rows of at most W tokens at positions [start, end), with the tokens counted from `start`."""
        window = self.memory_RWGD.shape[1]
        at, n = start % window, end - start
        first = min(n, window - at)
        yield slice(at, at + first), slice(0, first)
        yield slice(0, n - first), slice(first, n)

    def read(self, row: int, start: int, end: int) -> Tensor:
        """Copy the tokens at positions [start, end) in order, [end − start, G, D]; the ring must hold them all."""
        return torch.cat([self.memory_RWGD[row, rows] for rows, _ in self.runs(start, end)])

    def laid_out(self, row: int, new_TGD: Tensor, start: int, bounds: tuple[int, int]) -> Tensor:
        """Lay out positions [first, last) of a sequence: tokens from the ring before `start`, the new ones, zeros."""
        first, last = bounds
        end, window = start + len(new_TGD), self.memory_RWGD.shape[1]
        known = max(first, start - window)
        laid_TGD = new_TGD.new_empty(last - first, *new_TGD.shape[1:])
        laid_TGD[: known - first] = 0
        for rows, tokens in self.runs(known, start):
            laid_TGD[known - first : start - first][tokens] = self.memory_RWGD[row, rows]
        laid_TGD[start - first : end - first] = new_TGD
        laid_TGD[end - first :] = 0
        return laid_TGD

    def store(self, row: int, laid_TGD: Tensor, first: int, position: int) -> None:
        """Write the ring's content before the token at `position`, from tokens laid out from `first` on."""
        ring_WGD = self.memory_RWGD[row]
        window = len(ring_WGD)
        head = position % window
        turn = position - head  # position of the token in the ring's first row
        ring_WGD[:head] = laid_TGD[turn - first : position - first]
        if position < window:
            ring_WGD[head:] = 0
        else:
            ring_WGD[head:] = laid_TGD[position - window - first : turn - first]

    def extend(self, row: int, laid_TGD: Tensor, first: int, start: int, end: int) -> None:
        """Write the tokens at positions [start, end), laid out from `first` on, to a ring with those before."""
        start = max(start, end - self.memory_RWGD.shape[1])
        for rows, tokens in self.runs(start, end):
            self.memory_RWGD[row, rows] = laid_TGD[start - first : end - first][tokens]

    def at(self, row_B: Tensor, position_B: Tensor) -> Tensor:
        """Copy one token of each of B sequences, [B, G, D], or several of one."""
        return self.memory_RWGD[row_B, position_B % self.memory_RWGD.shape[1]]

    def put(self, row_B: Tensor | int, position_B: Tensor, new_BGD: Tensor) -> None:
        """Store one token of each of B sequences, or B ≤ W tokens of one sequence."""
        self.memory_RWGD[row_B, position_B % self.memory_RWGD.shape[1]] = new_BGD


def in_rings(rings: tuple[Rings, ...], batch: StepBatch) -> Iterator[tuple[Tensor, StepBatch]]:
    """Yield rows that are not drafts, then drafts, for a layer that writes each row's token to rings and reads them.

    Accepted tokens are put into the rings first. What drafts write is kept, and the rings are as before them at last.
    """
    window, accepted = rings[0].memory_RWGD.shape[1], batch.with_accepted.accepted
    if max(batch.accepted, default=0) > window:  # only the last ones stay in the rings
        accepted = accepted.some([number >= n - window for n in batch.accepted for number in range(n)])
    position_A = batch.with_accepted.batch.position_N[accepted.row_A]
    for ring in rings if len(position_A) else ():
        ring.put(accepted.slot_A, position_A, *ring.kept.of(accepted))
    true, (row_B, guessed) = batch.true_and_drafted
    yield true
    if len(row_B):
        at = guessed.decode_slot_B, guessed.position_N
        before = [ring.at(*at) for ring in rings]
        for drafts, some_B, some in _within(batch, window):
            yield some_B, some
            for ring in rings:
                ring.kept.keep((ring.at(some.decode_slot_B, some.position_N),), drafts)
        for ring, before_AGD in zip(rings, before, strict=True):
            ring.put(*at, before_AGD)


def _within(batch: StepBatch, window: int) -> Iterator[tuple[DraftRows, Tensor, StepBatch]]:
    """Yield a step's drafts, as many of a sequence at a time as have different rows of a ring: nearly always all."""
    drafts = batch.draft_rows
    if max(batch.drafted) <= window:
        yield drafts, *batch.true_and_drafted[1]
        return
    for first in range(0, max(batch.drafted), window):
        some = drafts.some([first <= number < first + window for number in drafts.number_A.tolist()])
        yield some, *batch.some_rows(some.row_A.tolist())


@dataclass(frozen=True)
class SegmentWindow:
    """The rings of one layer after a segment's interior, with the segment's first token at position 0."""

    keys_WGD: Tensor
    values_WGD: Tensor
    interior: range  # tokens of the segment; earlier tokens in the rings are recomputed at each use


class WindowAttentionMixer:
    """A layer of sliding-window attention; owns weights only, keys and values are in the state memory."""

    def __init__(self, shape: WindowAttention, weights: Weights) -> None:
        self.shape = shape
        self.heads = Heads(shape, weights)
        self.window = window_of(shape.window, weights.dtype, str(weights.device))

    def forward(
        self,
        x_NC: Tensor,
        batch: StepBatch,
        keys: Rings,
        values: Rings,
        segments: Sequence[SegmentWindow] = (),
        tail: Tensor | None = None,
    ) -> Tensor:
        """Attend from each row to its sequence's last tokens; advance the rings and copy them to the rows of saves.

        Slices name `segments` by index. Slices of one slot are computed in order: each continues from the rings that
        the slice before it left, after the segments that it composes with.
        """
        rings, projected = (keys, values), self.heads.project(x_NC, batch)
        out_NGQD = torch.empty_like(projected.q_NGQD, memory_format=torch.contiguous_format)
        self._prefill_into(out_NGQD, projected, batch, rings, segments, tail)
        at = batch.decode_rows
        decoding = out_NGQD[at], (projected.q_NGQD[at], projected.k_NGD[at], projected.v_NGD[at])
        for row_B, step in in_rings(rings, batch) if batch.speculates else ():
            out_BGQD = torch.empty_like(decoding[0][row_B])
            self._decode_into(out_BGQD, tuple(part[row_B] for part in decoding[1]), step, rings)
            decoding[0][row_B] = out_BGQD
        if not batch.speculates:
            self._decode_into(*decoding, batch, rings)
        return self.heads.finish(out_NGQD.flatten(1, 2), projected.gate_NHD, batch.n_prefill)

    def _prefill_into(
        self,
        out_NGQD: Tensor,
        projected: Projected,
        batch: StepBatch,
        rings: tuple[Rings, Rings],
        segments: Sequence[SegmentWindow],
        tail: Tensor | None,
    ) -> None:
        """Attend from the rows of slices, after the segments that they compose with; advance and save the rings.

        `tail`, [rows, T, 2 G D], has the keys and values of tails.
        """
        for s in batch.slices:
            for index, position in s.composes:
                compose_into(self.heads, rings, s.slot, segments[index], position)
            if s.length or s.kept:
                self._prefill_slice_into(out_NGQD, projected, s, rings, tail)

    def _prefill_slice_into(
        self, out_NGQD: Tensor, projected: Projected, s: Slice, rings: tuple[Rings, Rings], tail: Tensor | None
    ) -> None:
        rows, start = slice(s.first, s.first + s.length), s.start - s.kept
        out_TGQD, q_TGQD = out_NGQD[rows], projected.q_NGQD[rows]
        blocks = list(self.window.blocks(start, s.end))
        first, last = blocks[0].start, blocks[-1].end
        new = (projected.k_NGD[rows], projected.v_NGD[rows])
        if s.kept:
            assert tail is not None, "the slice continues a tail, and there is no memory of tails"
            kept = tail[s.tail, : s.kept].unflatten(-1, (2, *new[0].shape[1:])).unbind(1)
            new = (torch.cat((kept[0], new[0])), torch.cat((kept[1], new[1])))
        of_each = zip(rings, new, strict=True)
        keys, values = (ring.laid_out(s.slot, x_TGD, start, (first, last)) for ring, x_TGD in of_each)
        laid = (keys, values)
        for keep in s.keeps:
            assert tail is not None, "the slice writes a tail, and there is no memory of tails"
            at = slice(keep.start - first, keep.end - first)
            tail[keep.row, : keep.end - keep.start] = torch.cat([x[at].flatten(1) for x in laid], 1)
        if s.length:
            self._attend_slice_into(out_TGQD, q_TGQD, laid, s, first)
        for ring, laid_TGD in zip(rings, laid, strict=True):
            for position, row in s.saves:
                ring.store(row, laid_TGD, first, position)
            ring.extend(s.slot, laid_TGD, first, start, s.end)

    def _attend_slice_into(
        self, out_TGQD: Tensor, q_TGQD: Tensor, laid: tuple[Tensor, Tensor], s: Slice, first: int
    ) -> None:
        """Attend from the rows of a slice to keys and values, which are laid out from position `first` on."""
        for block in self.window.blocks(s.start, s.end):
            at = slice(block.first - s.start, block.last - s.start)
            k_KGD, v_KGD = (x[block.start - first : block.end - first] for x in laid)
            mask = self.window.mask_from_last(block)
            out_TGQD[at] = softmax.backwards(q_TGQD[at], (k_KGD, v_KGD), mask, self.shape.scale, self.heads.sink_GQ)

    def _decode_into(
        self, out_BGQD: Tensor, new: tuple[Tensor, ...], batch: StepBatch, rings: tuple[Rings, Rings]
    ) -> None:
        """Attend from decoding rows, whose queries, keys and values are `new`; put their tokens into the rings."""
        q_BGQD, *of_rings = new
        first = batch.n_prefill
        for at, part in batch.decode_parts:  # a sequence's next token overwrites one that this one sees
            own = slice(at.start - first, at.stop - first)
            for ring, new_BGD in zip(rings, of_rings, strict=True):
                ring.put(part.decode_slot_B, part.position_N[part.decode_rows], new_BGD[own])
            self._attend_into(out_BGQD[own], q_BGQD[own], part, rings)

    def _attend_into(self, out_BGQD: Tensor, q_BGQD: Tensor, batch: StepBatch, rings: tuple[Rings, Rings]) -> None:
        """Attend from each decoding row to its sequence's rings."""
        for together in self.window.decodes(batch):
            slots = batch.decode_slot_B[together.at]
            k_BKGD, v_BKGD = (ring.memory_RWGD[slots, : together.n_keys] for ring in rings)
            out_BGQD[together.at] = softmax.decode(
                q_BGQD[together.at], (k_BKGD, v_BKGD), together.mask_B11K, self.shape.scale, self.heads.sink_GQ
            )


def compose_into(heads: Heads, rings: tuple[Rings, Rings], row: int, segment: SegmentWindow, at: int) -> None:
    """Advance the rings of a row over a segment's interior; the segment begins at position `at`.

    The last W tokens of the interior are copied to their ring rows; other ring rows stay.
    """
    window = len(segment.keys_WGD)
    last = segment.interior[-window:]
    from_T = torch.arange(last.start, last.stop, device=segment.keys_WGD.device)
    row_T, to_T = from_T % window, from_T + at
    keys_TGD = heads.moved(segment.keys_WGD[row_T], from_T, to_T)
    for ring, new_TGD in zip(rings, (keys_TGD, segment.values_WGD[row_T]), strict=True):
        ring.put(row, to_T, new_TGD)
