"""Which slots are free, and which have been given up since somebody asked."""

from __future__ import annotations

from heapq import heappop, heappush


class SlotIds:
    """Low ones are taken first: those keep their memory between requests."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))  # a heap
        self._left: set[int] = set()

    def __len__(self) -> int:
        """How many are free."""
        return len(self._free)

    def take(self) -> int:
        slot = heappop(self._free)
        self._left.discard(slot)
        return slot

    def give(self, slot: int) -> None:
        heappush(self._free, slot)
        self._left.add(slot)

    def take_left(self) -> set[int]:
        """Those that were given back since the last call and that nobody has taken."""
        left, self._left = self._left, set()
        return left
