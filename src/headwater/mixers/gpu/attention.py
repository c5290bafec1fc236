"""Attention over paged keys and values on a GPU, in Triton: prefill in tiles of 64 queries, decode in fixed splits.

Keys are read in blocks of 64 tokens, in order, straight from their pages. A block that a query may not see leaves its
running maximum, sum and output as they are, bit for bit; splits are at absolute positions. So a query's bits depend
neither on the tile nor on the other sequences of the step.

P prefill rows, B decoding sequences, S slices, T pages of a table (padded), H heads, G KV heads, D head width, n tiles,
s splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.mixers.attention import Attention, AttentionStep, Destinations
from headwater.mixers.batch import StepBatch, padded_tables
from headwater.mixers.gpu import dense
from headwater.mixers.slices import Slice
from headwater.mixers.window import Rings, WindowAttentionMixer

TILE = 64  # queries, and keys of a block: pages are multiples of it
SPLIT = 256  # keys that one program of a decoding sequence reads
MERGED = 16  # splits of a head that are merged at once
WRITTEN = 2048  # elements that a program writes to pages


@dataclass(frozen=True)
class Decoding:
    """Page tables and lengths of decoding sequences, int32 on the device."""

    table_BT: Tensor
    length_B: Tensor  # tokens of each sequence, including the token of this step
    splits: int  # splits that the longest table has room for

    @classmethod
    def of_rings(cls, batch: StepBatch, window: int) -> Decoding:
        """Describe rings: each sequence has one page of `window` tokens, its row of the state memory."""
        length_B = (batch.position_N[batch.decode_rows] + 1).clamp(max=window)
        return cls(batch.decode_slot_B[:, None].int(), length_B.int(), -(-window // SPLIT))


@dataclass(frozen=True)
class PagedStep(Decoding):
    """Queries and page tables of a step, int32 on the device; built once a step."""

    table_ST: Tensor
    start_S: Tensor
    length_S: Tensor
    first_S: Tensor
    slice_n: Tensor  # slice of each tile
    tile_n: Tensor  # index of each tile within its slice

    @classmethod
    def of(cls, batch: StepBatch, page_size: int) -> PagedStep:
        """Describe a step. Raises ValueError for pages that are not multiples of 64 tokens."""
        if page_size % TILE:
            raise ValueError(f"a page has {page_size} tokens, kernels take multiples of {TILE}")

        def tensor(values: list[int]) -> Tensor:
            if not values:  # no copy to the device, not even an empty one, is allowed while a graph is recorded
                return batch.position_N.new_empty(0, dtype=torch.int32)
            return torch.tensor(values, dtype=torch.int32, device=batch.position_N.device)

        tiles = [(i, tile) for i, s in enumerate(batch.slices) for tile in range(-(-s.length // TILE))]
        table_BT = batch.decode_table_BT.int()
        return cls(
            table_ST=padded_tables([s.table_P for s in batch.slices], batch.position_N).int(),
            start_S=tensor([s.start for s in batch.slices]),
            length_S=tensor([s.length for s in batch.slices]),
            first_S=tensor([s.first for s in batch.slices]),
            slice_n=tensor([i for i, _ in tiles]),
            tile_n=tensor([tile for _, tile in tiles]),
            table_BT=table_BT,
            length_B=(batch.position_N[batch.decode_rows] + 1).int(),
            splits=-(-table_BT.shape[1] * page_size // SPLIT),
        )


@triton.jit
def _keys(pages, table, block, page_size, page_row, token_row, at, channel, mask, tile: tl.constexpr):
    """Load one block of 64 tokens of one KV head: [tile, D]."""
    page = tl.load(table + block * tile // page_size).to(tl.int64)
    token = block * tile % page_size + tl.arange(0, tile)
    return tl.load(pages + page * page_row + token[:, None] * token_row + at + channel[None, :], mask=mask, other=0.0)


@triton.jit
def _attend(
    q, k_pages, v_pages, table, first_block, end_block, n_keys, limit, at, channel, in_head, best, total, out, scale,
    page_size, page_row, token_row, window, windowed: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Attend to blocks of keys in order by online softmax (Milakov and Gimelshein 2018), to keys below `limit`.

    With a window, to the last `window` of these keys.
    """
    for block in range(first_block, end_block):
        key = block * tile + tl.arange(0, tile)
        mask = (key < n_keys)[:, None] & in_head  # memory of a page after the last token may hold anything
        k_tD = _keys(k_pages, table, block, page_size, page_row, token_row, at, channel, mask, tile)
        v_tD = _keys(v_pages, table, block, page_size, page_row, token_row, at, channel, mask, tile)
        score = tl.dot(q, tl.trans(k_tD), input_precision="ieee") * scale
        visible = key[None, :] < limit[:, None]
        if windowed:
            visible = visible & (key[None, :] >= limit[:, None] - window)
        score = tl.where(visible, score, float("-inf"))
        better = tl.maximum(best, tl.max(score, 1))
        weight = tl.where(visible, tl.exp(score - better[:, None]), 0.0)
        rescale = tl.exp(best - better)
        total = total * rescale + tl.sum(weight, 1)
        out = out * rescale[:, None] + tl.dot(weight.to(v_tD.dtype), v_tD, input_precision="ieee")
        best = better
    return best, total, out


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["out"])
def _prefill(
    q, k_pages, v_pages, sinks, out, table_ST, start_S, length_S, first_S, slice_n, tile_n, scale,
    table_row, heads, shared, page_size, page_row, token_row, window,
    windowed: tl.constexpr, sunk: tl.constexpr, width: tl.constexpr, padded: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    at, head = tl.program_id(0), tl.program_id(1)
    which, index = tl.load(slice_n + at), tl.load(tile_n + at)
    start, length = tl.load(start_S + which), tl.load(length_S + which)
    row = index * tile + tl.arange(0, tile)
    channel = tl.arange(0, padded)
    inside = (row < length)[:, None] & (channel < width)[None, :]
    where = ((tl.load(first_S + which) + row[:, None]).to(tl.int64) * heads + head) * width + channel[None, :]
    q_tD = tl.load(q + where, mask=inside, other=0.0)
    limit = start + row + 1
    begin = 0
    if windowed:
        begin = tl.maximum(start + index * tile + 1 - window, 0) // tile
    end = (start + tl.minimum((index + 1) * tile, length) + tile - 1) // tile
    best = tl.full((tile,), -1e30, tl.float32)
    total = tl.zeros((tile,), tl.float32)
    if sunk:  # a key whose value is zero
        best, total = tl.zeros_like(best) + tl.load(sinks + head), total + 1.0
    read = tl.zeros((tile, padded), tl.float32)
    in_head = (channel < width)[None, :] & (tl.arange(0, tile) >= 0)[:, None]
    best, total, read = _attend(
        q_tD, k_pages, v_pages, table_ST + which * table_row, begin, end, start + length, limit,
        (head // shared) * width, channel, in_head, best, total, read, scale, page_size, page_row, token_row, window,
        windowed, tile,
    )  # fmt: skip
    tl.store(out + where, (read / total[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["table_row", "splits"])
def _decode_split(
    q, k_pages, v_pages, best_sum, reads, table_BT, length_B, scale,
    table_row, shared, page_size, page_row, token_row, splits,
    width: tl.constexpr, padded: tl.constexpr, rows: tl.constexpr, tile: tl.constexpr, split: tl.constexpr,
):  # fmt: skip
    """Attend from queries that share a KV head to one split of a sequence's keys; write maximum, sum and the read."""
    which, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    groups = tl.num_programs(1)
    length = tl.load(length_B + which)
    row, channel = tl.arange(0, rows), tl.arange(0, padded)
    inside = (row < shared)[:, None] & (channel < width)[None, :]
    head = (which * groups + group) * shared + row
    q_RD = tl.load(q + head[:, None] * width + channel[None, :], mask=inside, other=0.0)
    limit = length + 0 * row
    first = part * (split // tile)
    end = tl.minimum(first + split // tile, (length + tile - 1) // tile)
    best = tl.full((rows,), -1e30, tl.float32)
    total = tl.zeros((rows,), tl.float32)
    read = tl.zeros((rows, padded), tl.float32)
    in_head = (channel < width)[None, :] & (tl.arange(0, tile) >= 0)[:, None]
    best, total, read = _attend(
        q_RD, k_pages, v_pages, table_BT + which * table_row, first, end, length, limit, group * width,
        channel, in_head, best, total, read, scale, page_size, page_row, token_row, 0, False, tile,
    )  # fmt: skip
    to = head * splits + part
    has_keys = (row < shared) & (first * tile + 0 * row < length)
    tl.store(best_sum + 2 * to, best, mask=has_keys)
    tl.store(best_sum + 2 * to + 1, total, mask=has_keys)
    tl.store(reads + to[:, None] * width + channel[None, :], read, mask=inside & has_keys[:, None])


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["out"])
def _merge(
    best_sum, reads, sinks, out, length_B, heads, splits,
    sunk: tl.constexpr, width: tl.constexpr, padded: tl.constexpr, split: tl.constexpr, merged: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one head, some at once and these in order, after its sink."""
    which, head = tl.program_id(0), tl.program_id(1)
    channel = tl.arange(0, padded)
    first = (which * heads + head).to(tl.int64) * splits
    n_parts = tl.cdiv(tl.load(length_B + which), split)
    best = tl.full((1,), -1e30, tl.float32)
    total = tl.zeros((1,), tl.float32)
    if sunk:
        best, total = tl.zeros_like(best) + tl.load(sinks + head), total + 1.0
    read = tl.zeros((padded,), tl.float32)
    for begin in range(0, n_parts, merged):
        part = begin + tl.arange(0, merged)
        at, inside = first + part, part < n_parts
        own = tl.load(best_sum + 2 * at, mask=inside, other=-1e30)
        better = tl.maximum(best, tl.max(own, 0))
        kept, added = tl.exp(best - better), tl.where(inside, tl.exp(own - better), 0.0)
        total = total * kept + tl.sum(added * tl.load(best_sum + 2 * at + 1, mask=inside, other=0.0), 0)
        in_read = inside[:, None] & (channel < width)[None, :]
        part_read = tl.load(reads + at[:, None] * width + channel[None, :], mask=in_read, other=0.0)
        read = read * kept + tl.sum(added[:, None] * part_read, 0)
        best = better
    to = out + (which * heads + head) * width + channel
    tl.store(to, (read / total).to(out.dtype.element_ty), mask=channel < width)


@triton.jit(do_not_specialize=["n_tokens"])
def _write(
    k, v, k_pages, v_pages, page_W, offset_W, n_tokens, k_row, v_row, page_row,
    width: tl.constexpr, padded: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    """Write the keys of some tokens, or their values."""
    which = tl.program_id(0) * at_once + tl.arange(0, at_once)
    channel = tl.arange(0, padded)[None, :]
    inside = (which < n_tokens)[:, None] & (channel < width)
    page = tl.load(page_W + which, mask=which < n_tokens, other=0).to(tl.int64)[:, None]
    offset = tl.load(offset_W + which, mask=which < n_tokens, other=0)[:, None]
    to = page * page_row + offset * width + channel
    row = which.to(tl.int64)[:, None]
    if tl.program_id(1) == 0:
        tl.store(k_pages + to, tl.load(k + row * k_row + channel, mask=inside), mask=inside)
    else:
        tl.store(v_pages + to, tl.load(v + row * v_row + channel, mask=inside), mask=inside)


def write(keys_values: tuple[Tensor, Tensor], page_W: Tensor, offset_W: Tensor, k_WX: Tensor, v_WX: Tensor) -> None:
    """Store keys and values of W tokens, each at its offset (in tokens) in its page; rows may be strided."""
    k_pages, v_pages = keys_values
    n, width = k_WX.shape
    padded = triton.next_power_of_2(width)
    at_once = max(1, WRITTEN // padded)
    _write[triton.cdiv(n, at_once), 2](
        k_WX, v_WX, k_pages, v_pages, page_W, offset_W, n, k_WX.stride(0), v_WX.stride(0), k_pages.stride(0),
        width=width, padded=padded, at_once=at_once,
    )  # fmt: skip


def prefill(
    q_PHD: Tensor,
    keys_values: tuple[Tensor, Tensor],
    step: PagedStep,
    page_size: int,
    scale: float,
    window: int | None = None,
    out_NHD: Tensor | None = None,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Compute attention of all slices' queries; `keys_values` are pages [pages, page_size · G · D], strided.

    With a window, a query sees that number of tokens, its own included. A head's sink is a logit that joins its softmax
    without a value. Results are written to `out_NHD`, if it is
    given.
    """
    _, heads, width = q_PHD.shape
    k_pages, v_pages = keys_values
    kv_width = k_pages.shape[1] // page_size
    q_PHD = dense(q_PHD)
    out_PHD = torch.empty_like(q_PHD) if out_NHD is None else out_NHD
    _prefill[len(step.tile_n), heads](
        q_PHD, k_pages, v_pages, sink_H, out_PHD, step.table_ST, step.start_S, step.length_S, step.first_S,
        step.slice_n, step.tile_n, scale, step.table_ST.stride(0), heads, heads * width // kv_width, page_size,
        k_pages.stride(0), kv_width, window or 0, windowed=window is not None, sunk=sink_H is not None, width=width,
        padded=max(16, triton.next_power_of_2(width)), tile=TILE,
    )  # fmt: skip
    return out_PHD


def prefill_alone(
    q_TGQD: Tensor,
    keys_values: tuple[Tensor, Tensor],
    start: int,
    scale: float,
    window: int | None = None,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Compute attention of one slice's queries, which begin at position `start` of adjacent keys and values [K, G, D].

    K is a multiple of 64.
    """
    device = q_TGQD.device
    n_tiles = -(-len(q_TGQD) // TILE)

    def one(value: int) -> Tensor:
        return torch.full((1,), value, dtype=torch.int32, device=device)

    none = one(0)[:0]
    step = PagedStep(
        table_BT=none[None],
        length_B=none,
        splits=0,
        table_ST=one(0)[None],
        start_S=one(start),
        length_S=one(len(q_TGQD)),
        first_S=one(0),
        slice_n=torch.zeros(n_tiles, dtype=torch.int32, device=device),
        tile_n=torch.arange(n_tiles, dtype=torch.int32, device=device),
    )
    keys, values = (dense(x_KGD).view(1, -1) for x_KGD in keys_values)
    read_THD = prefill(q_TGQD.flatten(1, 2), (keys, values), step, len(keys_values[0]), scale, window, sink_H=sink_H)
    return read_THD.view(q_TGQD.shape)


def decode(
    q_BHD: Tensor,
    keys_values: tuple[Tensor, Tensor],
    step: Decoding,
    page_size: int,
    scale: float,
    out_NHD: Tensor | None = None,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Compute attention of one query of each decoding sequence. A table's only page may have any number of tokens.

    Results are written to `out_NHD`, if it is given.
    """
    n, heads, width = q_BHD.shape
    k_pages, v_pages = keys_values
    kv_width = k_pages.shape[1] // page_size
    groups = kv_width // width
    shared = heads // groups
    q_BHD = dense(q_BHD)
    out_BHD = torch.empty_like(q_BHD) if out_NHD is None else out_NHD
    best_sum = torch.empty(n, heads, step.splits, 2, dtype=torch.float32, device=q_BHD.device)
    reads = torch.empty(n, heads, step.splits, width, dtype=torch.float32, device=q_BHD.device)
    padded = max(16, triton.next_power_of_2(width))
    _decode_split[n, groups, step.splits](
        q_BHD, k_pages, v_pages, best_sum, reads, step.table_BT, step.length_B, scale, step.table_BT.stride(0), shared,
        page_size, k_pages.stride(0), kv_width, step.splits,
        rows=max(16, triton.next_power_of_2(shared)), tile=TILE, width=width, padded=padded, split=SPLIT,
    )  # fmt: skip
    merge_into(out_BHD, best_sum, reads, step, sink_H)
    return out_BHD


def merge_into(out_BHD: Tensor, best_sum: Tensor, reads: Tensor, step: Decoding, sink_H: Tensor | None = None) -> None:
    """Merge what each head read in its splits: maximum and sum [B, H, s, 2], and reads [B, H, s, D], all float32."""
    n, heads, width = out_BHD.shape
    _merge[n, heads](
        best_sum, reads, sink_H, out_BHD, step.length_B, heads, step.splits, sunk=sink_H is not None, width=width,
        padded=max(16, triton.next_power_of_2(width)), split=SPLIT, merged=MERGED,
    )  # fmt: skip


@dataclass(frozen=True)
class AttentionStepOnGpu(AttentionStep):
    """A step of attention whose tables are computed on the device: in decode the host waits for nothing."""

    @cached_property
    def paged(self) -> PagedStep:
        """Queries and page tables for the kernels, which need neither masks nor batches."""
        return PagedStep.of(self.batch, self.arena.page_size)

    def _write_to(self, to: Destinations, layer: int, *rows_NX: Tensor) -> None:
        if len(rows_NX) != 2 or not len(to.page_W):
            super()._write_to(to, layer, *rows_NX)
            return
        keys, values = (x_NX[to.row_W].flatten(1) for x_NX in rows_NX)
        k_pages, v_pages = self.arena.pages_of(layer)
        write((k_pages, v_pages), to.page_W, to.offset_W, keys, values)

    @staticmethod
    def _decode_pages(batch: StepBatch, page_size: int) -> Tensor:
        n_pages_B = batch.position_N[batch.decode_rows] // page_size + 1
        return batch.decode_table_BT.gather(1, n_pages_B[:, None] - 1)[:, 0]


def paged(step: AttentionStep) -> PagedStep:
    """Return the kernels' view of a step, which was built for a GPU."""
    assert isinstance(step, AttentionStepOnGpu)
    return step.paged


class AttentionOnGpu(Attention):
    """Full attention whose prefill and decode run in Triton, straight from pages."""

    def _attend(self, q_NGQD: Tensor, step: AttentionStep) -> Tensor:
        out_NGQD = torch.empty_like(q_NGQD, memory_format=torch.contiguous_format)
        k_pages, v_pages = step.arena.pages_of(self.layer)
        scale = self.shape.head_dim**-0.5 if self.shape.scale is None else self.shape.scale
        for attend, rows in ((prefill, slice(0, step.batch.n_prefill)), (decode, step.batch.decode_rows)):
            if rows.start < rows.stop:
                q_nHD, out_nHD = (x_NGQD[rows].flatten(1, 2) for x_NGQD in (q_NGQD, out_NGQD))
                attend(
                    q_nHD, (k_pages, v_pages), paged(step), step.arena.page_size, scale, out_NHD=out_nHD,
                    sink_H=self.heads.sink_H,
                )  # fmt: skip
        return out_NGQD.flatten(1, 2)


class WindowAttentionOnGpu(WindowAttentionMixer):
    """Sliding-window attention in Triton, over the tokens of a slice and of the window before it, and over rings."""

    def _attend_slice_into(
        self, out_TGQD: Tensor, q_TGQD: Tensor, laid: tuple[Tensor, Tensor], s: Slice, first: int
    ) -> None:
        scale = self.shape.head_dim**-0.5 if self.shape.scale is None else self.shape.scale
        out_TGQD.copy_(prefill_alone(q_TGQD, laid, s.start - first, scale, self.shape.window, self.heads.sink_H))

    def _attend_into(self, out_BGQD: Tensor, q_BGQD: Tensor, batch: StepBatch, rings: tuple[Rings, Rings]) -> None:
        k_RX, v_RX = (ring.memory_RWGD.flatten(1) for ring in rings)
        scale = self.shape.head_dim**-0.5 if self.shape.scale is None else self.shape.scale
        step = Decoding.of_rings(batch, self.shape.window)
        read_BHD = decode(q_BGQD.flatten(1, 2), (k_RX, v_RX), step, self.shape.window, scale, sink_H=self.heads.sink_H)
        out_BGQD.copy_(read_BHD.view(out_BGQD.shape))
