"""One layer of gated full attention (Qwen3-Next, Qwen3.5): q/k norms, partial rotation, a sigmoid gate on its output.

Shapes: N rows of a step (prefill first, then decode), C model width, G KV heads, Q queries that share one, H = G Q
heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headwater.mixers.activations import sigmoid
from headwater.mixers.attention import kernel
from headwater.mixers.attention.rotary import rotate_into
from headwater.mixers.attention.step import AttentionStep
from headwater.mixers.linear import Linear
from headwater.mixers.norm import RMSNorm
from headwater.spec import AttentionShape


@dataclass(frozen=True)
class AttentionWeights:
    """`qkv` yields, of each token, (query, gate) head by head, then all keys, then all values."""

    qkv: Linear
    q_norm: RMSNorm
    k_norm: RMSNorm
    out: Linear


class Attention:
    """Owns weights only: keys and values live in the arena."""

    def __init__(self, layer: int, shape: AttentionShape, weights: AttentionWeights) -> None:
        self.layer = layer
        self.shape = shape
        self.weights = weights

    def forward(self, x_NC: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """Write the step's keys and values, and let each row attend to what its sequence has up to it."""
        shape, n_prefill = self.shape, step.batch.n_prefill
        qkv_NX = self.weights.qkv(x_NC, n_prefill)
        queries, keys = 2 * shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        q_gate_NX, k_NX, v_NX = qkv_NX.split([queries, keys, keys], dim=1)
        q_NHD, gate_NHD = q_gate_NX.unflatten(1, (shape.heads, -1)).chunk(2, dim=2)
        q_NHD = self._placed(q_NHD, self.weights.q_norm, step)
        k_NGD = self._placed(k_NX.unflatten(1, (shape.kv_heads, -1)), self.weights.k_norm, step)
        self._write(k_NGD, v_NX.unflatten(1, (shape.kv_heads, -1)), step)
        out_NHD = self._attend(q_NHD, step).mul_(sigmoid(gate_NHD))
        return self.weights.out(out_NHD.flatten(1), n_prefill)

    def _placed(self, x_NHD: torch.Tensor, norm: RMSNorm, step: AttentionStep) -> torch.Tensor:
        """Normed head by head and rotated, in float32, then rounded once."""
        normed_NHD = norm.in_float32(x_NHD)
        rotate_into(normed_NHD, step.cos_sin_N2F)
        return normed_NHD.to(x_NHD.dtype)

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
            keys_values = step.arena.gather(self.layer, s.table_P, s.end)
            kernel.prefill_into(out_NGQD[rows], q_NGQD[rows], keys_values, s.start, step)
        for row, table_P, length in step.decodes():
            keys_values = step.arena.gather(self.layer, table_P, length)
            out_NGQD[row] = kernel.decode(q_NGQD[row], keys_values, length)
        return out_NGQD.flatten(1, 2)
