"""Multi-head latent attention: pages hold a compressed row a token (DeepSeek-V2, section 2.1).

A token's row is its normed latent and the key part that all heads share. Prefill expands the latents of a whole
sequence to keys and values, some heads at a time, and attends to them: on CPU that takes half the time of attention
over latents even for 64 queries. Decode attends over latents: a head's key is U c for a latent c, so qᵀ(U c) =
(Uᵀ q)ᵀ c; its value is W c, so Σ p W c = W Σ p c (section 2.1.2).

A leg of a few rows expands all tokens before it, too. For 1,000 tokens, 16 heads and latents of 512 channels that takes
a core 58 ms a layer in float32 and 14 in bfloat16 (AVX-512, AMX), most of it in products. Attention over latents would
take a tenth, in other bits; keys and values of all heads would be nine times the latents, and are not kept.

N rows of a step (prefill first, then decode), B decoding sequences, R = 8 rows of a tile, T queries of a slice, or
tokens of a sequence, C model width, K keys (T rounded up to 512), H heads, G heads of a group, D channels of a head's
key (`nope_dim` of them come from the latent), V of its value, L latent, X = L + position channels, E = channels that
come from the latent (of the key, then the value), M = max(D, V).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.layers.mla import LatentAttention
from headwater.mixers import softmax
from headwater.mixers.activations import RMSNorm, sigmoid
from headwater.mixers.attention import AttentionStep
from headwater.mixers.rotary import rotary_table
from headwater.mixers.slices import Slice
from headwater.mixers.softmax import CausalMask
from headwater.mixers.weights import Weights

TILE = 8  # rows of every absorbed product: at one height, rows depend neither on their place nor on each other
GROUP = 4  # heads that are expanded together: 32,768 tokens take 100 MB in bfloat16, with Kimi-Linear's channels


class AbsorbedHeads:
    """Up-projections of keys and values, applied to queries and outputs: one product a head for all sequences."""

    def __init__(self, shape: LatentAttention, up_HEL: Tensor) -> None:
        self.nope_dim = shape.nope_dim
        self.key_HDL = up_HEL[:, : shape.nope_dim].contiguous()
        self.value_HLV = up_HEL[:, shape.nope_dim :].mT.contiguous()

    def query(self, q_BHD: Tensor) -> Tensor:
        """Project queries to the latent space of rows in the arena: [B, H, X]."""
        return torch.cat([tiled(q_BHD[..., : self.nope_dim], self.key_HDL), q_BHD[..., self.nope_dim :]], dim=-1)

    def value(self, read_BHL: Tensor) -> Tensor:
        """Project the latents that heads read to the heads' outputs [B, H, V]."""
        return tiled(read_BHL, self.value_HLV)


def tiled(x_BHK: Tensor, weight_HKN: Tensor) -> Tensor:
    """Compute each head's product, [B, H, N], in tiles of a fixed height that are padded with zeros."""
    n = x_BHK.shape[0]
    x_HBK = F.pad(x_BHK, (0, 0, 0, 0, 0, -n % TILE)).transpose(0, 1)
    tiles = [torch.bmm(x_HRK, weight_HKN) for x_HRK in x_HBK.split(TILE, dim=1)]
    return torch.cat(tiles, dim=1).transpose(0, 1)[:n]


def expanded_heads(shape: LatentAttention) -> tuple[int, int, int]:
    """Return KV heads of a group, query heads that share one, and the channels that attention computes with."""
    return min(GROUP, shape.heads), 1, max(shape.key_dim, shape.v_dim)


class ExpandedHeads:
    """The up-projection, a product for each group of heads. A row's bits do not depend on other rows."""

    def __init__(self, shape: LatentAttention, up_HEL: Tensor, weights: Weights) -> None:
        self.shape = shape
        self.width = expanded_heads(shape)[2]
        self.groups = [weights.packed(up_GEL.flatten(0, 1)) for up_GEL in up_HEL.split(GROUP)]

    def prefill_into(
        self, out_NHV: Tensor, q_NHD: Tensor, row_KX: Tensor, slices: Sequence[Slice], mask: CausalMask
    ) -> None:
        """Compute attention of one sequence's slices over the rows of its tokens, up to the last slice's end.

        Rows after that end are zeros, whose products are not computed.
        """
        shape, end = self.shape, slices[-1].end
        latent_TL = row_KX[:end, : shape.latent].contiguous()
        k_KGM, v_KGM = self.scratch(row_KX).of(len(row_KX))
        k_KGM[end:], v_KGM[end:] = 0, 0
        first = 0
        for up in self.groups:
            e_TGE = up(latent_TL, end).unflatten(1, (-1, shape.nope_dim + shape.v_dim))
            n_heads = e_TGE.shape[1]
            heads, keys_values = slice(first, first + n_heads), (k_KGM[:, :n_heads], v_KGM[:, :n_heads])
            self._write_into(keys_values, e_TGE, row_KX[:end])
            for s in slices:
                rows = slice(s.first, s.first + s.length)
                q_TG1M = F.pad(q_NHD[rows, heads], (0, self.width - self.shape.key_dim)).unsqueeze(2)
                read_TG1M = self._attended(q_TG1M, keys_values, s.start, mask)
                out_NHV[rows, heads] = read_TG1M[:, :, 0, : self.shape.v_dim]
            first = heads.stop

    def _attended(self, q_TG1M: Tensor, keys_values: tuple[Tensor, Tensor], start: int, mask: CausalMask) -> Tensor:
        """Attend from a slice's queries, the first at position `start`, to the keys up to each."""
        read_TG1M = torch.empty_like(q_TG1M)
        softmax.prefill_into(read_TG1M, q_TG1M, keys_values, start, mask, self.shape.score_scale)
        return read_TG1M

    def _write_into(self, keys_values: tuple[Tensor, Tensor], e_TGE: Tensor, row_TX: Tensor) -> None:
        """Write the keys and values of some heads of all tokens; they have M channels, the last of which are zeros."""
        (k_KGM, v_KGM), shape, n = keys_values, self.shape, len(row_TX)
        k_KGM[:n, :, : shape.nope_dim] = e_TGE[..., : shape.nope_dim]
        k_KGM[:n, :, shape.nope_dim : shape.key_dim] = row_TX[:, None, shape.latent :]
        v_KGM[:n, :, : shape.v_dim] = e_TGE[..., shape.nope_dim :]

    def scratch(self, like: Tensor) -> Scratch:
        """Return the memory for keys and values of a group of heads."""
        shape = self.shape
        return _scratch((shape.nope_dim, shape.rope_dim, shape.v_dim), like.dtype, like.device)


class Scratch(threading.local):
    """Memory for keys and values of a group, kept because fresh memory is slow; it grows with the longest sequence.

    Each thread has its own.
    """

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._keys_values = torch.zeros(2, 0, GROUP, width, dtype=dtype, device=device)

    def of(self, n_keys: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [K, G, M], valid until the next call.

        Channels that no layer writes are zeros, since all users write the same channels.
        """
        have = self._keys_values.shape[1]
        if have < n_keys:
            shape = (2, max(n_keys, 2 * have), *self._keys_values.shape[2:])
            self._keys_values = self._keys_values.new_zeros(shape)
        k_KGM, v_KGM = self._keys_values[:, :n_keys].unbind(0)
        return k_KGM, v_KGM


@cache
def _scratch(widths: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Scratch:
    """Return the scratch that layers of these widths (without position, with it, values) share, one after the other."""
    return Scratch(max(widths[0] + widths[1], widths[2]), dtype, device)


class LatentAttentionMixer:
    """A layer of latent attention; owns weights only, latents are in the arena."""

    expands = ExpandedHeads

    def __init__(self, layer: int, shape: LatentAttention, weights: Weights) -> None:
        self.layer = layer
        self.shape = shape
        first = "q_a_proj" if shape.q_latent else "q_proj"
        self.down = weights.linear(first, "kv_a_proj_with_mqa", *(["g_proj"] if shape.gated else []))
        self.q_up = weights.linear("q_b_proj") if shape.q_latent else None
        self.q_norm = RMSNorm(weights.vector("q_a_layernorm.weight"), shape.norm_eps) if shape.q_latent else None
        self.kv_norm = RMSNorm(weights.vector("kv_a_layernorm.weight"), shape.norm_eps)
        up_HEL = weights.stored("kv_b_proj.weight").unflatten(0, (shape.heads, -1))
        self.expanded = self.expands(shape, up_HEL, weights)
        self.absorbed = AbsorbedHeads(shape, weights.cast(up_HEL))
        self.out = weights.linear("o_proj")
        self.rotation = rotary_table(shape.rotary, str(weights.device)) if shape.rotary else None

    def forward(self, x_NC: Tensor, step: AttentionStep) -> Tensor:
        """Write the step's latents; attend from each row to its sequence up to that row."""
        shape, n_prefill = self.shape, step.batch.n_prefill
        q_NE, gate_NH = self.store(x_NC, step)
        if self.q_up is not None and self.q_norm is not None:
            q_NE = self.q_up(self.q_norm(q_NE), n_prefill)
        q_NHD = self._placed(q_NE.unflatten(1, (shape.heads, -1)), step)
        out_NHV = self._attend(q_NHD, step)
        if shape.gated:
            out_NHV = out_NHV.mul_(sigmoid(gate_NH)[:, :, None])
        return self.out(out_NHV.flatten(1), n_prefill)

    def store(self, x_NC: Tensor, step: AttentionStep) -> tuple[Tensor, Tensor]:
        """Write the step's latents; return the down-projections of queries, and the gates."""
        shape = self.shape
        widths = (shape.q_latent or shape.heads * shape.key_dim, shape.latent, shape.rope_dim)
        down_NE = self.down(x_NC, step.batch.n_prefill)
        q_NE, latent_NL, key_NE, gate_NH = down_NE.split([*widths, down_NE.shape[1] - sum(widths)], dim=1)
        key_N1E = self._placed(key_NE[:, None], step)
        step.write(self.layer, torch.cat([self.kv_norm(latent_NL), key_N1E[:, 0]], dim=1))
        return q_NE, gate_NH

    def _placed(self, x_NHD: Tensor, step: AttentionStep) -> Tensor:
        """Rotate the last channels of each head, in float32; round once."""
        return x_NHD if self.rotation is None else self._turned(x_NHD, self.rotation.at(step.batch.position_N))

    def _turned(self, x_NHD: Tensor, cos_sin_N2F: Tensor) -> Tensor:
        still_NHD, turned_NHE = x_NHD.tensor_split([x_NHD.shape[-1] - self.shape.rope_dim], dim=-1)
        assert self.rotation is not None
        return torch.cat([still_NHD, self.rotation.turned(turned_NHE, cos_sin_N2F)], dim=-1)

    def moved(self, kept: tuple[Tensor, ...], from_T: Tensor, to_T: Tensor) -> tuple[Tensor, ...]:
        """Return rows [T, X], as the arena keeps them, for tokens at other positions: key parts are re-rotated."""
        if self.rotation is None:
            return kept
        (row_TX,) = kept
        return (self._turned(row_TX[:, None], self.rotation.between(from_T, to_T))[:, 0],)

    def _attend(self, q_NHD: Tensor, step: AttentionStep) -> Tensor:
        batch = step.batch
        out_NHV = q_NHD.new_empty(q_NHD.shape[0], self.shape.heads, self.shape.v_dim)
        for slices in batch.sequences:
            row_KX = step.arena.gather(self.layer, slices[-1].table_P, slices[-1].end)[0]
            self.expanded.prefill_into(out_NHV, q_NHD, row_KX, slices, step.mask)
        if batch.n_decode:
            q_BHX = self.absorbed.query(q_NHD[batch.decode_rows])
            out_NHV[batch.decode_rows] = self.absorbed.value(self._read(q_BHX, step))
        return out_NHV

    def _read(self, q_BHX: Tensor, step: AttentionStep) -> Tensor:
        """Return the latents that decoding rows read, [B, H, L]; sequences with as many keys are one batch."""
        read_BHL = torch.empty_like(q_BHX[..., : self.shape.latent])
        for batch in step.decodes:
            row_BKX = step.arena.gather_batch(self.layer, batch.table_BP, batch.unused_T)[0][:, : batch.n_keys]
            rows = (row_BKX[:, :, None],) * 2
            q_B1HX, scale = q_BHX[batch.at, None], self.shape.score_scale
            read_B1HX = softmax.decode(q_B1HX, rows, batch.mask_B11K, scale)
            read_BHL[batch.at] = read_B1HX[:, 0, :, : self.shape.latent]
        return read_BHL
