"""Weights on positions in a row, and what those from one position on sum to (Fenwick 1994)."""

from __future__ import annotations


class Weights:
    """Adding and summing take the logarithm of `size` steps."""

    def __init__(self, size: int) -> None:
        self.total = 0.0
        self._sums = [0.0] * (size + 1)

    def add(self, position: int, weight: float) -> None:
        self.total += weight
        at, sums = position + 1, self._sums
        while at < len(sums):
            sums[at] += weight
            at += at & -at

    def since(self, position: int) -> float:
        """The sum of the weights at `position` and behind it."""
        before, sums = 0.0, self._sums
        while position:
            before += sums[position]
            position &= position - 1
        return self.total - before
