"""One layer of sliding-window attention; its keys and values are state.

A window composes with a segment that was computed apart (HYPIC, sections 4.2 and 4.3) by position, as attention does:
keys are re-rotated, values copied. Tokens leave the window as others enter, which is all that a transition does to a
recurrent state. So nothing is stored beside the ring, and composition with transitions equals naive addition.

Shapes: N rows of a step (prefill first, then decode), C model width, T tokens of a slice or a segment, B decoding
sequences of a batch, W tokens of the window, G KV heads, Q queries that share one, H = G Q heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headwater.layers.window import WindowAttention
from headwater.mixers.attention import fast
from headwater.mixers.attention.layer import Heads, Projected
from headwater.mixers.batch import Slice, StepBatch
from headwater.mixers.weights import Weights
from headwater.mixers.window.fast import Rings, window_of


@dataclass(frozen=True)
class SegmentWindow:
    """The rings of one layer after a segment's interior, with the segment's first token at position 0."""

    keys_WGD: torch.Tensor
    values_WGD: torch.Tensor
    interior: range  # tokens of the segment; earlier tokens in the rings are recomputed at each use


class WindowAttentionMixer:
    """A layer of sliding-window attention; owns weights only, keys and values are in the state memory."""

    def __init__(self, shape: WindowAttention, weights: Weights) -> None:
        self.shape = shape
        self.heads = Heads(shape, weights)
        self.window = window_of(shape.window, weights.dtype, str(weights.device))

    def forward(
        self,
        x_NC: torch.Tensor,
        batch: StepBatch,
        keys: Rings,
        values: Rings,
        segments: Sequence[SegmentWindow] = (),
    ) -> torch.Tensor:
        """Attend from each row to its sequence's last tokens; advance the rings and copy them to the rows of saves.

        Slices name `segments` by index. Slices of one slot are computed in order: each continues from the rings that
        the slice before it left, after the segments that it composes with.
        """
        projected = self.heads.project(x_NC, batch)
        out_NGQD = torch.empty_like(projected.q_NGQD, memory_format=torch.contiguous_format)
        out_NGQD[batch.decode_rows.stop :] = 0
        for s in batch.slices:
            for index, at in s.composes:
                compose_into(self.heads, (keys, values), s.slot, segments[index], at)
            if s.length:
                self._prefill_into(out_NGQD, projected, s, (keys, values))
        if batch.n_decode:
            self._decode_into(out_NGQD[batch.decode_rows], projected, batch, (keys, values))
        return self.heads.finish(out_NGQD.flatten(1, 2), projected.gate_NHD, batch.n_prefill)

    def _prefill_into(self, out_NGQD: torch.Tensor, projected: Projected, s: Slice, rings: tuple[Rings, Rings]) -> None:
        rows = slice(s.first, s.first + s.length)
        out_TGQD, q_TGQD = out_NGQD[rows], projected.q_NGQD[rows]
        blocks = list(self.window.blocks(s.start, s.end))
        first, last = blocks[0].start, blocks[-1].end
        new = (projected.k_NGD[rows], projected.v_NGD[rows])
        laid = [ring.laid_out(s.slot, x_TGD, s.start, (first, last)) for ring, x_TGD in zip(rings, new, strict=True)]
        for block in blocks:
            at = slice(block.first - s.start, block.last - s.start)
            k_KGD, v_KGD = (x[block.start - first : block.end - first] for x in laid)
            mask = self.window.mask_from_last(block)
            out_TGQD[at] = fast.backwards(q_TGQD[at], (k_KGD, v_KGD), mask, self.shape.scale)
        for ring, laid_TGD in zip(rings, laid, strict=True):
            for position, row in (*s.saves, (s.end, s.slot)):
                ring.store(row, laid_TGD, first, position)

    def _decode_into(
        self, out_BGQD: torch.Tensor, projected: Projected, batch: StepBatch, rings: tuple[Rings, Rings]
    ) -> None:
        decoding, slot_B = batch.decode_rows, batch.decode_slot_B
        q_BGQD = projected.q_NGQD[decoding]
        for ring, new_NGD in zip(rings, (projected.k_NGD, projected.v_NGD), strict=True):
            ring.put(slot_B, batch.position_N[decoding], new_NGD[decoding])
        self._attend_into(out_BGQD, q_BGQD, batch, rings)

    def _attend_into(
        self, out_BGQD: torch.Tensor, q_BGQD: torch.Tensor, batch: StepBatch, rings: tuple[Rings, Rings]
    ) -> None:
        """Attend from each decoding row to its sequence's rings."""
        for together in self.window.decodes(batch):
            slots = batch.decode_slot_B[together.at]
            k_BKGD, v_BKGD = (ring.memory_RWGD[slots, : together.n_keys] for ring in rings)
            out_BGQD[together.at] = fast.decode(
                q_BGQD[together.at], (k_BKGD, v_BKGD), together.mask_B11K, self.shape.scale
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
