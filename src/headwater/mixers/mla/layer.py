"""A layer of multi-head latent attention: latents are cached, up-projections of keys and values are recomputed.

A token's row is its normed latent and the key part that all heads share. Prefill expands keys and values of all rows
and attends to them: on CPU that takes half the time of attention over latents even for 64 queries. Decode attends over
latents: the up-projection of keys is applied to the query, that of values to the output (DeepSeek-V2, section 2.1.2).

Shapes: N rows of a step (prefill first, then decode), B decoding sequences, C model width, H heads, L latent, D
channels of a head's key (without position, then with it), V of a value, X = L + position channels, K keys.
"""

from __future__ import annotations

import torch

from headwater.layers.mla import LatentAttention
from headwater.mixers.activations import RMSNorm, sigmoid
from headwater.mixers.attention import fast
from headwater.mixers.attention.step import AttentionStep
from headwater.mixers.mla.fast import AbsorbedHeads, ExpandedHeads
from headwater.mixers.rotary import rotary_table, rotate_into
from headwater.mixers.weights import Weights


class LatentAttentionMixer:
    """A layer of latent attention; owns weights only, latents are in the arena."""

    def __init__(self, layer: int, shape: LatentAttention, weights: Weights) -> None:
        self.layer = layer
        self.shape = shape
        first = "q_a_proj" if shape.q_latent else "q_proj"
        self.down = weights.linear(first, "kv_a_proj_with_mqa", *(["g_proj"] if shape.gated else []))
        self.q_up = weights.linear("q_b_proj") if shape.q_latent else None
        self.q_norm = RMSNorm(weights.vector("q_a_layernorm.weight"), shape.norm_eps) if shape.q_latent else None
        self.kv_norm = RMSNorm(weights.vector("kv_a_layernorm.weight"), shape.norm_eps)
        up_HEL = weights.cast(weights.stored("kv_b_proj.weight")).unflatten(0, (shape.heads, -1))
        self.expanded = ExpandedHeads(shape, up_HEL, weights)
        self.absorbed = AbsorbedHeads(shape, up_HEL)
        self.out = weights.linear("o_proj")
        self.rotation = rotary_table(shape.rotary, str(weights.device)) if shape.rotary else None

    def forward(self, x_NC: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """Write the step's latents; attend from each row to its sequence up to that row."""
        shape, n_prefill = self.shape, step.batch.n_prefill
        widths = (shape.q_latent or shape.heads * shape.key_dim, shape.latent, shape.rope_dim)
        down_NE = self.down(x_NC, n_prefill)
        q_NE, latent_NL, key_NE, gate_NH = down_NE.split([*widths, down_NE.shape[1] - sum(widths)], dim=1)
        if self.q_up is not None and self.q_norm is not None:
            q_NE = self.q_up(self.q_norm(q_NE), n_prefill)
        q_NHD = self._placed(q_NE.unflatten(1, (shape.heads, -1)), step)
        key_N1E = self._placed(key_NE[:, None], step)
        self._write(torch.cat([self.kv_norm(latent_NL), key_N1E[:, 0]], dim=1), step)
        out_NHV = self._attend(q_NHD, step)
        if shape.gated:
            out_NHV = out_NHV.mul_(sigmoid(gate_NH)[:, :, None])
        return self.out(out_NHV.flatten(1), n_prefill)

    def _placed(self, x_NHD: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """Rotate the last channels of each head, in float32; round once."""
        return x_NHD if self.rotation is None else self._turned(x_NHD, self.rotation.at(step.batch.position_N))

    def _turned(self, x_NHD: torch.Tensor, cos_sin_N2F: torch.Tensor) -> torch.Tensor:
        still_NHD, turned_NHE = x_NHD.tensor_split([x_NHD.shape[-1] - self.shape.rope_dim], dim=-1)
        turned_NHE = turned_NHE.to(torch.float32, copy=True)
        assert self.rotation is not None
        rotate_into(turned_NHE, cos_sin_N2F, self.rotation.neighbours)
        return torch.cat([still_NHD, turned_NHE.to(x_NHD.dtype)], dim=-1)

    def moved(
        self, kept: tuple[torch.Tensor, ...], from_T: torch.Tensor, to_T: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return rows [T, X], as the arena keeps them, for tokens at other positions: key parts are re-rotated."""
        if self.rotation is None:
            return kept
        (row_TX,) = kept
        return (self._turned(row_TX[:, None], self.rotation.between(from_T, to_T))[:, 0],)

    def _write(self, row_NX: torch.Tensor, step: AttentionStep) -> None:
        step.arena.write(self.layer, step.page_W, step.offset_W, row_NX[step.row_W])

    def _attend(self, q_NHD: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        batch = step.batch
        out_NHV = q_NHD.new_empty(q_NHD.shape[0], self.shape.heads, self.shape.v_dim)
        out_NHV[batch.decode_rows.stop :] = 0
        for slices in batch.sequences:
            row_KX = step.arena.gather(self.layer, slices[-1].table_P, slices[-1].end)[0]
            self.expanded.prefill_into(out_NHV, q_NHD, row_KX, slices, step.mask)
        if batch.n_decode:
            out_NHV[batch.decode_rows] = self._decoded(q_NHD[batch.decode_rows], step)
        return out_NHV

    def _decoded(self, q_BHD: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """Attend from the decoding rows: the heads' products are computed for all sequences together."""
        return self.absorbed.value(self._read(self.absorbed.query(q_BHD), step))

    def _read(self, q_BHX: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """Return the latents that decoding rows read, [B, H, L]; sequences with as many keys are one batch."""
        read_BHL = torch.empty_like(q_BHX[..., : self.shape.latent])
        for batch in step.decodes:
            row_BKX = step.arena.gather_batch(self.layer, batch.table_BP, batch.unused_T)[0][:, : batch.n_keys]
            rows = (row_BKX[:, :, None],) * 2
            q_B1HX, scale = q_BHX[batch.at, None], self.shape.key_dim**-0.5
            read_B1HX = fast.decode(q_B1HX, rows, batch.mask_B11K, scale)
            read_BHL[batch.at] = read_B1HX[:, 0, :, : self.shape.latent]
        return read_BHL
