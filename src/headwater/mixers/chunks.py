"""Slices of a step cut into chunks of 64 tokens, at absolute multiples of 64 of their sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headwater.mixers.batch import Slice

CHUNK = 64  # tokens


@dataclass(frozen=True, slots=True)
class Chunk:
    """At most 64 tokens of a slice."""

    slice: Slice
    index: int

    @property
    def first(self) -> int:
        """Its first row in the step."""
        return self.slice.first + self.index * CHUNK

    @property
    def length(self) -> int:
        return min(CHUNK, self.slice.length - self.index * CHUNK)

    @property
    def rows(self) -> slice:
        """Its rows in the step."""
        return slice(self.first, self.first + self.length)

    @property
    def is_last(self) -> bool:
        return (self.index + 1) * CHUNK >= self.slice.length

    @property
    def state_rows(self) -> list[int]:
        """Rows of the state memory that take the state after this chunk."""
        end = self.slice.start + self.index * CHUNK + self.length
        rows = [row for position, row in self.slice.saves if position == end]
        return [*rows, self.slice.slot] if self.is_last else rows


def blocks(group: list[Slice], limit: int) -> Iterator[tuple[int, list[Chunk]]]:
    """Chunks of slices (longest first) in the order of time: the n-th of each sequence, then the next.

    Yields (sequences that have a chunk in it, chunks): at most `limit` chunks and at least one step, and the same
    sequences in every step.
    """
    n_chunks = [-(-s.length // CHUNK) for s in group]
    step = 0
    while step < n_chunks[0]:
        n_active = sum(n > step for n in n_chunks)
        n_steps = min(max(1, limit // n_active), n_chunks[n_active - 1] - step)
        yield n_active, [Chunk(s, i) for i in range(step, step + n_steps) for s in group[:n_active]]
        step += n_steps
