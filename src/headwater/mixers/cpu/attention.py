"""Full, latent and windowed attention on a CPU: prefill by torch, all decoding rows of a step by kernels.

The kernels read keys and values in place: in pages of the arena, or in rings. A ring is one page of W tokens.

N rows of a step, B decoding sequences, T pages of a table, H heads, G KV heads, D head width, W tokens of a window,
X = H · D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headwater.kernels import attention
from headwater.kernels.recording import constant, empty, flat
from headwater.kernels.vectors import LANES
from headwater.layers.attention import GroupedAttention, WindowAttention
from headwater.layers.mla import LatentAttention
from headwater.mixers.activations import RMSNorm
from headwater.mixers.attention import Attention, AttentionStep, Destinations, Heads
from headwater.mixers.batch import LastValue, StepBatch
from headwater.mixers.mla import LatentAttentionMixer
from headwater.mixers.weights import Weights
from headwater.mixers.window import Rings, SegmentWindow, WindowAttentionMixer, in_rings

Array = np.ndarray[Any, Any]
NONE = np.empty(0, np.float32)
SCRATCH_BYTES = 64 << 20  # of attention's results for splits of keys: 32 rows of a long context would take gigabytes


class HeadShape(NamedTuple):
    """Numbers of a layer's heads, and widths of their keys and values in elements."""

    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    sinks: Array = NONE  # a logit of each head, or nothing


class Gates(NamedTuple):
    """Gates of what heads read, before the sigmoid; an empty array: there are none."""

    values: Array
    row: int = 0  # elements from a row's to the next row's
    head: int = 0  # elements from a head's to the next head's


@dataclass(frozen=True)
class DecodeRows:
    """Decoding rows of a step: their positions, and the pages of the keys that they see."""

    position_B: Array  # int64
    table_BT: Array  # int64; pages that hold the last keys, as many as there is room for: all, or those of a window
    longest: int  # one past the largest position, or more
    first_key: int = 0  # position of the first key that they see

    @classmethod
    def of_pages(cls, batch: StepBatch, first_key: int = 0) -> DecodeRows:
        """Return the rows with their pages of the arena."""
        positions, tables = batch.position_N[batch.decode_rows].numpy(), batch.decode_table_BT.numpy()
        return cls(positions, tables, batch.longest, first_key)

    @classmethod
    def of_rings(cls, batch: StepBatch) -> DecodeRows:
        """Return the rows with their rings, each of which is one page."""
        batch.check_slots()
        table_B1 = batch.decode_slot_B.numpy()[:, None]
        return cls(batch.position_N[batch.decode_rows].numpy(), table_B1, batch.longest)

    @cached_property
    def tables(self) -> Array:
        """Tables one after the other."""
        return self.table_BT.reshape(-1)

    @property
    def table_row(self) -> int:
        """Pages of a table."""
        return int(self.table_BT.shape[1])

    def attend(self, q: Array, pages: Pages, gates: Gates, out: Array, out_row: int, shape: HeadShape) -> None:
        """Attend from queries to the rows' pages, for as many rows a call as have room in SCRATCH_BYTES: at least one.

        A row's bits do not depend on the other rows of its call. out_row: elements from a row's result to the next.
        """
        heads, kv_heads, k_width, v_width, sinks = shape
        n, together = len(self.position_B), attention.QUERY_GROUP
        queries = kv_heads * -(-heads // kv_heads // together) * together
        splits = -(-min(self.longest, self.table_row * pages.size) // attention.SPLIT)
        at_once = min(n, max(1, SCRATCH_BYTES // (4 * splits * queries * (2 + v_width))))
        highest_sum = flat(empty(2 * at_once * splits * queries))
        reads = self._reads_of(at_once * splits * queries * v_width)
        for first in range(0, n, at_once):
            end = min(n, first + at_once)
            attention.attend(
                q[first * heads * k_width :], pages.keys, pages.values,
                self.tables[first * self.table_row : end * self.table_row], self.position_B[first:end],
                gates.values[first * gates.row :], sinks, out[first * out_row :], highest_sum, reads, heads, kv_heads,
                k_width, v_width, pages.size, pages.row, self.table_row, self.first_key, gates.row, gates.head, out_row,
            )  # fmt: skip

    def _reads_of(self, size: int) -> Array:
        """Return memory for what queries read."""
        if size not in self._reads:
            self._reads[size] = flat(empty(size))
        return self._reads[size]

    @cached_property
    def _reads(self) -> dict[int, Array]:
        """Memory for what queries read, by its floats; layers use it one after the other."""
        return {}


@dataclass(frozen=True)
class Pages:
    """Keys and values of a layer in their pages, flat."""

    keys: Array
    values: Array
    row: int  # elements from a page to the next
    size: int  # tokens

    @classmethod
    def of(cls, tensors: tuple[Tensor, ...], size: int) -> Pages:
        """Return keys and values, or tensors that are both."""
        keys, values = tensors[0], tensors[-1]
        assert keys.stride(0) == values.stride(0)
        return cls(flat(keys), flat(values), keys.stride(0), size)


class KernelPages:
    """Pages of one layer as arrays, which are the same from step to step."""

    def __init__(self) -> None:
        self._pages = LastValue(Pages.of)

    def of(self, tensors: tuple[Tensor, ...], size: int) -> Pages:
        """Return keys and values, or tensors that are both, in pages of `size` tokens."""
        return self._pages.of(tensors[0], tensors, size)


@dataclass(frozen=True)
class AttentionStepOnCpu(AttentionStep):
    """A step whose decoding rows are read and written by kernels."""

    @cached_property
    def rows(self) -> DecodeRows:
        """Decoding rows and their pages."""
        return DecodeRows.of_pages(self.batch, self.first_key)

    @cached_property
    def destinations_of_slices(self) -> Destinations:
        """Rows of slices whose KV is written, and their pages."""
        return self._written(with_decoding=False)

    def write_slices(self, layer: int, *rows_PX: Tensor) -> None:
        """Write KV of the rows of slices to the arena."""
        self._write_to(self.destinations_of_slices, layer, *rows_PX)


class DecodeKernel:
    """The kernels around the attention of one layer's decoding rows, with its norms and rotation."""

    def __init__(self, shape: GroupedAttention, heads: Heads) -> None:
        self.shape, self.rotation = shape, heads.rotation
        self.norms = tuple(self._weights(norm) for norm in (heads.q_norm, heads.k_norm))
        sinks = NONE if heads.sink_GQ is None else flat(heads.sink_GQ)
        self._heads = HeadShape(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim, sinks)
        self.scale = shape.head_dim**-0.5 if shape.scale is None else shape.scale
        self._cos_sin = LastValue(flat)
        self.pages = KernelPages()

    @staticmethod
    def takes(shape: GroupedAttention) -> bool:
        """Return whether heads are whole vectors."""
        return shape.head_dim % LANES == 0

    def decode_into(self, read_BX: Tensor, qkv_BX: Tensor, rows: DecodeRows, pages: Pages) -> None:
        """Write keys and values of rows; write what their heads read from their sequences, gated."""
        s, width = self.shape, self.shape.head_dim
        n = len(rows.position_B)
        x, x_row = flat(qkv_BX), qkv_BX.stride(0)
        q_step = (2 if s.gated else 1) * width
        half, neighbours = (s.rotary.dim // 2, s.rotary.neighbours) if s.rotary else (0, False)
        q = flat(empty(n * s.heads * width))
        attention.place(
            x, pages.keys, pages.values, q, rows.position_B, rows.tables, *self.norms, self._angles(rows),
            s.heads, s.kv_heads, width, x_row, q_step, half, neighbours, s.norm_eps, self.scale,
            pages.size, pages.row, rows.table_row,
        )  # fmt: skip
        gates = Gates(x[width:], x_row, q_step) if s.gated else Gates(x[:0])
        rows.attend(q, pages, gates, flat(read_BX), read_BX.stride(0), self._heads)

    def _angles(self, rows: DecodeRows) -> Array:
        """Return cosines and sines of all positions."""
        if self.rotation is None:
            return NONE
        with constant():
            table = self.rotation.until(rows.longest)
        return self._cos_sin.of(table, table)

    @staticmethod
    def _weights(norm: RMSNorm | None) -> Array:
        return np.empty(0, np.float32) if norm is None else flat(norm.scale_C)


class AttentionOnCpu(Attention):
    """Full attention whose decode runs in kernels, straight from pages."""

    def __init__(self, layer: int, shape: GroupedAttention, weights: Weights) -> None:
        super().__init__(layer, shape, weights)
        self.kernel = DecodeKernel(shape, self.heads)

    def forward(self, x_NC: Tensor, step: AttentionStep) -> Tensor:
        """Compute the layer as `Attention.forward` does; outputs of decoding rows are close to its own."""
        assert isinstance(step, AttentionStepOnCpu)
        batch, n_prefill = step.batch, step.batch.n_prefill
        qkv_NX = self.heads.qkv(x_NC, n_prefill)
        read_NX = empty(len(qkv_NX), self.shape.heads * self.shape.head_dim, dtype=qkv_NX.dtype)
        if n_prefill:
            projected = self.heads.split(qkv_NX[:n_prefill], batch)
            step.write_slices(self.layer, projected.k_NGD, projected.v_NGD)
            read_PGQD = read_NX[:n_prefill].view(projected.q_NGQD.shape)
            self._prefill_into(read_PGQD, projected.q_NGQD, step)
            self.heads.gated(read_PGQD.flatten(1, 2), projected.gate_NHD)
        if batch.n_decode:
            pages = self.kernel.pages.of(step.arena.pages_of(self.layer), step.arena.page_size)
            read_BX, qkv_BX = (x_NX[batch.decode_rows] if n_prefill else x_NX for x_NX in (read_NX, qkv_NX))
            self.kernel.decode_into(read_BX, qkv_BX, step.rows, pages)
        return self.heads.out(read_NX, n_prefill)


class WindowAttentionOnCpu(WindowAttentionMixer):
    """Attention over a window whose decode runs in kernels, straight from rings."""

    def __init__(self, shape: WindowAttention, weights: Weights) -> None:
        super().__init__(shape, weights)
        self.kernel = DecodeKernel(shape, self.heads)

    def forward(
        self,
        x_NC: Tensor,
        batch: StepBatch,
        keys: Rings,
        values: Rings,
        segments: Sequence[SegmentWindow] = (),
        tail: Tensor | None = None,
    ) -> Tensor:
        """Compute the layer as `WindowAttentionMixer.forward` does; outputs of decoding rows are close to its own."""
        n_prefill, rings = batch.n_prefill, (keys, values)
        qkv_NX = self.heads.qkv(x_NC, n_prefill)
        read_NX = empty(len(qkv_NX), self.shape.heads * self.shape.head_dim, dtype=qkv_NX.dtype)
        if batch.slices:
            projected = self.heads.split(qkv_NX[:n_prefill], batch)
            read_PGQD = read_NX[:n_prefill].view(projected.q_NGQD.shape)
            self._prefill_into(read_PGQD, projected, batch, rings, segments, tail)
            self.heads.gated(read_PGQD.flatten(1, 2), projected.gate_NHD)
        pages = self.kernel.pages.of(tuple(ring.memory_RWGD for ring in rings), self.shape.window)
        if not batch.speculates:
            self._decode_rows_into(read_NX, qkv_NX, batch, pages)
            return self.heads.out(read_NX, n_prefill)
        for row_B, step in in_rings(rings, batch):
            read_BX = empty(len(row_B), read_NX.shape[1], dtype=read_NX.dtype)
            self._decode_rows_into(read_BX, qkv_NX[n_prefill + row_B], step, pages)
            read_NX[n_prefill + row_B] = read_BX
        return self.heads.out(read_NX, n_prefill)

    def _decode_rows_into(self, read_NX: Tensor, qkv_NX: Tensor, batch: StepBatch, pages: Pages) -> None:
        """Write what the decoding rows of a step read, and their tokens to the rings."""
        for at, part in batch.decode_parts:  # a sequence's next token overwrites one that this one sees
            whole = at == slice(0, len(qkv_NX))
            read_BX, qkv_BX = (x_NX if whole else x_NX[at] for x_NX in (read_NX, qkv_NX))
            self.kernel.decode_into(read_BX, qkv_BX, self._rows(part), pages)

    def _rows(self, batch: StepBatch) -> DecodeRows:
        return _ring_rows(self.shape.window).of(batch, batch)


@cache
def _ring_rows(window: int) -> LastValue[DecodeRows]:
    """Return the decoding rows of a step with their rings, which all layers with this window share."""
    return LastValue(DecodeRows.of_rings)


def attention_of(layer: int, shape: GroupedAttention, weights: Weights) -> Attention:
    """Build the layer: with kernels if its heads are whole vectors."""
    return (AttentionOnCpu if DecodeKernel.takes(shape) else Attention)(layer, shape, weights)


def window_attention_of(shape: WindowAttention, weights: Weights) -> WindowAttentionMixer:
    """Build the layer: with kernels if its heads are whole vectors."""
    return (WindowAttentionOnCpu if DecodeKernel.takes(shape) else WindowAttentionMixer)(shape, weights)


class LatentAttentionOnCpu(LatentAttentionMixer):
    """Latent attention whose decode runs in a kernel; prefill and the products of heads run in torch.

    The queries of all heads attend to one row a token: its key is the whole row, its value the latent at its beginning.
    L latent, X = L + position channels.
    """

    def __init__(self, layer: int, shape: LatentAttention, weights: Weights) -> None:
        super().__init__(layer, shape, weights)
        self.pages = KernelPages()

    def _read(self, q_BHX: Tensor, step: AttentionStep) -> Tensor:
        assert isinstance(step, AttentionStepOnCpu)
        heads, width = q_BHX.shape[1:]
        latent = self.shape.latent
        pages = self.pages.of(step.arena.pages_of(self.layer), step.arena.page_size)
        q_BHX = q_BHX.float() * self.shape.score_scale
        read_BHL = torch.empty_like(q_BHX[..., :latent], dtype=step.dtype, memory_format=torch.contiguous_format)
        read = flat(read_BHL)
        shape = HeadShape(heads, 1, width, latent)
        step.rows.attend(flat(q_BHX), pages, Gates(read[:0]), read, heads * latent, shape)
        return read_BHL


def latent_attention_of(layer: int, shape: LatentAttention, weights: Weights) -> LatentAttentionMixer:
    """Build the layer: with kernels if latents and rows are whole vectors."""
    whole = shape.latent % LANES == 0 and shape.rope_dim % LANES == 0
    return (LatentAttentionOnCpu if whole else LatentAttentionMixer)(layer, shape, weights)
