"""Decoding sequences put together: those whose keys round up to the same number are one batch.

How many keys a sequence's query is held to depends on its length alone, so its bits do not depend on its company. They
are rounded up to 128: with 512, a sequence of 500 to 4,000 tokens takes 10% longer, alone or not.

B sequences of a batch, K keys of each, P pages of a table, T tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

KEYS = 128  # tokens
BATCH_KEYS = 2048  # of all sequences of a batch, if it is more than one: what is gathered of them stays in cache


@dataclass(frozen=True)
class DecodeBatch:
    """Sequences that are one product."""

    members: tuple[int, ...]  # which of the step's decoding sequences
    at: slice | torch.Tensor  # the same; a slice where they stand side by side
    n_keys: int
    mask_B11K: torch.Tensor  # 0 where there is a token, else -inf


@dataclass(frozen=True)
class PagedBatch(DecodeBatch):
    """The same, and where their keys are."""

    table_BP: torch.Tensor  # int64; what is past a sequence's last page is its first one, and masked
    unused_T: torch.Tensor  # int64: of all tokens of these pages, those of which nothing was written


def decode_batches(
    lengths: Sequence[int], dtype: torch.dtype, device: torch.device, most_keys: int | None = None
) -> tuple[DecodeBatch, ...]:
    """All decoding sequences; `lengths` are the tokens that each sees, which `most_keys` hold."""
    together: dict[int, list[int]] = defaultdict(list)
    for at, length in enumerate(lengths):
        n_keys = -(-length // KEYS) * KEYS
        together[n_keys if most_keys is None else min(n_keys, most_keys)].append(at)
    batches = []
    for n_keys, members in together.items():
        limit = max(1, BATCH_KEYS // n_keys)
        for first in range(0, len(members), limit):
            some = members[first : first + limit]
            masks = [_mask(n_keys, lengths[at], dtype, device) for at in some]
            mask_BK = masks[0][None] if len(masks) == 1 else torch.stack(masks)
            batches.append(DecodeBatch(tuple(some), _at(some, device), n_keys, mask_BK[:, None, None]))
    return tuple(batches)


def _at(members: list[int], device: torch.device) -> slice | torch.Tensor:
    first, last = members[0], members[-1] + 1
    return slice(first, last) if last - first == len(members) else torch.tensor(members, device=device)


def _mask(n_keys: int, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """0 for the first `length` of `n_keys`, then -inf."""
    return _ramp(n_keys, dtype, device)[n_keys - length : 2 * n_keys - length]


@lru_cache(maxsize=64)
def _ramp(n_keys: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """As many zeros, then -inf: every mask is a window of it."""
    return torch.cat(
        [torch.zeros(n_keys, dtype=dtype, device=device), torch.full((KEYS,), -torch.inf, dtype=dtype, device=device)]
    )


def paged_batches(
    lengths: Sequence[int], tables: Sequence[torch.Tensor], page_size: int, dtype: torch.dtype
) -> tuple[PagedBatch, ...]:
    """`tables` are those of all decoding sequences, each at least as long as its length asks for."""
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


def _filled_up(tables: list[torch.Tensor], n_pages: int) -> torch.Tensor:
    """They as one, `n_pages` of each: what is missing is its first one."""
    parts = []
    for table in tables:
        missing = n_pages - len(table)
        parts += [table, *[table[:1]] * missing] if missing else [table]
    return torch.cat(parts).view(len(tables), n_pages)


def _unused(lengths: list[int], n_pages: int, page_size: int) -> torch.Tensor:
    """Tokens of which nothing was written, counted over the pages of all sequences.

    The first page is full, and so fit to stand in for others, unless it is the last one, too.
    """
    of_one, unused = n_pages * page_size, []
    for i, length in enumerate(lengths):
        end = -(-length // page_size) * page_size if length > page_size else of_one
        unused.append(torch.arange(i * of_one + length, i * of_one + end))
    return torch.cat(unused)
