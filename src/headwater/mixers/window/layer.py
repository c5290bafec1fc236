"""One layer of sliding-window attention; what it keeps of a sequence is state.

Shapes: N rows of a step (prefill first, then decode), C model width, T tokens of a slice, B decoding sequences of a
batch, W tokens of the window, G KV heads, Q queries that share one, H = G Q heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headwater.layers.window import WindowAttention
from headwater.mixers.attention import kernel
from headwater.mixers.attention.heads import Heads, Projected
from headwater.mixers.batch import Slice, StepBatch
from headwater.mixers.gpu import has_kernels
from headwater.mixers.weights import Weights
from headwater.mixers.window.composing import SegmentWindow, compose_into
from headwater.mixers.window.rings import Rings
from headwater.mixers.window.window import window_of


class WindowAttentionMixer:
    """Owns weights only: keys and values live in the state memory."""

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
        """Let each row attend to its sequence's last tokens; rings move on, and are copied to the rows of saves.

        Slices name `segments` by their index. Those of one slot are worked through in order: what one leaves in the
        rings, and what is composed in between, is before the next.
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
            out_TGQD[at] = kernel.backwards(q_TGQD[at], (k_KGD, v_KGD), mask, self.shape.scale)
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
        if has_kernels(out_BGQD.device):
            self._on_gpu_into(out_BGQD, q_BGQD, batch, rings)
            return
        for together in self.window.decodes(batch):
            slots = slot_B[together.at]
            k_BKGD, v_BKGD = (ring.memory_RWGD[slots, : together.n_keys] for ring in rings)
            out_BGQD[together.at] = kernel.decode(
                q_BGQD[together.at], (k_BKGD, v_BKGD), together.mask_B11K, self.shape.scale
            )

    def _on_gpu_into(
        self, out_BGQD: torch.Tensor, q_BGQD: torch.Tensor, batch: StepBatch, rings: tuple[Rings, Rings]
    ) -> None:
        from headwater.mixers.attention import gpu

        k_RX, v_RX = (ring.memory_RWGD.flatten(1) for ring in rings)
        scale = self.shape.head_dim**-0.5 if self.shape.scale is None else self.shape.scale
        step = gpu.Decoding.of_rings(batch, self.shape.window)
        read_BHD = gpu.decode(q_BGQD.flatten(1, 2), (k_RX, v_RX), step, self.shape.window, scale)
        out_BGQD.copy_(read_BHD.view(out_BGQD.shape))
