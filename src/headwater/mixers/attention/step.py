"""The state that all attention layers of one step share, built once a step: KV destinations, masks, decode batches.

Shapes: N rows of the step, W rows whose KV is written, B decoding sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Self

import torch

from headwater.mixers.attention.fast import CausalMask, PagedBatch, paged_batches
from headwater.mixers.batch import StepBatch


class KeyValuePages(Protocol):
    """The methods of the arena that attention uses."""

    page_size: int

    def pages_of(self, layer: int) -> tuple[torch.Tensor, ...]: ...

    def write(self, layer: int, page_W: torch.Tensor, offset_W: torch.Tensor, *rows_WX: torch.Tensor) -> None: ...

    def gather(self, layer: int, table_P: torch.Tensor, length: int) -> tuple[torch.Tensor, ...]: ...

    def gather_batch(self, layer: int, table_BP: torch.Tensor, unused_T: torch.Tensor) -> tuple[torch.Tensor, ...]: ...


@dataclass(frozen=True)
class AttentionStep:
    """One ragged step, as the attention layers use it."""

    batch: StepBatch
    arena: KeyValuePages
    dtype: torch.dtype  # of queries and keys
    row_W: slice | torch.Tensor  # int64, rows of the step whose KV is written; a slice if no row is left out
    page_W: torch.Tensor  # int64
    offset_W: torch.Tensor  # int64, tokens from the start of the page

    @classmethod
    def of(cls, batch: StepBatch, arena: KeyValuePages, dtype: torch.dtype) -> Self:
        """Compute the rows, pages and offsets to write."""
        row_W, page_W = cls._written(batch, arena.page_size)
        return cls(batch, arena, dtype, row_W, page_W, batch.position_N[row_W] % arena.page_size)

    @cached_property
    def mask(self) -> CausalMask:
        """Causal mask of all slices."""
        longest = max((s.end for s in self.batch.slices), default=0)
        return CausalMask(longest, self.dtype, self.batch.position_N.device)

    @cached_property
    def decodes(self) -> tuple[PagedBatch, ...]:
        """Decoding sequences in batches, with their pages."""
        batch = self.batch
        return paged_batches(batch.decode_lengths, batch.decode_tables, self.arena.page_size, self.dtype)

    @classmethod
    def _written(cls, batch: StepBatch, page_size: int) -> tuple[slice | torch.Tensor, torch.Tensor]:
        """Return the rows that write KV and the pages that they write to."""
        position_N, decoding = batch.position_N, batch.decode_rows
        rows: list[range] = []
        pages: list[torch.Tensor] = []
        for s in batch.slices:
            skipped = min(max(s.write_from * page_size - s.start, 0), s.length)
            rows.append(range(s.first + skipped, s.first + s.length))
            pages.append(s.table_P[position_N[rows[-1].start : rows[-1].stop] // page_size])
        if batch.n_decode:
            rows.append(range(decoding.start, decoding.stop))
            pages.append(cls._decode_pages(batch, page_size))
        page_W = torch.cat(pages)
        if len(page_W) == decoding.stop:
            return slice(0, decoding.stop), page_W
        return torch.cat([torch.arange(r.start, r.stop, device=position_N.device) for r in rows]), page_W

    @staticmethod
    def _decode_pages(batch: StepBatch, page_size: int) -> torch.Tensor:
        """Return the page of each decoding sequence's new token, [B]."""
        last = ((length - 1) // page_size for length in batch.decode_lengths)
        return torch.stack([table[page] for table, page in zip(batch.decode_tables, last, strict=True)])
