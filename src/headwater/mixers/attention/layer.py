"""One layer of full attention with grouped queries, and what families add to it.

Norms of queries and keys, rotation of some channels, biases, a sigmoid gate on the output (Qwen3-Next, Qwen3.5).

Shapes: N rows of a step (prefill first, then decode), C model width, G KV heads, Q queries that share one, H = G Q
heads, D head width.
"""

from __future__ import annotations

import torch

from headwater.layers.attention import GroupedAttention
from headwater.mixers.activations import sigmoid
from headwater.mixers.attention import kernel
from headwater.mixers.attention.step import AttentionStep
from headwater.mixers.norm import RMSNorm
from headwater.mixers.rotary import rotary_table, rotate_into
from headwater.mixers.weights import Weights


class Attention:
    """Owns weights only: keys and values live in the arena."""

    def __init__(self, layer: int, shape: GroupedAttention, weights: Weights) -> None:
        self.layer = layer
        self.shape = shape
        self.qkv = weights.linear("q_proj", "k_proj", "v_proj")
        self.out = weights.linear("o_proj")
        self.rotation = rotary_table(shape.rotary, str(weights.device)) if shape.rotary else None
        names = ("q_norm.weight", "k_norm.weight")
        norms = (RMSNorm(weights.vector(name), shape.norm_eps, shape.norm_offset) for name in names)
        self.q_norm, self.k_norm = norms if shape.normed else (None, None)

    def forward(self, x_NC: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """Write the step's keys and values, and let each row attend to what its sequence has up to it."""
        shape, n_prefill = self.shape, step.batch.n_prefill
        qkv_NX = self.qkv(x_NC, n_prefill)
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        q_NX, k_NX, v_NX = qkv_NX.split([(2 if shape.gated else 1) * queries, keys, keys], dim=1)
        q_NHD = q_NX.unflatten(1, (shape.heads, -1))
        gate_NHD = None
        if shape.gated:
            q_NHD, gate_NHD = q_NHD.chunk(2, dim=2)
        q_NHD = self._placed(q_NHD, self.q_norm, step)
        k_NGD = self._placed(k_NX.unflatten(1, (shape.kv_heads, -1)), self.k_norm, step)
        self._write(k_NGD, v_NX.unflatten(1, (shape.kv_heads, -1)), step)
        out_NHD = self._attend(q_NHD, step)
        if gate_NHD is not None:
            out_NHD = out_NHD.mul_(sigmoid(gate_NHD))
        return self.out(out_NHD.flatten(1), n_prefill)

    def _placed(self, x_NHD: torch.Tensor, norm: RMSNorm | None, step: AttentionStep) -> torch.Tensor:
        """Normed head by head and rotated, in float32, then rounded once."""
        if norm is None and self.rotation is None:
            return x_NHD
        placed_NHD = x_NHD.float() if norm is None else norm.in_float32(x_NHD)
        if self.rotation is not None:
            placed_NHD = placed_NHD.clone() if placed_NHD is x_NHD else placed_NHD
            rotate_into(placed_NHD, self.rotation.at(step.batch.position_N))
        return placed_NHD.to(x_NHD.dtype)

    def _write(self, k_NGD: torch.Tensor, v_NGD: torch.Tensor, step: AttentionStep) -> None:
        if step.row_W.shape[0] < k_NGD.shape[0]:
            k_NGD, v_NGD = k_NGD[step.row_W], v_NGD[step.row_W]
        step.arena.write(self.layer, step.page_W, step.offset_W, k_NGD, v_NGD)

    def _attend(self, q_NHD: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        q_NGQD = q_NHD.unflatten(1, (self.shape.kv_heads, -1))
        out_NGQD = torch.empty_like(q_NGQD)
        out_NGQD[step.batch.decode_rows.stop :] = 0
        for s in step.batch.slices:
            rows = slice(s.first, s.first + s.length)
            keys_values = self._gathered(s.table_P, s.end, step)
            kernel.prefill_into(out_NGQD[rows], q_NGQD[rows], keys_values, s.start, step, self.shape.scale)
        for row, table_P, length in step.decodes():
            keys_values = self._gathered(table_P, length, step)
            out_NGQD[row] = kernel.decode(q_NGQD[row], keys_values, length, self.shape.scale)
        return out_NGQD.flatten(1, 2)

    def _gathered(self, table_P: torch.Tensor, length: int, step: AttentionStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, [K, G, D] each."""
        k_KX, v_KX = step.arena.gather(self.layer, table_P, length)
        return k_KX.unflatten(1, (self.shape.kv_heads, -1)), v_KX.unflatten(1, (self.shape.kv_heads, -1))
