"""Attention over paged keys and values on a GPU, in Triton: prefill in tiles of 64 queries, decode in fixed splits.

Keys are read in blocks of 64 tokens, in order, straight from their pages. A block that a query may not see leaves its
running maximum, sum and output as they are, bit for bit; splits stand at absolute positions. So a query's bits depend
neither on the tile nor on the company it is computed in.

P prefill rows, B decoding sequences, S slices, T pages of a table (padded), H heads, G KV heads, D head width, n tiles,
s splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headwater.mixers.batch import StepBatch, padded_tables

TILE = 64  # queries, and keys of a block: pages are multiples of it
SPLIT = 1024  # keys that one program of a decoding sequence reads


@dataclass(frozen=True)
class Decoding:
    """Where the keys of decoding sequences are, int32 on the device."""

    table_BT: torch.Tensor
    length_B: torch.Tensor  # tokens of each, the one of this step included
    splits: int  # that the longest table has room for

    @classmethod
    def of_rings(cls, batch: StepBatch, window: int) -> Decoding:
        """Each sequence has one page, of `window` tokens: its row of the state memory, which is a ring."""
        length_B = (batch.position_N[batch.decode_rows] + 1).clamp(max=window)
        return cls(batch.decode_slot_B[:, None].int(), length_B.int(), -(-window // SPLIT))


@dataclass(frozen=True)
class PagedStep(Decoding):
    """Where queries and pages of a step are; made once a step."""

    table_ST: torch.Tensor
    start_S: torch.Tensor
    length_S: torch.Tensor
    first_S: torch.Tensor
    slice_n: torch.Tensor  # which slice a tile is of
    tile_n: torch.Tensor  # and which of its tiles

    @classmethod
    def of(cls, batch: StepBatch, page_size: int) -> PagedStep:
        """Raises ValueError for pages that blocks of 64 keys do not fill."""
        if page_size % TILE:
            raise ValueError(f"a page has {page_size} tokens, kernels take multiples of {TILE}")

        def tensor(values: list[int]) -> torch.Tensor:
            if not values:  # even that would be a copy to the device, which must not be where a graph is recorded
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
    """One block of 64 tokens of one KV head: [tile, D]."""
    page = tl.load(table + block * tile // page_size).to(tl.int64)
    token = block * tile % page_size + tl.arange(0, tile)
    return tl.load(pages + page * page_row + token[:, None] * token_row + at + channel[None, :], mask=mask, other=0.0)


@triton.jit
def _attend(
    q, k_pages, v_pages, table, first_block, end_block, n_keys, limit, at, channel, in_head, best, total, out, scale,
    page_size, page_row, token_row, tile: tl.constexpr,
):  # fmt: skip
    """Blocks of keys in order, online softmax (Milakov and Gimelshein 2018): `limit` is what each query may see."""
    for block in range(first_block, end_block):
        key = block * tile + tl.arange(0, tile)
        mask = (key < n_keys)[:, None] & in_head  # what stands in a page after the last token may be anything
        k_tD = _keys(k_pages, table, block, page_size, page_row, token_row, at, channel, mask, tile)
        v_tD = _keys(v_pages, table, block, page_size, page_row, token_row, at, channel, mask, tile)
        score = tl.dot(q, tl.trans(k_tD), input_precision="ieee") * scale
        visible = key[None, :] < limit[:, None]
        score = tl.where(visible, score, float("-inf"))
        better = tl.maximum(best, tl.max(score, 1))
        weight = tl.where(visible, tl.exp(score - better[:, None]), 0.0)
        rescale = tl.exp(best - better)
        total = total * rescale + tl.sum(weight, 1)
        out = out * rescale[:, None] + tl.dot(weight.to(v_tD.dtype), v_tD, input_precision="ieee")
        best = better
    return best, total, out


@triton.jit
def _prefill(
    q, k_pages, v_pages, out, table_ST, start_S, length_S, first_S, slice_n, tile_n, scale,
    table_row, heads, shared, page_size, page_row, token_row,
    width: tl.constexpr, padded: tl.constexpr, tile: tl.constexpr,
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
    end = (start + tl.minimum((index + 1) * tile, length) + tile - 1) // tile
    best = tl.full((tile,), -1e30, tl.float32)
    total = tl.zeros((tile,), tl.float32)
    read = tl.zeros((tile, padded), tl.float32)
    in_head = (channel < width)[None, :] & (tl.arange(0, tile) >= 0)[:, None]
    best, total, read = _attend(
        q_tD, k_pages, v_pages, table_ST + which * table_row, 0, end, start + length, limit, (head // shared) * width,
        channel, in_head, best, total, read, scale, page_size, page_row, token_row, tile,
    )  # fmt: skip
    tl.store(out + where, (read / total[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _decode_split(
    q, k_pages, v_pages, best_sum, reads, table_BT, length_B, scale,
    table_row, shared, page_size, page_row, token_row, splits,
    width: tl.constexpr, padded: tl.constexpr, rows: tl.constexpr, tile: tl.constexpr, split: tl.constexpr,
):  # fmt: skip
    """All queries that share a KV head, over one split of a sequence's keys: maximum, sum and what was read."""
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
        channel, in_head, best, total, read, scale, page_size, page_row, token_row, tile,
    )  # fmt: skip
    to = head * splits + part
    tl.store(best_sum + 2 * to, best, mask=row < shared)
    tl.store(best_sum + 2 * to + 1, total, mask=row < shared)
    tl.store(reads + to[:, None] * width + channel[None, :], read, mask=inside)


@triton.jit
def _merge(
    best_sum, reads, out, length_B, heads, splits, width: tl.constexpr, padded: tl.constexpr, split: tl.constexpr
):
    """The splits of one head, in order."""
    which, head = tl.program_id(0), tl.program_id(1)
    channel = tl.arange(0, padded)
    first = (which * heads + head) * splits
    best = tl.full((1,), -1e30, tl.float32)
    total = tl.zeros((1,), tl.float32)
    read = tl.zeros((padded,), tl.float32)
    for part in range(tl.cdiv(tl.load(length_B + which), split)):
        own = tl.load(best_sum + 2 * (first + part))
        better = tl.maximum(best, own)
        kept, added = tl.exp(best - better), tl.exp(own - better)
        total = total * kept + tl.load(best_sum + 2 * (first + part) + 1) * added
        read = read * kept + added * tl.load(reads + (first + part) * width + channel, mask=channel < width, other=0.0)
        best = better
    to = out + (which * heads + head) * width + channel
    tl.store(to, (read / total).to(out.dtype.element_ty), mask=channel < width)


def prefill(
    q_PHD: torch.Tensor, keys_values: tuple[torch.Tensor, torch.Tensor], step: PagedStep, page_size: int, scale: float
) -> torch.Tensor:
    """Attention of all slices' queries; `keys_values` are the layer's pages [pages, page_size · G · D], strided."""
    _, heads, width = q_PHD.shape
    k_pages, v_pages = keys_values
    kv_width = k_pages.shape[1] // page_size
    q_PHD = q_PHD.contiguous()
    out_PHD = torch.empty_like(q_PHD)
    _prefill[len(step.tile_n), heads](
        q_PHD, k_pages, v_pages, out_PHD, step.table_ST, step.start_S, step.length_S, step.first_S, step.slice_n,
        step.tile_n, scale, step.table_ST.stride(0), heads, heads * width // kv_width, page_size, k_pages.stride(0),
        kv_width, width=width, padded=max(16, triton.next_power_of_2(width)), tile=TILE,
    )  # fmt: skip
    return out_PHD


def decode(
    q_BHD: torch.Tensor, keys_values: tuple[torch.Tensor, torch.Tensor], step: Decoding, page_size: int, scale: float
) -> torch.Tensor:
    """Attention of the one query of each decoding sequence. A page that is a table's only one has tokens at will."""
    n, heads, width = q_BHD.shape
    k_pages, v_pages = keys_values
    kv_width = k_pages.shape[1] // page_size
    groups = kv_width // width
    shared = heads // groups
    q_BHD = q_BHD.contiguous()
    out_BHD = torch.empty_like(q_BHD)
    best_sum = torch.empty(n, heads, step.splits, 2, dtype=torch.float32, device=q_BHD.device)
    reads = torch.empty(n, heads, step.splits, width, dtype=torch.float32, device=q_BHD.device)
    padded = max(16, triton.next_power_of_2(width))
    _decode_split[n, groups, step.splits](
        q_BHD, k_pages, v_pages, best_sum, reads, step.table_BT, step.length_B, scale, step.table_BT.stride(0), shared,
        page_size, k_pages.stride(0), kv_width, step.splits,
        rows=max(16, triton.next_power_of_2(shared)), tile=TILE, width=width, padded=padded, split=SPLIT,
    )  # fmt: skip
    merge_into(out_BHD, best_sum, reads, step)
    return out_BHD


def merge_into(out_BHD: torch.Tensor, best_sum: torch.Tensor, reads: torch.Tensor, step: Decoding) -> None:
    """What each head read, of its splits: maximum and sum [B, H, s, 2], and reads [B, H, s, D], all float32."""
    n, heads, width = out_BHD.shape
    _merge[n, heads](
        best_sum, reads, out_BHD, step.length_B, heads, step.splits, width=width,
        padded=max(16, triton.next_power_of_2(width)), split=SPLIT,
    )  # fmt: skip
