"""Decoding sequences put together: those whose keys round up to the same number are one batch.

How many keys a sequence's query is held to depends on its length alone, so its bits do not depend on its company. They
are rounded up to 128: with 512, a sequence of 500 to 4,000 tokens takes 10% longer, alone or not.

B sequences of a batch, K keys of each, P pages of a table, D decoding sequences of the step, T tokens.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch

KEYS = 128  # tokens
BATCH_KEYS = 2048  # of all sequences of a batch, if it is more than one: what is gathered of them stays in cache


@dataclass(frozen=True)
class DecodeBatch:
    """Sequences that are one product."""

    at: slice | torch.Tensor  # which of the step's decoding sequences; a slice where they stand side by side
    n_keys: int
    mask_B11K: torch.Tensor  # 0 where there is a token, else -inf


@dataclass(frozen=True)
class PagedBatch(DecodeBatch):
    """The same, and where their keys are."""

    table_BP: torch.Tensor  # int64; what is past a sequence's last page is its first one, and masked
    unused_T: torch.Tensor  # int64: of all tokens of these pages, those of which nothing was written


def decode_batches(length_D: torch.Tensor, dtype: torch.dtype, most_keys: int | None = None) -> tuple[DecodeBatch, ...]:
    """All decoding sequences; `length_D` are the tokens that each sees, which `most_keys` hold."""
    together: dict[int, list[int]] = defaultdict(list)
    for at, length in enumerate(length_D.tolist()):
        n_keys = -(-length // KEYS) * KEYS
        together[n_keys if most_keys is None else min(n_keys, most_keys)].append(at)
    batches = []
    for n_keys, members in together.items():
        limit = max(1, BATCH_KEYS // n_keys)
        for first in range(0, len(members), limit):
            at = _at(members[first : first + limit], length_D.device)
            hidden_BK = torch.arange(n_keys, device=length_D.device) >= length_D[at, None]
            mask_BK = torch.zeros(hidden_BK.shape, dtype=dtype, device=length_D.device)
            batches.append(DecodeBatch(at, n_keys, mask_BK.masked_fill_(hidden_BK, -torch.inf)[:, None, None]))
    return tuple(batches)


def _at(members: list[int], device: torch.device) -> slice | torch.Tensor:
    first, last = members[0], members[-1] + 1
    return slice(first, last) if last - first == len(members) else torch.tensor(members, device=device)


def paged_batches(
    length_D: torch.Tensor, tables: tuple[torch.Tensor, ...], page_size: int, dtype: torch.dtype
) -> tuple[PagedBatch, ...]:
    """`tables` are those of all decoding sequences, each just as long as its length asks for."""
    if not tables:
        return ()
    pages_D = (length_D + (page_size - 1)) // page_size
    first_D = pages_D.cumsum(0) - pages_D
    page_ids = torch.cat(tables)
    batches = []
    for batch in decode_batches(length_D, dtype):
        first_B1, n_pages_B1 = first_D[batch.at, None], pages_D[batch.at, None]
        column_P = torch.arange(-(-batch.n_keys // page_size), device=length_D.device)
        table_BP = page_ids[first_B1 + column_P * (column_P < n_pages_B1)]
        unused_T = _unused(length_D[batch.at].tolist(), len(column_P), page_size).to(length_D.device)
        batches.append(PagedBatch(batch.at, batch.n_keys, batch.mask_B11K, table_BP, unused_T))
    return tuple(batches)


def _unused(lengths: list[int], n_pages: int, page_size: int) -> torch.Tensor:
    """Tokens of which nothing was written, counted over the pages of all sequences.

    The first page is full, and so fit to stand in for others, unless it is the last one, too.
    """
    of_one, unused = n_pages * page_size, []
    for i, length in enumerate(lengths):
        end = -(-length // page_size) * page_size if length > page_size else of_one
        unused.append(torch.arange(i * of_one + length, i * of_one + end))
    return torch.cat(unused)
