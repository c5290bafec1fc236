"""Tails between pages of the arena and layers: rows of memory with the layout of `spec.tail`.

R rows of the memory, T tokens of a tail at most, C model width, W elements that a layer keeps of a token, P pages of
the arena, B bytes and X words of a page.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from itertools import accumulate

import torch

from headwater.memory.arena import LazyBytes
from headwater.memory.slots import WORD
from headwater.spec import ModelSpec


class TailMemory:
    """Rows that each hold one tail during a step, and typed views of them. On the CPU an unused row takes no memory."""

    def __init__(self, spec: ModelSpec, rows: int = 0, device: torch.device | str = "cpu") -> None:
        self._spec, self._device = spec, torch.device(device)
        self._tokens = spec.page_size
        row_bytes = spec.tail.pages(self._tokens, spec.page_bytes) * spec.page_bytes
        self._stride = -(-row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._allocate(rows)

    def _allocate(self, rows: int) -> None:
        """Replace the memory by `rows` rows of zeros."""
        layout, n_tokens = self._spec.tail, self._tokens
        self._memory = LazyBytes(rows * self._stride, self._device)
        self.bytes_RB = self._memory.tensor.view(rows, self._stride)
        of_rows = self.bytes_RB.view(getattr(torch, self._spec.dtype_name))
        self.hidden_RC = of_rows[:, : layout.hidden]  # after the final norm, of the last token
        tokens = of_rows[:, layout.hidden : layout.hidden + n_tokens * layout.width].unflatten(
            1, (n_tokens, layout.width)
        )
        widths = [width for _, width in layout.widths]
        ends = accumulate(widths)
        each = enumerate(zip(widths, ends, strict=True))
        self._layers = {i: tokens[..., end - width : end] for i, (width, end) in each if width}

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.bytes_RB)

    def view(self, layer: int) -> torch.Tensor:
        """Return the inputs that a layer keeps, [R, T, W], strided. Raises KeyError if it keeps none."""
        kept_RTW: torch.Tensor = self._layers[layer]
        return kept_RTW

    def provide(self, rows: int) -> None:
        """Have at least `rows` rows. If there were fewer, all content is lost."""
        if rows > len(self):
            self._allocate(rows)

    def release(self, kept: int) -> None:
        """Return the memory of all rows but the first `kept` to the system; content of these is lost."""
        if len(self) > kept:
            if self._device.type == "cpu":
                self._memory.discard(kept * self._stride, (len(self) - kept) * self._stride)
            else:
                self._allocate(kept)

    def restore(self, row: int, arena_PB: torch.Tensor, page_ids: Sequence[int], tokens: int) -> None:
        """Copy a tail's hidden row and the rows of its first `tokens` tokens from its pages, bit for bit."""
        index_P, row_PX = self._of_pages(row, arena_PB, page_ids, tokens)
        torch.index_select(arena_PB.view(WORD), 0, index_P, out=row_PX)

    def save(self, row: int, arena_PB: torch.Tensor, page_ids: Sequence[int], tokens: int) -> None:
        """Copy a hidden row and the rows of `tokens` tokens to a tail's pages, bit for bit."""
        index_P, row_PX = self._of_pages(row, arena_PB, page_ids, tokens)
        arena_PB.view(WORD).index_copy_(0, index_P, row_PX)

    def _of_pages(
        self, row: int, arena_PB: torch.Tensor, page_ids: Sequence[int], tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first pages of a tail, as many as `tokens` tokens need, and their memory in a row."""
        page_bytes = arena_PB.shape[1]
        n = self._spec.tail.pages(tokens, page_bytes)
        if tokens > self._tokens or n > len(page_ids):
            raise ValueError(f"{tokens} tokens of at most {self._tokens} take {n} pages, there are {len(page_ids)}")
        index_P = torch.tensor(page_ids[:n], dtype=torch.int64, device=arena_PB.device)
        return index_P, self.bytes_RB[row, : n * page_bytes].view(n, page_bytes).view(WORD)
