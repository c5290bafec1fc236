"""What all attention layers of one step share: where KV goes, masks, what is decoded together. Built once a step.

Shapes: N rows of the step, W rows whose KV is written, D decoding sequences.
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
    row_W: torch.Tensor  # int64, rows of the step whose KV is written
    page_W: torch.Tensor  # int64
    offset_W: torch.Tensor  # int64, tokens from the start of the page
    ramp: torch.Tensor  # `visible` zeros, then -inf: every causal mask is a window of it
    visible: int
    on_gpu: PagedStep | None  # what kernels take in the place of masks and batches

    @cached_property
    def decodes(self) -> tuple[PagedBatch, ...]:
        """Decoding sequences put together, with their pages."""
        batch = self.batch
        length_D = batch.position_N[batch.decode_rows] + 1
        return paged_batches(length_D, batch.decode_tables, self.arena.page_size, self.ramp.dtype)

    @classmethod
    def of(cls, batch: StepBatch, arena: KeyValuePages, dtype: torch.dtype) -> AttentionStep:
        """Work out rows, pages and masks; `dtype` is that of queries and keys."""
        row_W, page_W = _written(batch, arena.page_size)
        on_gpu = _on_gpu(batch, arena.page_size) if has_kernels(batch.position_N.device) else None
        visible = -(-max((s.end for s in batch.slices), default=0) // KEY_BLOCK) * KEY_BLOCK
        ramp = torch.zeros(visible + 2 * KEY_BLOCK, dtype=dtype, device=batch.position_N.device)
        ramp[visible:] = -torch.inf
        return cls(
            batch=batch,
            arena=arena,
            row_W=row_W,
            page_W=page_W,
            offset_W=batch.position_N[row_W] % arena.page_size,
            ramp=ramp,
            visible=visible,
            on_gpu=on_gpu,
        )


def _on_gpu(batch: StepBatch, page_size: int) -> PagedStep:
    from headwater.mixers.attention.gpu import PagedStep

    return PagedStep.of(batch, page_size)


def _written(batch: StepBatch, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that write KV and the pages that they write to."""
    rows: list[torch.Tensor] = []
    pages: list[torch.Tensor] = []
    for s in batch.slices:
        skipped = min(max(s.write_from * page_size - s.start, 0), s.length)
        row = torch.arange(s.first + skipped, s.first + s.length, device=batch.position_N.device)
        rows.append(row)
        pages.append(s.table_P[batch.position_N[row] // page_size])
    if batch.n_decode:  # each to the last page of its table
        decoding = batch.decode_rows
        rows.append(torch.arange(decoding.start, decoding.stop, device=batch.position_N.device))
        n_pages_D = batch.position_N[decoding] // page_size + 1
        if has_kernels(batch.position_N.device):  # tables may be longer there
            pages.append(batch.decode_table_BT.gather(1, n_pages_D[:, None] - 1)[:, 0])
        else:
            pages.append(torch.cat(batch.decode_tables)[n_pages_D.cumsum(0) - 1])
    return torch.cat(rows), torch.cat(pages)
