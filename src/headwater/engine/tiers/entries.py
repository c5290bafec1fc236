"""Entries of the MTP head beside pages of the arena, as the bytes that tiers store and load."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from headwater.engine.mtp import MtpRunner


class PageEntries:
    """Entries beside pages. This one has none: the server does not draft with a head."""

    page_bytes = 0  # of one page's entries

    def complete(self, pages: Sequence[int]) -> bool:
        """Return whether all entries of these pages are there, so that they may be stored."""
        return False

    def views(self, pages: Sequence[int]) -> list[memoryview]:
        """Return the memory of pages' entries, to be read or filled."""
        return []

    def loaded(self, pages: Sequence[int], is_whole: bool) -> None:
        """Note that pages were filled with KV, and with their entries if `is_whole`; others are cleared."""


class HeadEntries(PageEntries):
    """Entries of a head: its keys and values of a page, and the model's hidden state of the page's last token."""

    def __init__(self, head: MtpRunner) -> None:
        self._head = head
        self._parts: list[np.ndarray[tuple[int, int], np.dtype[np.uint8]]] = [
            head.arena.pages.numpy(),
            head.last_PC.view(torch.uint8).numpy(),
        ]
        self.page_bytes = sum(part.shape[1] for part in self._parts)

    def complete(self, pages: Sequence[int]) -> bool:
        return self._head.complete(pages)

    def views(self, pages: Sequence[int]) -> list[memoryview]:
        return [memoryview(part[page]) for page in pages for part in self._parts]

    def loaded(self, pages: Sequence[int], is_whole: bool) -> None:
        if is_whole:
            self._head.complete_P[list(pages)] = True
        else:
            self._head.clear(pages)


def page_entries(head: MtpRunner | None) -> PageEntries:
    """Return the entries of a head beside pages of the arena, if there is a head."""
    return PageEntries() if head is None else HeadEntries(head)
