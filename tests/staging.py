"""Arenas on the CPU whose bytes are staged as those of a card: copies are made when they are waited for, not before."""

import sys
import threading
from collections import Counter
from collections.abc import Iterable

import pytest
import torch

from headwater.memory import arena
from headwater.memory.page_bytes import Copy, StagedBytes

STALE = 0xA5


class LateLane:
    """A lane whose memory never has what an earlier call left there."""

    waits = True  # False: control

    def __init__(self, counts: Counter[str] | None = None) -> None:
        self.thread, self.counts = threading.get_ident(), Counter[str]() if counts is None else counts
        self._begun: list[Copy] = []
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.counts["lanes"] += 1

    def memory(self, size: int) -> torch.Tensor:
        assert threading.get_ident() == self.thread
        assert not self._begun
        if size > len(self._memory):
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory[:size].fill_(STALE)

    def copy(self, pairs: Iterable[Copy]) -> None:
        assert threading.get_ident() == self.thread
        self._begun += pairs

    def wait(self) -> None:
        for target, source in self._begun if self.waits else ():
            target.copy_(source)
        self.counts["copied"] += len(self._begun)
        self._begun.clear()


class NeverWaits(LateLane):
    waits = False


def stage(monkeypatch: pytest.MonkeyPatch, lane: type[LateLane] = LateLane) -> Counter[str]:
    """Stage the bytes of all arenas from now on; return counts of lanes and copies.

    As on a card, their pages are no memory that the engine can read but by the steps' kernels.
    """
    counts, ranges = Counter[str](), list[tuple[int, int]]()
    numpy = torch.Tensor.numpy

    def staged(pages_PB: torch.Tensor) -> StagedBytes:
        ranges.append((pages_PB.data_ptr(), pages_PB.data_ptr() + pages_PB.numel()))
        return StagedBytes(pages_PB, lambda: lane(counts))

    def of_host(tensor: torch.Tensor, **given: bool) -> object:
        if sys._getframe(1).f_globals["__name__"].startswith(("headwater.engine", "headwater.memory")):
            assert not any(start <= tensor.data_ptr() < end for start, end in ranges), "the arena is on a card"
        return numpy(tensor, **given)

    monkeypatch.setattr(arena, "page_bytes", staged)
    monkeypatch.setattr(torch.Tensor, "numpy", of_host)
    return counts
