"""What stands on both sides of an attention: rows become heads, and what was read becomes rows.

Norms of queries and keys, rotation of some channels, biases, a sigmoid gate on the output (Qwen3-Next, Qwen3.5).

Shapes: N rows of a step (prefill first, then decode), C model width, G KV heads, Q queries that share one, H = G Q
heads, D head width, T tokens of a segment.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headwater.layers.attention import GroupedAttention
from headwater.mixers.activations import sigmoid
from headwater.mixers.batch import StepBatch
from headwater.mixers.norm import RMSNorm
from headwater.mixers.rotary import rotary_table, rotate_into
from headwater.mixers.weights import Weights


@dataclass(frozen=True)
class Projected:
    """A step's rows as heads."""

    q_NGQD: torch.Tensor
    k_NGD: torch.Tensor
    v_NGD: torch.Tensor
    gate_NHD: torch.Tensor | None


class Heads:
    """Owns the layer's weights."""

    def __init__(self, shape: GroupedAttention, weights: Weights) -> None:
        self.shape = shape
        self.qkv = weights.linear("q_proj", "k_proj", "v_proj")
        self.out = weights.linear("o_proj")
        self.rotation = rotary_table(shape.rotary, str(weights.device)) if shape.rotary else None
        names = ("q_norm.weight", "k_norm.weight")
        norms = (RMSNorm(weights.vector(name), shape.norm_eps, shape.norm_offset) for name in names)
        self.q_norm, self.k_norm = norms if shape.normed else (None, None)

    def project(self, x_NC: torch.Tensor, batch: StepBatch) -> Projected:
        """Queries, keys and values as attention takes them, and the output's gate."""
        shape = self.shape
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        qkv_NX = self.qkv(x_NC, batch.n_prefill)
        q_NX, k_NX, v_NX = qkv_NX.split([(2 if shape.gated else 1) * queries, keys, keys], dim=1)
        q_NHD = q_NX.unflatten(1, (shape.heads, -1))
        gate_NHD = None
        if shape.gated:
            q_NHD, gate_NHD = q_NHD.chunk(2, dim=2)
        q_NGQD = self._placed(q_NHD, self.q_norm, batch).unflatten(1, (shape.kv_heads, -1))
        k_NGD = self._placed(k_NX.unflatten(1, (shape.kv_heads, -1)), self.k_norm, batch)
        return Projected(q_NGQD, k_NGD, v_NX.unflatten(1, (shape.kv_heads, -1)), gate_NHD)

    def _placed(self, x_NHD: torch.Tensor, norm: RMSNorm | None, batch: StepBatch) -> torch.Tensor:
        """Normed head by head and rotated, in float32, then rounded once."""
        if norm is None and self.rotation is None:
            return x_NHD
        placed_NHD = x_NHD.float() if norm is None else norm.in_float32(x_NHD)
        if self.rotation is not None:
            placed_NHD = placed_NHD.clone() if placed_NHD is x_NHD else placed_NHD
            rotate_into(placed_NHD, self.rotation.at(batch.position_N), self.rotation.neighbours)
        return placed_NHD.to(x_NHD.dtype)

    def moved(self, k_TGD: torch.Tensor, from_T: torch.Tensor, to_T: torch.Tensor) -> torch.Tensor:
        """Keys rotated at some positions, rotated on to others, in float32, then rounded once."""
        if self.rotation is None:
            return k_TGD
        turned_TGD = k_TGD.to(torch.float32, copy=True)
        rotate_into(turned_TGD, self.rotation.between(from_T, to_T), self.rotation.neighbours)
        return turned_TGD.to(k_TGD.dtype)

    def finish(self, read_NHD: torch.Tensor, gate_NHD: torch.Tensor | None, n_prefill: int) -> torch.Tensor:
        """Rows [N, C] from what each head read."""
        if gate_NHD is not None:
            read_NHD = read_NHD.mul_(sigmoid(gate_NHD))
        return self.out(read_NHD.flatten(1), n_prefill)
