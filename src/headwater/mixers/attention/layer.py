"""One layer of full attention with grouped queries over paged keys and values.

Shapes: N rows of a step (prefill first, then decode), C model width, B decoding sequences of a batch, G KV heads,
Q queries that share one, H = G Q heads, D head width, K keys, T tokens of a segment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headwater.layers.attention import GroupedAttention
from headwater.mixers.attention import kernel
from headwater.mixers.attention.decoding import PagedBatch
from headwater.mixers.attention.heads import Heads
from headwater.mixers.attention.step import AttentionStep
from headwater.mixers.weights import Weights

if TYPE_CHECKING:
    from headwater.mixers.attention.gpu import PagedStep


class Attention:
    """Owns weights only: keys and values live in the arena."""

    def __init__(self, layer: int, shape: GroupedAttention, weights: Weights) -> None:
        self.layer = layer
        self.shape = shape
        self.heads = Heads(shape, weights)

    def forward(self, x_NC: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """Write the step's keys and values, and let each row attend to what its sequence has up to it."""
        projected = self.heads.project(x_NC, step.batch)
        self._write(projected.k_NGD, projected.v_NGD, step)
        read_NHD = self._attend(projected.q_NGQD, step)
        return self.heads.finish(read_NHD, projected.gate_NHD, step.batch.n_prefill)

    def moved(
        self, kept: tuple[torch.Tensor, ...], from_T: torch.Tensor, to_T: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """What the arena keeps of tokens, keys and values [T, G · D], as if they stood at other positions."""
        keys, values = kept
        return self.heads.moved(keys.unflatten(-1, (self.shape.kv_heads, -1)), from_T, to_T).flatten(1), values

    def _write(self, k_NGD: torch.Tensor, v_NGD: torch.Tensor, step: AttentionStep) -> None:
        step.arena.write(self.layer, step.page_W, step.offset_W, k_NGD[step.row_W], v_NGD[step.row_W])

    def _attend(self, q_NGQD: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        out_NGQD = torch.empty_like(q_NGQD, memory_format=torch.contiguous_format)
        decoding = step.batch.decode_rows
        out_NGQD[decoding.stop :] = 0
        if step.on_gpu is not None:
            self._on_gpu_into(out_NGQD, q_NGQD, step, step.on_gpu)
            return out_NGQD.flatten(1, 2)
        for slices in step.batch.sequences:
            keys_values = self._heads_of(step.arena.gather(self.layer, slices[-1].table_P, slices[-1].end))
            for s in slices:
                rows = slice(s.first, s.first + s.length)
                kernel.prefill_into(out_NGQD[rows], q_NGQD[rows], keys_values, s.start, step, self.shape.scale)
        out_DGQD, q_DGQD = out_NGQD[decoding], q_NGQD[decoding]
        for batch in step.decodes:
            out_DGQD[batch.at] = self._decode(q_DGQD[batch.at], batch, step)
        return out_NGQD.flatten(1, 2)

    def _on_gpu_into(self, out_NGQD: torch.Tensor, q_NGQD: torch.Tensor, step: AttentionStep, paged: PagedStep) -> None:
        from headwater.mixers.attention import gpu

        k_pages, v_pages = step.arena.pages_of(self.layer)
        scale = self.shape.head_dim**-0.5 if self.shape.scale is None else self.shape.scale
        for attend, rows in ((gpu.prefill, slice(0, step.batch.n_prefill)), (gpu.decode, step.batch.decode_rows)):
            if rows.start < rows.stop:
                q_nHD = q_NGQD[rows].flatten(1, 2)
                read_nHD = attend(q_nHD, (k_pages, v_pages), paged, step.arena.page_size, scale)
                out_NGQD[rows] = read_nHD.view(q_NGQD[rows].shape)

    def _decode(self, q_BGQD: torch.Tensor, batch: PagedBatch, step: AttentionStep) -> torch.Tensor:
        gathered = step.arena.gather_batch(self.layer, batch.table_BP, batch.unused_T)
        k_BKGD, v_BKGD = self._heads_of(tuple(x[:, : batch.n_keys] for x in gathered))
        return kernel.decode(q_BGQD, (k_BKGD, v_BKGD), batch.mask_B11K, self.shape.scale)

    def _heads_of(self, keys_values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values head by head, [..., G, D] each."""
        keys, values = keys_values
        return keys.unflatten(-1, (self.shape.kv_heads, -1)), values.unflatten(-1, (self.shape.kv_heads, -1))
