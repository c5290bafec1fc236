"""Bytes of pages of the arena, read and filled by other threads than the engine's: tiers store and load them.

P pages of the arena, N pages of one call, B bytes of a page.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Protocol, TypeVar

import numpy as np
import torch

MAX_PINNED_BYTES = 256 * 2**20  # that a thread keeps; a larger part, of a long segment, uses other memory

Failure = TypeVar("Failure")
Copy = tuple[torch.Tensor, torch.Tensor]  # target, source
Read = Callable[[list[memoryview]], Failure | None]


class PageBytes(Protocol):
    """Bytes of pages. Pages that are read do not change meanwhile; pages that are filled belong to the caller."""

    page_bytes: int

    def views(self, pages: Sequence[int]) -> list[memoryview]:
        """Return the bytes of pages. They are valid until the thread's next call."""

    def fill(self, pages: Sequence[int], read: Read[Failure]) -> Failure | None:
        """Fill pages by `read`, and return what it returns: None if it has filled the memory that it was given.

        The pages have that content when the call returns, or any content if it fails.
        """


class BytesInPlace:
    """Bytes of an arena on the CPU. Nothing is copied."""

    def __init__(self, pages_PB: torch.Tensor) -> None:
        self.page_bytes = pages_PB.shape[1]
        self._pages: np.ndarray[tuple[int, int], np.dtype[np.uint8]] = pages_PB.numpy()

    def views(self, pages: Sequence[int]) -> list[memoryview]:
        return [memoryview(self._pages[page]) for page in pages]

    def fill(self, pages: Sequence[int], read: Read[Failure]) -> Failure | None:
        return read(self.views(pages))


class Lane(Protocol):
    """One thread's copies between a card and the host."""

    def memory(self, size: int) -> torch.Tensor:
        """Return `size` bytes of the host's memory, which are used until the next call."""

    def copy(self, pairs: Iterable[Copy]) -> None:
        """Begin copies. Steps on the card continue."""

    def wait(self) -> None:
        """Wait until all copies that were begun have ended."""


class CardLane:
    """Copies on a stream of their own, from and to pinned memory: at most MAX_PINNED_BYTES bytes, of a power of two."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def memory(self, size: int) -> torch.Tensor:
        if size > MAX_PINNED_BYTES:
            return torch.empty(size, dtype=torch.uint8)
        if size > len(self._pinned):
            self._pinned = torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8, pin_memory=True)
        return self._pinned[:size]

    def copy(self, pairs: Iterable[Copy]) -> None:
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        self._stream.synchronize()


class StagedBytes:
    """Copies of the pages of an arena on a card, in memory of the host. Each thread has a lane of its own.

    No stream waits for another. A step has ended on the card when its plan is committed (`Runner.run`), and pages are
    read and filled by plans that come after that: so nothing of a step is in flight for them. A call returns when its
    copies have ended: so a step that is planned later reads the filled content.
    """

    def __init__(self, pages_PB: torch.Tensor, lane: Callable[[], Lane]) -> None:
        """`lane` is called once by each thread."""
        self.page_bytes = pages_PB.shape[1]
        self._card, self._new_lane, self._own = pages_PB, lane, threading.local()

    def views(self, pages: Sequence[int]) -> list[memoryview]:
        lane, rows_NB = self._staged(len(pages))
        lane.copy((rows, on_card) for on_card, rows in self._together(pages, rows_NB))
        lane.wait()
        return _views(rows_NB)

    def fill(self, pages: Sequence[int], read: Read[Failure]) -> Failure | None:
        lane, rows_NB = self._staged(len(pages))
        failed = read(_views(rows_NB))
        if failed is None:  # damaged content is not copied
            lane.copy(self._together(pages, rows_NB))
            lane.wait()
        return failed

    def _staged(self, n: int) -> tuple[Lane, torch.Tensor]:
        """Return the thread's lane, and memory for n pages."""
        if not hasattr(self._own, "lane"):
            self._own.lane = self._new_lane()
        lane: Lane = self._own.lane
        return lane, lane.memory(n * self.page_bytes).view(n, self.page_bytes)

    def _together(self, pages: Sequence[int], rows_NB: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pages on the card that follow each other, as one tensor, and their rows."""
        for _, group in groupby(enumerate(pages), lambda at: at[1] - at[0]):
            (row, page), *more = group
            n = 1 + len(more)
            yield self._card[page : page + n], rows_NB[row : row + n]


def _views(rows_NB: torch.Tensor) -> list[memoryview]:
    rows: np.ndarray[tuple[int, int], np.dtype[np.uint8]] = rows_NB.numpy()
    return [memoryview(rows[i]) for i in range(len(rows))]


def page_bytes(pages_PB: torch.Tensor) -> PageBytes:
    """Return the bytes of an arena's pages, [pages, bytes] uint8 on any device."""
    if pages_PB.device.type == "cpu":
        return BytesInPlace(pages_PB)
    return StagedBytes(pages_PB, partial(CardLane, pages_PB.device))
