"""Full attention with grouped queries over paged keys and values.

Queries and keys may have norms and rotated channels, projections may have biases, and the output may have a sigmoid
gate (Qwen3-Next, Qwen3.5). A softmax may have a sink: a logit of each head, without a value (gpt-oss).

N rows of a step (prefill first, then decode), W rows whose KV is written, C model width, B decoding sequences of a
batch, G KV heads, Q queries that share one, H = G Q heads, D head width, K keys, T tokens of a segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Self

import torch
from torch import Tensor

from headwater.layers.attention import GroupedAttention
from headwater.mixers import softmax
from headwater.mixers.activations import RMSNorm, sigmoid
from headwater.mixers.batch import StepBatch
from headwater.mixers.gpu import has_kernels
from headwater.mixers.linear import Linear
from headwater.mixers.products import OUTPUT_GRID
from headwater.mixers.rotary import rotary_table, rotate_into
from headwater.mixers.softmax import CausalMask, PagedBatch, paged_batches
from headwater.mixers.weights import Weights


class KeyValuePages(Protocol):
    """The methods of the arena that attention uses."""

    page_size: int

    def pages_of(self, layer: int) -> tuple[Tensor, ...]: ...

    def write(self, layer: int, page_W: Tensor, offset_W: Tensor, *rows_WX: Tensor) -> None: ...

    def gather(self, layer: int, table_P: Tensor, length: int) -> tuple[Tensor, ...]: ...

    def gather_batch(self, layer: int, table_BP: Tensor, unused_T: Tensor) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True)
class Destinations:
    """Rows of a step whose KV is written, and the places of their tokens in the arena."""

    row_W: slice | Tensor  # int64; a slice if no row is left out
    page_W: Tensor  # int64
    offset_W: Tensor  # int64, tokens from the start of the page


@dataclass(frozen=True)
class AttentionStep:
    """KV destinations, masks and decode batches of one ragged step, which all attention layers share."""

    batch: StepBatch
    arena: KeyValuePages
    dtype: torch.dtype  # of queries and keys
    first_key: int = 0  # position of the first key that decoding rows see

    @classmethod
    def of(cls, batch: StepBatch, arena: KeyValuePages, dtype: torch.dtype, first_key: int = 0) -> Self:
        """Describe a step."""
        return cls(batch, arena, dtype, first_key)

    @cached_property
    def destinations(self) -> Destinations:
        """Rows whose KV is written, and their pages."""
        return self._written(with_decoding=self.batch.n_decode > 0)

    @cached_property
    def mask(self) -> CausalMask:
        """Causal mask of all slices."""
        longest = max((s.end for s in self.batch.slices), default=0)
        return CausalMask(longest, self.dtype, self.batch.position_N.device)

    @cached_property
    def decodes(self) -> tuple[PagedBatch, ...]:
        """Decoding sequences in batches, with their pages."""
        batch = self.batch
        found = paged_batches(batch.decode_lengths, batch.decode_tables, self.arena.page_size, self.dtype)
        return tuple(one.from_key(self.first_key) for one in found) if self.first_key else found

    def write(self, layer: int, *rows_NX: Tensor) -> None:
        """Write KV of the step's rows to the arena."""
        self._write_to(self.destinations, layer, *rows_NX)

    def _write_to(self, to: Destinations, layer: int, *rows_NX: Tensor) -> None:
        self.arena.write(layer, to.page_W, to.offset_W, *(x_NX[to.row_W] for x_NX in rows_NX))

    def _written(self, with_decoding: bool) -> Destinations:
        """Return the rows of slices that write KV, and those of decoding sequences or not."""
        batch, page_size = self.batch, self.arena.page_size
        position_N, decoding = batch.position_N, batch.decode_rows
        rows: list[range] = []
        pages: list[Tensor] = []
        for s in batch.slices:
            skipped = min(max(s.write_from * page_size - s.start, 0), s.length)
            rows.append(range(s.first + skipped, s.first + s.length))
            pages.append(s.table_P[position_N[rows[-1].start : rows[-1].stop] // page_size])
        if with_decoding:
            rows.append(range(decoding.start, decoding.stop))
            pages.append(self._decode_pages(batch, page_size))
        page_W = torch.cat(pages)
        row_W: slice | Tensor = slice(0, rows[-1].stop)
        if len(page_W) != rows[-1].stop:
            row_W = torch.cat([torch.arange(r.start, r.stop, device=position_N.device) for r in rows])
        return Destinations(row_W, page_W, position_N[row_W] % page_size)

    @staticmethod
    def _decode_pages(batch: StepBatch, page_size: int) -> Tensor:
        """Return the page of each decoding sequence's new token, [B]."""
        last = ((length - 1) // page_size for length in batch.decode_lengths)
        return torch.stack([table[page] for table, page in zip(batch.decode_tables, last, strict=True)])


@dataclass(frozen=True)
class Projected:
    """Rows of a step, split into heads."""

    q_NGQD: Tensor
    k_NGD: Tensor
    v_NGD: Tensor
    gate_NHD: Tensor | None


class Heads:
    """Projections around an attention: rows to heads, and the heads' outputs back to rows."""

    def __init__(self, shape: GroupedAttention, weights: Weights) -> None:
        self.shape = shape
        self._qkv = weights.linear("q_proj", "k_proj", "v_proj")
        self.out = weights.linear("o_proj")
        self.rotation = rotary_table(shape.rotary, str(weights.device)) if shape.rotary else None
        names = ("q_norm.weight", "k_norm.weight")
        self.sink_GQ = weights.vector("sinks").view(shape.kv_heads, -1) if shape.sinks else None
        normed = shape.normed or shape.normed_whole
        norms = [RMSNorm(weights.vector(n), shape.norm_eps, shape.norm_offset) for n in names if normed]
        self.q_norm: RMSNorm | None
        self.k_norm: RMSNorm | None
        self.q_norm, self.k_norm = norms if shape.normed else (None, None)
        self._whole_norms = norms if shape.normed_whole else []

    def qkv(self, x_NC: Tensor, n_prefill: int) -> Tensor:
        """Compute queries (with gates, if there are any), keys and values, with the norms over all heads together."""
        return self._normed(self._qkv(x_NC, n_prefill))

    def _normed(self, qkv_NX: Tensor) -> Tensor:
        """Apply the norms over all heads together, in place, to rows that end with keys and values."""
        keys = self.shape.kv_heads * self.shape.head_dim
        parts = qkv_NX[:, : -2 * keys], qkv_NX[:, -2 * keys : -keys]
        for norm, part_NX in zip(self._whole_norms, parts, strict=False):
            if part_NX.shape[1]:
                part_NX.copy_(norm(part_NX.contiguous()))
        return qkv_NX

    def project(self, x_NC: Tensor, batch: StepBatch) -> Projected:
        """Compute queries, keys and values, normed and rotated, and the output's gate."""
        return self.split(self.qkv(x_NC, batch.n_prefill), batch)

    def split(self, qkv_NX: Tensor, batch: StepBatch) -> Projected:
        """Split the projections of the first rows of a step into heads; norm and rotate them."""
        shape = self.shape
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        q_NX, k_NX, v_NX = qkv_NX.split([(2 if shape.gated else 1) * queries, keys, keys], dim=1)
        q_NHD = q_NX.unflatten(1, (shape.heads, -1))
        gate_NHD = None
        if shape.gated:
            q_NHD, gate_NHD = q_NHD.chunk(2, dim=2)
        q_NGQD = self._placed(q_NHD, self.q_norm, batch).unflatten(1, (shape.kv_heads, -1))
        k_NGD = self._placed(k_NX.unflatten(1, (shape.kv_heads, -1)), self.k_norm, batch)
        return Projected(q_NGQD, k_NGD, v_NX.unflatten(1, (shape.kv_heads, -1)), gate_NHD)

    def keys_values(self, x_NC: Tensor, batch: StepBatch) -> tuple[Tensor, Tensor]:
        """Compute only keys and values, as `project` does."""
        keys = self.shape.kv_heads * self.shape.head_dim
        kv_NX = self._normed(self._keys_values(x_NC, batch.n_prefill)[:, -2 * keys :])
        k_NGD, v_NGD = (x_NX.unflatten(1, (self.shape.kv_heads, -1)) for x_NX in kv_NX.split(keys, dim=1))
        return self._placed(k_NGD, self.k_norm, batch), v_NGD

    @property
    def sink_H(self) -> Tensor | None:
        """Logits that join the softmax of each head without a value."""
        return None if self.sink_GQ is None else self.sink_GQ.view(-1)

    @cached_property
    def _keys_values(self) -> Linear:
        """The product of keys and values, with the last queries if they do not end where a product may begin."""
        queries = (2 if self.shape.gated else 1) * self.shape.heads * self.shape.head_dim
        return self._qkv.outputs_from(queries // OUTPUT_GRID * OUTPUT_GRID)

    def _placed(self, x_NHD: Tensor, norm: RMSNorm | None, batch: StepBatch) -> Tensor:
        """Norm each head and rotate it, in float32; round once."""
        if norm is None and self.rotation is None:
            return x_NHD
        if has_kernels(x_NHD.device):
            from headwater.mixers.gpu.norm import place  # needs Triton

            cos_sin_N2F = None if self.rotation is None else self.rotation.at(batch.position_N)
            return place(x_NHD, norm, cos_sin_N2F, self.rotation is not None and self.rotation.neighbours)
        placed_NHD = x_NHD.float() if norm is None else norm.in_float32(x_NHD)
        if self.rotation is not None:
            placed_NHD = placed_NHD.clone() if placed_NHD is x_NHD else placed_NHD
            cos_sin_N2F = self.rotation.at(batch.position_N)[: len(x_NHD)]
            rotate_into(placed_NHD, cos_sin_N2F, self.rotation.neighbours)
        return placed_NHD.to(x_NHD.dtype)

    def moved(self, k_TGD: Tensor, from_T: Tensor, to_T: Tensor) -> Tensor:
        """Re-rotate keys from some positions to others, in float32; round once."""
        return k_TGD if self.rotation is None else self.rotation.turned(k_TGD, self.rotation.between(from_T, to_T))

    def finish(self, read_NHD: Tensor, gate_NHD: Tensor | None, n_prefill: int) -> Tensor:
        """Gate and project what each head read to rows [N, C]."""
        return self.out(self.gated(read_NHD, gate_NHD).flatten(1), n_prefill)

    def gated(self, read_NHD: Tensor, gate_NHD: Tensor | None) -> Tensor:
        """Multiply what each head read by the sigmoid of its gate, if there is one, in place."""
        if gate_NHD is None:
            return read_NHD
        if has_kernels(read_NHD.device) and read_NHD.is_contiguous():
            from headwater.mixers.gpu.pointwise import open_  # needs Triton

            return open_(read_NHD, gate_NHD)
        return read_NHD.mul_(sigmoid(gate_NHD))


class Attention:
    """A layer of full attention; owns weights only, keys and values are in the arena."""

    def __init__(self, layer: int, shape: GroupedAttention, weights: Weights) -> None:
        self.layer = layer
        self.shape = shape
        self.heads = Heads(shape, weights)

    def forward(self, x_NC: Tensor, step: AttentionStep) -> Tensor:
        """Write the step's keys and values; attend from each row to its sequence up to that row."""
        projected = self.heads.project(x_NC, step.batch)
        step.write(self.layer, projected.k_NGD, projected.v_NGD)
        read_NHD = self._attend(projected.q_NGQD, step)
        return self.heads.finish(read_NHD, projected.gate_NHD, step.batch.n_prefill)

    def store(self, x_NC: Tensor, step: AttentionStep) -> None:
        """Write keys and values of a step without decoding rows; compute nothing else."""
        step.write(self.layer, *self.heads.keys_values(x_NC, step.batch))

    def moved(self, kept: tuple[Tensor, ...], from_T: Tensor, to_T: Tensor) -> tuple[Tensor, ...]:
        """Return keys, re-rotated from some positions to others, and values: [T, G · D], as the arena keeps them."""
        keys, values = kept
        return self.heads.moved(keys.unflatten(-1, (self.shape.kv_heads, -1)), from_T, to_T).flatten(1), values

    def _attend(self, q_NGQD: Tensor, step: AttentionStep) -> Tensor:
        out_NGQD = torch.empty_like(q_NGQD, memory_format=torch.contiguous_format)
        decoding = step.batch.decode_rows
        out_NGQD[decoding.stop :] = 0
        self._prefill_into(out_NGQD, q_NGQD, step)
        out_DGQD, q_DGQD = out_NGQD[decoding], q_NGQD[decoding]
        for batch in step.decodes:
            out_DGQD[batch.at] = self._decode(q_DGQD[batch.at], batch, step)
        return out_NGQD.flatten(1, 2)

    def _prefill_into(self, out_NGQD: Tensor, q_NGQD: Tensor, step: AttentionStep) -> None:
        """Attend from the rows of slices."""
        for slices in step.batch.sequences:
            keys_values = self._heads_of(step.arena.gather(self.layer, slices[-1].table_P, slices[-1].end))
            for s in slices:
                rows, scale = slice(s.first, s.first + s.length), self.shape.scale
                softmax.prefill_into(
                    out_NGQD[rows], q_NGQD[rows], keys_values, s.start, step.mask, scale, self.heads.sink_GQ
                )

    def _decode(self, q_BGQD: Tensor, batch: PagedBatch, step: AttentionStep) -> Tensor:
        gathered = step.arena.gather_batch(self.layer, batch.table_BP, batch.unused_T)
        k_BKGD, v_BKGD = self._heads_of(tuple(x[:, : batch.n_keys] for x in gathered))
        return softmax.decode(q_BGQD, (k_BKGD, v_BKGD), batch.mask_B11K, self.shape.scale, self.heads.sink_GQ)

    def _heads_of(self, keys_values: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Split keys and values into heads, [..., G, D] each."""
        keys, values = keys_values
        return keys.unflatten(-1, (self.shape.kv_heads, -1)), values.unflatten(-1, (self.shape.kv_heads, -1))
