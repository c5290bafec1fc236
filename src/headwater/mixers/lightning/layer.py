"""A layer of Lightning attention: projection, norms and rotation of queries and keys, recurrence, gated norm.

N rows of a step, B decoding sequences, S sequences of a block, n chunks, t = 64, H heads, K width of keys and values,
W = H·K, C = 3W, D model width, Q groups of the norm.

The transition of a range is one factor a head, λ^tokens. Where keys rotate, a segment's zero-start state S₀, computed
as if it began at position 0, is used at position p by turning its key channels as a key is turned: a factor commutes
with rotations, so S ← T·S + R(p)·S₀ (HyPIC, equation 7).
"""

from __future__ import annotations

import torch

from headwater.layers.lightning import Lightning
from headwater.mixers.activations import inverse_rms
from headwater.mixers.batch import CHUNK, StepBatch
from headwater.mixers.lightning.fast import Chunks, Decays, advance_into, decode_step, prepare
from headwater.mixers.linear import Linear
from headwater.mixers.recurrent import RecurrentMixer, Rows
from headwater.mixers.rotary import rotary_table, rotate_into
from headwater.mixers.weights import Weights

HEADS_A_BLOCK = 16  # chunks × heads whose intermediates fit in cache: several chunks of a small model, 1 of a large


class LightningAttention(RecurrentMixer[Chunks]):
    """The mixer of MiniMax and Ring-linear."""

    def __init__(self, shape: Lightning, weights: Weights) -> None:
        self.shape = shape
        self.qkv_proj = _by_part(shape, weights)
        self.g_proj = weights.linear("g_proj")
        self.out_proj = weights.linear("o_proj")
        slope_H = torch.tensor(shape.slopes, dtype=torch.float64, device=weights.device)
        self.decays = Decays.of(slope_H, shape.scale)
        self.norm_QX = weights.vector("g_norm.weight").unflatten(0, (shape.norm_groups, -1))
        norms = [weights.vector(name) for name in ("q_norm.weight", "k_norm.weight")] if shape.normed else []
        self.qk_norm_21K = torch.stack(norms).unsqueeze(1) if norms else None
        self.rotation = rotary_table(shape.rotary, str(weights.device)) if shape.rotary else None
        self.chunks_a_block = max(1, HEADS_A_BLOCK // shape.heads)
        self.read_shape = (shape.heads, CHUNK, shape.head_dim)

    def project(self, x_ND: torch.Tensor, batch: StepBatch) -> Rows:
        """Compute projections; gates are 1 for each token, so that a chunk's sum is its length."""
        project = self.qkv_proj.swish if self.shape.activated else self.qkv_proj
        mixed_NC = project(x_ND, batch.n_prefill)
        if self.qk_norm_21K is not None or self.rotation is not None:
            mixed_NC = mixed_NC.float()
            self._place_into(mixed_NC[:, : 2 * self.shape.width].unflatten(1, (2, self.shape.heads, -1)), batch)
        token_N = torch.ones(len(x_ND), device=x_ND.device)
        gate_NW = self.g_proj.sigmoid(x_ND, batch.n_prefill)
        return Rows(mixed_NC, token_N, gate_NW, torch.empty_like(gate_NW))

    def _place_into(self, qk_N2HK: torch.Tensor, batch: StepBatch) -> None:
        """Norm queries and keys of each head and rotate them, in place, in float32."""
        if self.qk_norm_21K is not None:
            qk_N2HK.mul_(inverse_rms(qk_N2HK, self.shape.norm_eps)).mul_(self.qk_norm_21K)
        if self.rotation is not None:
            rotate_into(qk_N2HK.flatten(1, 2), self.rotation.at(batch.position_N))

    def prepare(self, mixed_ntC: torch.Tensor, gates_ntX: torch.Tensor) -> Chunks:
        return prepare(self._heads(mixed_ntC), gates_ntX.sum(1).long(), self.decays)

    def advance_into(self, prepared: Chunks, at: slice, state_SX: torch.Tensor, read_SX: torch.Tensor) -> None:
        for chunk, state_HKK, read_HtK in zip(range(at.start, at.stop), state_SX, read_SX, strict=True):
            advance_into(prepared, chunk, self.decays, state_HKK, read_HtK)

    def transition_into(self, prepared: Chunks, at: slice, transition_SX: torch.Tensor) -> None:
        transition_SX.mul_(prepared.decay_nH[at])

    def identity(self) -> torch.Tensor:
        """Return the identity as a factor for each head: [H]."""
        return torch.ones(self.shape.heads)

    def carried(self, transition_X: torch.Tensor, state_X: torch.Tensor) -> torch.Tensor:
        return transition_X[:, None, None] * state_X

    def moved(self, zero_start_X: torch.Tensor, by: int) -> torch.Tensor:
        """Rotate the key channels of a state, as keys rotate."""
        if self.rotation is None:
            return zero_start_X
        turned_HKK = zero_start_X.clone()
        rotate_into(turned_HKK.mT, self.rotation.turn(by))
        return turned_HKK

    def decode(self, mixed_BC: torch.Tensor, gates_BX: torch.Tensor, state_BX: torch.Tensor) -> torch.Tensor:
        return decode_step(self._heads(mixed_BC), self.decays, state_BX)

    def finish_into(self, rows: Rows, at: slice, read_nX: torch.Tensor) -> None:
        """Apply the norm over groups of the width, then the gate."""
        assert rows.z_NX is not None
        read_nW = read_nX.flatten(1)
        read_nQX = read_nW.unflatten(1, (self.shape.norm_groups, -1))
        read_nQX.mul_(inverse_rms(read_nQX, self.shape.norm_eps)).mul_(self.norm_QX)
        torch.mul(read_nW, rows.z_NX[at], out=rows.out_NX[at])

    def _heads(self, mixed: torch.Tensor) -> torch.Tensor:
        """Split channels into queries, keys and values: [..., 3, H, K]."""
        qkv: torch.Tensor = mixed.unflatten(-1, (3, self.shape.heads, self.shape.head_dim))
        return qkv


def _by_part(shape: Lightning, weights: Weights) -> Linear:
    """Build the projection with outputs [q | k | v], each in the order of heads."""
    if not shape.by_head:
        return weights.linear("qkv_proj")

    def ordered(tensor: torch.Tensor) -> torch.Tensor:
        of_parts: torch.Tensor = tensor.unflatten(0, (shape.heads, 3, -1)).transpose(0, 1)
        return of_parts.flatten(0, 2)

    bias = ordered(weights.stored("qkv_proj.bias")) if shape.bias else None
    return weights.packed(ordered(weights.stored("qkv_proj.weight")), bias)
