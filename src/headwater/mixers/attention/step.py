"""What all attention layers of one step share: where KV goes, the rotation, the mask. Built once a step.

Shapes: N rows of the step, W rows whose KV is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from headwater.mixers.batch import StepBatch
from headwater.spec import KEY_BLOCK


class KeyValuePages(Protocol):
    """The arena, as far as attention needs it."""

    page_size: int

    def write(self, layer: int, page_W: torch.Tensor, offset_W: torch.Tensor, *rows_WX: torch.Tensor) -> None: ...

    def gather(self, layer: int, table_P: torch.Tensor, length: int) -> tuple[torch.Tensor, ...]: ...


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
    decode_length: tuple[int, ...]  # tokens of each decoding sequence, the one of this step included

    @classmethod
    def of(cls, batch: StepBatch, arena: KeyValuePages, dtype: torch.dtype) -> AttentionStep:
        """Work out rows, pages and masks; `dtype` is that of queries and keys."""
        decode_length = tuple(p + 1 for p in batch.position_N[batch.decode_rows].tolist())
        end = max([s.end for s in batch.slices] + list(decode_length))
        row_W, page_W = _written(batch, arena.page_size)
        visible = -(-end // KEY_BLOCK) * KEY_BLOCK
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
            decode_length=decode_length,
        )

    def decodes(self) -> Iterator[tuple[int, torch.Tensor, int]]:
        """Row, page table and length of each decoding sequence."""
        rows = range(self.batch.n_prefill, self.batch.n_prefill + self.batch.n_decode)
        return zip(rows, self.batch.decode_tables, self.decode_length, strict=True)


def _written(batch: StepBatch, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that write KV and the pages that they write to."""
    rows: list[torch.Tensor] = []
    pages: list[torch.Tensor] = []
    for s in batch.slices:
        skipped = min(max(s.write_from * page_size - s.start, 0), s.length)
        row = torch.arange(s.first + skipped, s.first + s.length, device=batch.position_N.device)
        rows.append(row)
        pages.append(s.table_P[batch.position_N[row] // page_size])
    for i, table_P in enumerate(batch.decode_tables):
        row = torch.tensor([batch.n_prefill + i], device=batch.position_N.device)
        rows.append(row)
        pages.append(table_P[batch.position_N[row] // page_size])
    return torch.cat(rows), torch.cat(pages)
