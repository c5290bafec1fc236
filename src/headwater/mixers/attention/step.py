"""What all attention layers of one step share: where KV goes, masks, what is decoded together. Built once a step.

Shapes: N rows of the step, W rows whose KV is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch

from headwater.mixers.attention.decoding import PagedBatch, paged_batches
from headwater.mixers.batch import StepBatch
from headwater.mixers.gpu import has_kernels
from headwater.spec import KEY_BLOCK

if TYPE_CHECKING:
    from headwater.mixers.attention.gpu import PagedStep


class KeyValuePages(Protocol):
    """The arena, as far as attention needs it."""

    page_size: int

    def pages_of(self, layer: int) -> tuple[torch.Tensor, ...]: ...

    def write(self, layer: int, page_W: torch.Tensor, offset_W: torch.Tensor, *rows_WX: torch.Tensor) -> None: ...

    def gather(self, layer: int, table_P: torch.Tensor, length: int) -> tuple[torch.Tensor, ...]: ...

    def gather_batch(self, layer: int, table_BP: torch.Tensor, unused_T: torch.Tensor) -> tuple[torch.Tensor, ...]: ...


@dataclass(frozen=True)
class AttentionStep:
    """One ragged step as the attention layers see it."""

    batch: StepBatch
    arena: KeyValuePages
    dtype: torch.dtype  # of queries and keys
    row_W: slice | torch.Tensor  # int64, rows of the step whose KV is written; a slice where none is left out
    page_W: torch.Tensor  # int64
    offset_W: torch.Tensor  # int64, tokens from the start of the page
    on_gpu: PagedStep | None  # what kernels take in the place of masks and batches

    @cached_property
    def visible(self) -> int:
        """Keys that queries of slices are held to, at most."""
        return -(-max((s.end for s in self.batch.slices), default=0) // KEY_BLOCK) * KEY_BLOCK

    @cached_property
    def ramp(self) -> torch.Tensor:
        """`visible` zeros, then -inf: every causal mask is a window of it."""
        ramp = torch.zeros(self.visible + 2 * KEY_BLOCK, dtype=self.dtype, device=self.batch.position_N.device)
        ramp[self.visible :] = -torch.inf
        return ramp

    @cached_property
    def decodes(self) -> tuple[PagedBatch, ...]:
        """Decoding sequences put together, with their pages."""
        batch = self.batch
        return paged_batches(batch.decode_lengths, batch.decode_tables, self.arena.page_size, self.dtype)

    @classmethod
    def of(cls, batch: StepBatch, arena: KeyValuePages, dtype: torch.dtype) -> AttentionStep:
        """Work out rows, pages and offsets."""
        row_W, page_W = _written(batch, arena.page_size)
        on_gpu = _on_gpu(batch, arena.page_size) if has_kernels(batch.position_N.device) else None
        return cls(
            batch=batch,
            arena=arena,
            dtype=dtype,
            row_W=row_W,
            page_W=page_W,
            offset_W=batch.position_N[row_W] % arena.page_size,
            on_gpu=on_gpu,
        )


def _on_gpu(batch: StepBatch, page_size: int) -> PagedStep:
    from headwater.mixers.attention.gpu import PagedStep

    return PagedStep.of(batch, page_size)


def _written(batch: StepBatch, page_size: int) -> tuple[slice | torch.Tensor, torch.Tensor]:
    """The rows that write KV and the pages that they write to."""
    position_N, decoding = batch.position_N, batch.decode_rows
    rows: list[range] = []
    pages: list[torch.Tensor] = []
    for s in batch.slices:
        skipped = min(max(s.write_from * page_size - s.start, 0), s.length)
        rows.append(range(s.first + skipped, s.first + s.length))
        pages.append(s.table_P[position_N[rows[-1].start : rows[-1].stop] // page_size])
    if batch.n_decode:
        rows.append(range(decoding.start, decoding.stop))
        if has_kernels(position_N.device):  # where nothing asks the device
            n_pages_D = position_N[decoding] // page_size + 1
            pages.append(batch.decode_table_BT.gather(1, n_pages_D[:, None] - 1)[:, 0])
        else:
            last = ((length - 1) // page_size for length in batch.decode_lengths)
            pages.append(torch.stack([table[page] for table, page in zip(batch.decode_tables, last, strict=True)]))
    page_W = torch.cat(pages)
    if len(page_W) == decoding.stop:
        return slice(0, decoding.stop), page_W
    return torch.cat([torch.arange(r.start, r.stop, device=position_N.device) for r in rows]), page_W
