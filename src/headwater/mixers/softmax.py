"""Causal attention of some queries over a sequence's keys, in bits that depend only on the sequence.

Prefill: the position of a query fixes the keys it is computed over, all 512-token blocks up to its own, with later keys
masked. The number of rows computed together has no influence if it is a multiple of 8 (fewer than 4 rows take another
path through the product inside scaled_dot_product_attention; found by measurement, see docs/decisions).

Decode: sequences whose key counts round up to the same number are one batch. The rounded count depends only
on the sequence's length. Counts are rounded up to 128: with 512, a sequence of 500 to 4,000 tokens takes 10% longer, in
a batch or not.

Shapes: T queries (or tokens), R rows (T rounded up to 8), B decoding sequences, G KV heads, Q queries that share one KV
head, K keys, D head width, P pages of a table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.mixers.activations import sigmoid
from headwater.spec import KEY_BLOCK

ROWS = 8
KEYS = 128  # tokens
CHANNELS = 32  # of a head, in products of 16 bits: a full tile of AMX
BATCH_KEYS = 2048  # at most, of a batch of several sequences: its gathered keys fit in cache


class CausalMask:
    """Zeros for every visible key, then -inf: each causal mask of a step is a window of it."""

    def __init__(self, longest: int, dtype: torch.dtype, device: torch.device) -> None:
        """Reserve windows for queries up to position `longest`."""
        self._visible = -(-longest // KEY_BLOCK) * KEY_BLOCK
        self._ramp = torch.zeros(self._visible + 2 * KEY_BLOCK, dtype=dtype, device=device)
        self._ramp[self._visible :] = -torch.inf

    def from_last(self, end: int) -> Tensor:
        """Return the window whose first row belongs to the query at position `end` − 1; see `backwards`."""
        return self._ramp[self._visible - end :]


def prefill_into(
    out_TGQD: Tensor,
    q_TGQD: Tensor,
    keys_values: tuple[Tensor, Tensor],
    start: int,
    mask: CausalMask,
    scale: float | None = None,
    sink_GQ: Tensor | None = None,
) -> None:
    """Compute attention of the queries at positions [start, start + T) over the gathered keys [0, start + T)."""
    first, end = start, start + q_TGQD.shape[0]
    while first < end:
        n_keys = (first // KEY_BLOCK + 1) * KEY_BLOCK
        last = min(n_keys, end)
        rows = slice(first - start, last - start)
        keys, values = (x[:n_keys] for x in keys_values)
        out_TGQD[rows] = backwards(q_TGQD[rows], (keys, values), mask.from_last(last), scale, sink_GQ)
        first = last


def backwards(
    q_TGQD: Tensor,
    keys_values: tuple[Tensor, Tensor],
    mask_from_last: Tensor,
    scale: float | None,
    sink_GQ: Tensor | None = None,
) -> Tensor:
    """Compute attention of successive queries over keys [K, G, D].

    Queries are in reverse order, the last one in row 0. Then row r sees one key fewer than row r - 1, and the mask is
    one vector: row 0 takes its beginning, and each later row starts one element further. So no memory grows with
    queries times keys.
    """
    n_queries, n_kv, n_shared, width = q_TGQD.shape
    n_rows = -(-n_queries // ROWS) * ROWS
    q_RGQD = q_TGQD.new_zeros(n_rows, n_kv, n_shared, width)
    q_RGQD[:n_queries] = q_TGQD.flip(0)
    k_GQKD, v_GQKD = (x.transpose(0, 1)[:, None].expand(-1, n_shared, -1, -1) for x in keys_values)
    mask_RK = mask_from_last.as_strided((n_rows, len(keys_values[0])), (1, 1))
    sink_GQ1 = None if sink_GQ is None else sink_GQ[:, :, None]
    out_GQRD = attend(q_RGQD.permute(1, 2, 0, 3), k_GQKD, v_GQKD, mask_RK, scale, sink_GQ1)
    return out_GQRD[:, :, :n_queries].permute(2, 0, 1, 3).flip(0)


def decode(
    q_BGQD: Tensor,
    keys_values: tuple[Tensor, Tensor],
    mask_B11K: Tensor,
    scale: float | None = None,
    sink_GQ: Tensor | None = None,
) -> Tensor:
    """Compute attention of one query of each sequence over its keys [B, K, G, D].

    Queries that share a KV head are rows of one product. With one KV head they are split in two products, one a thread.
    """
    halves = 2 if q_BGQD.shape[1] == 1 and q_BGQD.shape[2] % 2 == 0 else 1
    q_BHRD = q_BGQD.unflatten(2, (halves, -1)).flatten(1, 2)
    n_heads, n_rows = q_BHRD.shape[1:3]
    k_BHKD, v_BHKD = (x.transpose(1, 2).expand(-1, n_heads, -1, -1) for x in keys_values)
    mask_B1RK = mask_B11K.expand(-1, -1, n_rows, -1)
    sink_1HR = None if sink_GQ is None else sink_GQ.view(1, n_heads, n_rows)
    return attend(q_BHRD, k_BHKD, v_BHKD, mask_B1RK, scale, sink_1HR).reshape(q_BGQD.shape)


def attend(
    q_BHRD: Tensor,
    k_BHKD: Tensor,
    v_BHKD: Tensor,
    mask: Tensor,
    scale: float | None = None,
    sink_BHR: Tensor | None = None,
) -> Tensor:
    """Compute attention of at least two heads at once: products of a single head are split over threads: other bits.

    In 16 bits, heads of more than 32 channels are filled up to a multiple of 32: otherwise a row's bits depend on its
    place among the rows (seen at 40, 48, 56, 72, 80 and 88 channels with AMX).

    `sink_BHR`, some dimensions of which may be 1, are logits that join each softmax without a value.
    """
    alone, width = q_BHRD.shape[0] * q_BHRD.shape[1] == 1, q_BHRD.shape[-1]
    q, k, v = (x.expand(2, -1, -1, -1) if alone else x for x in (q_BHRD, k_BHKD, v_BHKD))
    missing = -width % CHANNELS if q.element_size() == 2 and width > CHANNELS else 0
    if missing:
        q, k, v = (F.pad(x, (0, missing)) for x in (q, k, v))
        scale = width**-0.5 if scale is None else scale
    if sink_BHR is None:
        read = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    else:  # what F.scaled_dot_product_attention calls, which returns the logarithm of each softmax's sum as well
        read, log_sum_BHR = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, attn_mask=mask, scale=scale
        )
        read.mul_(sigmoid(log_sum_BHR - sink_BHR)[..., None])
    return read[: len(q_BHRD), ..., :width]


@dataclass(frozen=True)
class DecodeBatch:
    """Decoding sequences that are computed as one product."""

    members: tuple[int, ...]  # indices of the step's decoding sequences
    at: slice | Tensor  # the same indices; a slice if they are adjacent
    n_keys: int
    mask_B11K: Tensor  # 0 for a token, -inf for padding


@dataclass(frozen=True)
class PagedBatch(DecodeBatch):
    """Decoding sequences that are computed as one product over pages of the arena."""

    table_BP: Tensor  # int64; padded with the sequence's first page, which is masked there
    unused_T: Tensor  # int64: indices of tokens, among all tokens of these pages, that were never written

    def from_key(self, first: int) -> PagedBatch:
        """Return the same sequences, whose keys before the one at position `first` are not seen."""
        mask_B11K = self.mask_B11K.clone()
        mask_B11K[..., :first] = -torch.inf
        return replace(self, mask_B11K=mask_B11K)


def decode_batches(
    lengths: Sequence[int], dtype: torch.dtype, device: torch.device, most_keys: int | None = None
) -> tuple[DecodeBatch, ...]:
    """Group all decoding sequences by rounded length; `lengths` are the tokens that each sees, at most `most_keys`."""
    together: dict[int, list[int]] = defaultdict(list)
    for at, length in enumerate(lengths):
        n_keys = -(-length // KEYS) * KEYS
        together[n_keys if most_keys is None else min(n_keys, most_keys)].append(at)
    batches = []
    for n_keys, members in together.items():
        limit, ramp = max(1, BATCH_KEYS // n_keys), _ramp(n_keys, dtype, device)
        for first in range(0, len(members), limit):
            some = members[first : first + limit]
            masks = [ramp[n_keys - lengths[at] : 2 * n_keys - lengths[at]] for at in some]
            mask_BK = masks[0][None] if len(masks) == 1 else torch.stack(masks)
            batches.append(DecodeBatch(tuple(some), _at(some, device), n_keys, mask_BK[:, None, None]))
    return tuple(batches)


def _at(members: list[int], device: torch.device) -> slice | Tensor:
    first, last = members[0], members[-1] + 1
    return slice(first, last) if last - first == len(members) else torch.tensor(members, device=device)


@lru_cache(maxsize=64)
def _ramp(n_keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `n_keys` zeros, then -inf: every decode mask is a window of it."""
    return F.pad(torch.zeros(n_keys, dtype=dtype, device=device), (0, KEYS), value=-torch.inf)


def paged_batches(
    lengths: Sequence[int], tables: Sequence[Tensor], page_size: int, dtype: torch.dtype
) -> tuple[PagedBatch, ...]:
    """Group decoding sequences, with their pages; each of `tables` is at least as long as its length needs."""
    if not tables:
        return ()
    batches = []
    for batch in decode_batches(lengths, dtype, tables[0].device):
        n_pages = -(-batch.n_keys // page_size)
        held = [tables[at][: -(-lengths[at] // page_size)] for at in batch.members]
        unused_T = _unused([lengths[at] for at in batch.members], n_pages, page_size).to(tables[0].device)
        table_BP = _filled_up(held, n_pages)
        batches.append(PagedBatch(batch.members, batch.at, batch.n_keys, batch.mask_B11K, table_BP, unused_T))
    return tuple(batches)


def _filled_up(tables: list[Tensor], n_pages: int) -> Tensor:
    """Stack tables, `n_pages` of each, padded with the first page of each."""
    parts = (part for table in tables for part in (table, table[:1].expand(n_pages - len(table))))
    return torch.cat(list(parts)).view(len(tables), n_pages)


def _unused(lengths: list[int], n_pages: int, page_size: int) -> Tensor:
    """Return the indices of tokens that were never written, counted over the pages of all sequences.

    The first page is full, and so can serve as padding, unless it is also the last page.
    """
    of_one, unused = n_pages * page_size, []
    for i, length in enumerate(lengths):
        end = -(-length // page_size) * page_size if length > page_size else of_one
        unused.append(torch.arange(i * of_one + length, i * of_one + end))
    return torch.cat(unused)
