"""Arena: one array of equal pages that holds all KV and all checkpoints, in memory that is provided on first touch.

Shapes: P pages of a table, B sequences of a batch, W rows written, K keys (rounded up), T tokens, X elements of a
layer's entry for a token.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable
from contextlib import suppress

import torch

from headwater.memory.page_bytes import page_bytes
from headwater.spec import KEY_BLOCK, ModelSpec

_LIBC = ctypes.CDLL(None, use_errno=True)
# Linux returns the pages at once, and they read as zeros; other systems take MADV_DONTNEED as a hint, or lack it.
_MADVISE = getattr(_LIBC, "madvise", None) if sys.platform == "linux" else None
HUGE_BYTES = 2 * 2**20  # of a large page
_HUGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
_POPULATE = 23  # MADV_POPULATE_WRITE of Linux 5.14 and later, which Python does not name


class LazyBytes:
    """`size` zeroed bytes as a uint8 tensor.

    Off the CPU it is plain memory. There, and on systems other than Linux, `discard` only zeroes.
    """

    def __init__(self, size: int, device: torch.device | str = "cpu", huge: bool = False) -> None:
        """Reserve them; with `huge`, in pages of 2 MB, if the system has them, of which first use takes a fifth."""
        self._map: mmap.mmap | None = None
        if torch.device(device).type != "cpu":
            self.tensor = torch.zeros(size, dtype=torch.uint8, device=device)
            return
        # Linux lets a mapping of whole large pages begin at one; otherwise up to 511 small ones come before the first.
        length = -(-size // HUGE_BYTES) * HUGE_BYTES if huge else size
        # Private, because pages of a shared mapping would keep their content when they are given back.
        self._map = mmap.mmap(-1, max(1, length), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge and _HUGE is not None:
            with suppress(OSError):  # the kernel has none
                self._map.madvise(_HUGE)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)[:size]

    def provide(self, size: int, first: int = 0) -> None:
        """Let the system provide `size` bytes from `first` on now, if it can; other threads continue meanwhile."""
        if self._map is None or _MADVISE is None:
            return
        address, first = self.tensor.data_ptr(), first // mmap.PAGESIZE * mmap.PAGESIZE
        for start in range(first, first + size, HUGE_BYTES):  # another thread that maps memory waits for one of them
            length = min(HUGE_BYTES, first + size - start)
            if _MADVISE(ctypes.c_void_p(address + start), ctypes.c_size_t(length), _POPULATE):
                return

    def discard(self, start: int, size: int) -> None:
        """Return the whole system pages within these bytes to the system; their content is lost."""
        if self._map is None or _MADVISE is None:
            self.tensor[start : start + size].zero_()
            return
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0:
            address = self.tensor.data_ptr() + first
            if _MADVISE(ctypes.c_void_p(address), ctypes.c_size_t(length), mmap.MADV_DONTNEED):
                raise OSError(ctypes.get_errno(), f"madvise of {length:,} bytes at {first:,} failed")


class Arena:
    """`n_pages` blobs of `spec.page_bytes`; a page holds, a layer after the other, its keys and then its values.

    If states are small, those of all layers after the page's last token follow.
    On the CPU the operating system hands out the memory as it is first touched, so resident memory grows with use.
    """

    def __init__(self, spec: ModelSpec, n_pages: int, device: str | torch.device = "cpu") -> None:
        self.n_pages = n_pages
        self.page_size = spec.page_size
        self._memory = LazyBytes(n_pages * spec.page_bytes, device, huge=True)
        self.pages = self._memory.tensor.view(n_pages, spec.page_bytes)
        self.bytes = page_bytes(self.pages)
        flat = self.pages.view(-1).view(getattr(torch, spec.dtype_name))
        stride = spec.page_bytes // spec.element_bytes
        self._layers: dict[int, tuple[torch.Tensor, ...]] = {}
        self._scratch: dict[int, Scratch] = {}  # by layer; those of equal widths share theirs
        shared: dict[tuple[int, ...], Scratch] = {}
        offset = 0
        for layer in spec.attention_layers:
            widths = spec.layers[layer].kv_widths
            views = []
            for width in widths:
                size = spec.page_size * width
                views.append(flat.as_strided((n_pages, size), (stride, 1), offset))
                offset += size
            self._layers[layer] = tuple(views)
            new = Scratch(flat[:0], widths, spec.page_size)
            self._scratch[layer] = shared.setdefault(widths, new)

    def write(self, layer: int, page_W: torch.Tensor, offset_W: torch.Tensor, *rows_WX: torch.Tensor) -> None:
        """Store a layer's entries of W tokens (keys and values), each at its offset (in tokens) in its page."""
        for pages, rows in zip(self._layers[layer], rows_WX, strict=True):
            flat_WX = rows.flatten(1)
            pages.view(self.n_pages, self.page_size, flat_WX.shape[1])[page_W, offset_W] = flat_WX

    def read(self, layer: int, table_P: torch.Tensor, start: int, end: int) -> tuple[torch.Tensor, ...]:
        """Return a copy of a layer's stored tensors of tokens [start, end), each [end − start, width]."""
        first, last = start // self.page_size, -(-end // self.page_size)
        at = slice(start - first * self.page_size, end - first * self.page_size)
        return tuple(
            pages.index_select(0, table_P[first:last]).view(-1, pages.shape[1] // self.page_size)[at]
            for pages in self._layers[layer]
        )

    def pages_of(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return all pages of a layer's stored tensors, each [pages, page_size · width]: strided views."""
        return self._layers[layer]

    def gather(self, layer: int, table_P: torch.Tensor, length: int) -> tuple[torch.Tensor, ...]:
        """Return a layer's stored tensors of the first `length` tokens, each [K, width], K rounded up to 512.

        The results are views of scratch, valid until the next call. Rows from `length` on are zeros, not the content of
        the pages: these rows get masked, and a mask does not hide a NaN.
        """
        return self._scratch[layer].gather(self._layers[layer], table_P[: -(-length // self.page_size)], length)

    def gather_batch(self, layer: int, table_BP: torch.Tensor, unused_T: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return a layer's stored tensors of several sequences, each [B, P · page size, width]: views of scratch.

        Tokens of `unused_T`, counted over all B · P pages, are zeros.
        """
        return self._scratch[layer].gather_batch(self._layers[layer], table_BP, unused_T)

    def expect(self, n_tokens: int) -> None:
        """Provide scratch memory for a sequence of `n_tokens` tokens, which no step waits for then. For any thread."""
        for scratch in set(self._scratch.values()):
            scratch.expect(n_tokens)

    def provide(self, page: int) -> None:
        """Let the system provide the memory of a page now: first use of 2 MB takes 0.3 ms, on virtual machines 5."""
        size = self.pages.shape[1]
        self._memory.provide(size, page * size)

    def discard(self, page_ids: Iterable[int]) -> None:
        """Return the physical memory of pages that are lent to a slot, and so neither read nor written."""
        size = self.pages.shape[1]
        for page in page_ids:
            self._memory.discard(page * size, size)


class Scratch:
    """Scratch memory for gathered pages; it grows with the longest sequence."""

    def __init__(self, like: torch.Tensor, widths: Iterable[int], page_size: int) -> None:
        """Make rows of these widths, of the type and device of the tensor `like`."""
        self._rows, self._page_size = [like.new_empty(0, width) for width in widths], page_size
        self._expected = self._rows  # memory that was provided ahead, of no rows if none was
        self._dirty = 0  # rows from here on are zeros

    def gather(self, pages: tuple[torch.Tensor, ...], table_P: torch.Tensor, length: int) -> tuple[torch.Tensor, ...]:
        """Gather the pages of a table one after the other, [K, width] each; zeros from `length` on."""
        n_keys = -(-length // KEY_BLOCK) * KEY_BLOCK
        n_tokens = len(table_P) * self._page_size
        self._grow(max(n_keys, n_tokens))
        dirty = max(self._dirty, n_tokens)
        self._select(pages, table_P, n_tokens)
        for rows in self._rows:
            rows[length : min(dirty, n_keys)].zero_()
        self._dirty = length if dirty <= n_keys else dirty
        return tuple(rows[:n_keys] for rows in self._rows)

    def gather_batch(
        self, pages: tuple[torch.Tensor, ...], table_BP: torch.Tensor, unused_T: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Gather the pages of several tables of equal length, one sequence after the other."""
        n_tokens = table_BP.numel() * self._page_size
        self._grow(n_tokens)
        self._dirty = max(self._dirty, n_tokens)
        self._select(pages, table_BP.flatten(), n_tokens)
        if len(unused_T):
            for rows in self._rows:
                rows.index_fill_(0, unused_T, 0)
        return tuple(rows[:n_tokens].view(len(table_BP), -1, rows.shape[1]) for rows in self._rows)

    def _select(self, pages: tuple[torch.Tensor, ...], table_P: torch.Tensor, n_tokens: int) -> None:
        for source, rows in zip(pages, self._rows, strict=True):
            torch.index_select(source, 0, table_P, out=rows[:n_tokens].view(len(table_P), -1))

    def expect(self, n_tokens: int) -> None:
        """Provide memory for `n_tokens` tokens between steps, for the step that will need it."""
        n_rows = -(-n_tokens // KEY_BLOCK) * KEY_BLOCK
        if n_rows <= max(len(self._rows[0]), len(self._expected[0])) or self._rows[0].device.type != "cpu":
            return
        # of twice the size, for what follows these tokens: memory that is not touched is not provided
        memory = [_lazy(2 * n_rows, rows) for rows in self._rows]
        for lazy in memory:
            lazy.provide(lazy.tensor.numel() // 2)
        self._expected = [_rows_of(lazy, rows) for lazy, rows in zip(memory, self._rows, strict=True)]

    def _grow(self, n_tokens: int) -> None:
        have, expected = len(self._rows[0]), self._expected
        if have < n_tokens:
            if len(expected[0]) >= n_tokens:
                self._rows = expected
            else:
                n = max(n_tokens, 2 * have)
                self._rows = [_rows_of(_lazy(n, rows), rows) for rows in self._rows]
            self._expected = [rows[:0] for rows in self._rows]
            self._dirty = 0


def _lazy(n: int, rows: torch.Tensor) -> LazyBytes:
    """Return zeros for n rows of the width and type of `rows`; on the CPU, memory that is provided on first touch."""
    return LazyBytes(n * rows.shape[1] * rows.element_size(), rows.device, huge=True)


def _rows_of(memory: LazyBytes, rows: torch.Tensor) -> torch.Tensor:
    """Return memory as rows of the width and type of `rows`."""
    return memory.tensor.view(rows.dtype).view(-1, rows.shape[1])
