"""State memory: the working memory of running sequences, a row of bytes each.

A row is laid out like a checkpoint, so that restore and save are plain copies between a row and pages of the arena.
R rows, P pages of the arena, C pages of a checkpoint, B bytes and W words of a page.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

from headwater.memory.lazy import LazyBytes
from headwater.spec import BYTES_OF_DTYPE, StateLayout

# Torch copies rows element by element: as 16-byte words this runs at memcpy speed, as bytes at a fifteenth of it.
WORD = torch.complex128


class StateMemory:
    """`rows` blobs of `row_bytes`, and typed views of them. On the CPU a free row takes no memory.

    `row_bytes` is at least `layout.bytes`, and a multiple of the page size if rows are saved into pages.
    """

    def __init__(self, layout: StateLayout, rows: int, row_bytes: int, device: torch.device | str = "cpu") -> None:
        if row_bytes < layout.bytes:
            raise ValueError(f"a state takes {layout.bytes:,} bytes, a row has {row_bytes:,}")
        self.layout = layout
        self.rows = rows
        on_cpu = torch.device(device).type == "cpu"
        # Rows begin at boundaries of the system's pages, so that one can be returned without its neighbours.
        self._stride = -(-row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE if on_cpu else row_bytes
        self._memory = LazyBytes(rows * self._stride, device)
        self.bytes_RB = self._memory.tensor.view(rows, self._stride)[:, :row_bytes]
        self._views = {(part.layer, part.name): self._view(part.layer, part.name) for part in layout.parts}

    def _view(self, layer: int, name: str) -> torch.Tensor:
        part = self.layout.part(layer, name)
        element = BYTES_OF_DTYPE[part.dtype_name]
        flat = self.bytes_RB.as_strided((self.rows, part.bytes), (self._stride, 1), part.offset)
        typed = flat.view(getattr(torch, part.dtype_name))
        inner = [math.prod(part.shape[i + 1 :]) for i in range(len(part.shape))]
        return typed.as_strided((self.rows, *part.shape), (self._stride // element, *inner))

    def view(self, layer: int, name: str) -> torch.Tensor:
        """Return all rows of one state, [rows, *shape], as a view strided by row."""
        return self._views[layer, name]

    def zero(self, row: int) -> None:
        """Set the row to the state before the first token."""
        self.bytes_RB[row].zero_()

    def restore(self, row: int, arena_PB: torch.Tensor, page_ids: Sequence[int]) -> None:
        """Gather a checkpoint's pages into a row, bit for bit."""
        page_C = torch.tensor(page_ids, dtype=torch.int64, device=arena_PB.device)
        row_CW = self._as_pages(row, len(page_ids), arena_PB.shape[1]).view(WORD)
        torch.index_select(arena_PB.view(WORD), 0, page_C, out=row_CW)

    def save(self, row: int, arena_PB: torch.Tensor, page_ids: Sequence[int]) -> None:
        """Scatter a row into a checkpoint's pages, bit for bit; a row of no bytes into none."""
        if not len(page_ids) and not self.bytes_RB.shape[1]:
            return
        page_C = torch.tensor(page_ids, dtype=torch.int64, device=arena_PB.device)
        row_CW = self._as_pages(row, len(page_ids), arena_PB.shape[1]).view(WORD)
        arena_PB.view(WORD).index_copy_(0, page_C, row_CW)

    def _as_pages(self, row: int, n_pages: int, page_bytes: int) -> torch.Tensor:
        row_bytes = self.bytes_RB.shape[1]
        if n_pages * page_bytes != row_bytes:
            raise ValueError(f"{n_pages} pages of {page_bytes:,} bytes for a row of {row_bytes:,}")
        return self.bytes_RB[row].view(n_pages, page_bytes)

    def release(self, row: int) -> None:
        """Return the row's physical memory to the system; it reads as zeros from now on."""
        self._memory.discard(row * self._stride, self._stride)
