"""Lazy memory: the operating system provides it on first touch, and pieces of it can be returned."""

from __future__ import annotations

import ctypes
import mmap

import torch


class LazyBytes:
    """`size` zeroed bytes as a uint8 tensor. Off the CPU it is plain memory, and `discard` only zeroes."""

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self._map: mmap.mmap | None = None
        if torch.device(device).type != "cpu":
            self.tensor = torch.zeros(size, dtype=torch.uint8, device=device)
            return
        # Private, because pages of a shared mapping would keep their content when they are given back.
        self._map = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)[:size]

    def discard(self, start: int, size: int) -> None:
        """Return the whole system pages within these bytes to the system; their content is lost."""
        if self._map is None:
            self.tensor[start : start + size].zero_()
            return
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0:
            address = self.tensor.data_ptr() + first
            if _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), mmap.MADV_DONTNEED):
                raise OSError(ctypes.get_errno(), f"madvise of {length:,} bytes at {first:,} failed")


_LIBC = ctypes.CDLL(None, use_errno=True)
