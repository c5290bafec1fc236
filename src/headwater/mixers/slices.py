"""Slices of a step, which are the next tokens of sequences in prefill, cut into chunks of 64 tokens.

N rows of the step, P pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64  # tokens: recurrences are cut at absolute multiples of it


@dataclass(frozen=True, slots=True)
class Keep:
    """A tail that a step writes: the tokens [start, end) of a slice, or of the tail that the slice continues."""

    start: int
    end: int
    row: int  # of the tail memory
    has_hidden: bool = False  # the hidden row of the token before `end`, which the slice computes, is written, too


@dataclass(frozen=True)
class Slice:
    """The next tokens of one sequence that is being prefilled.

    `start` is a multiple of 64, except around segments, where it is any position. Before the step, row `slot` of the
    state memory holds the state before the first token (zeroed or restored by the runner); after the step it holds the
    state after the last token. For each `(position, row)` of `saves` (a position that is a multiple of 64 tokens after
    `start`, or the end) the state after `position` tokens is also copied to `row`.

    For each `(segment, at)` of `composes`, in order, the state in `slot` is first composed with that segment of the
    step; the segment begins at position `at` of the sequence.

    With `kept` > 0 the slice continues a tail: `start` is any position, row `slot` holds the state `kept` tokens before
    it, and row `tail` of the tail memory has the inputs of these tokens. Layers with a state compute them again, and
    give no output for them. Each of `keeps` is a tail that is written to a row of the tail memory.
    """

    first: int  # index of its first row in the step
    length: int
    start: int  # position of its first token in the sequence
    slot: int
    table_P: Tensor  # int64, the pages that hold KV of positions [0, start + length)
    write_from: int  # index into table_P: earlier pages hold their KV already and are not written
    saves: tuple[tuple[int, int], ...] = ()
    transition: int | None = None  # row of the transitions that the slice updates; None: its transition is not needed
    composes: tuple[tuple[int, int], ...] = ()
    kept: int = 0  # tokens before `start`; start − kept is a multiple of 64
    tail: int = 0  # row of the tail memory that has them
    keeps: tuple[Keep, ...] = ()
    unread: int = 0  # first rows whose outputs are not read, which layers need not compute

    @property
    def end(self) -> int:
        """One past the position of its last token."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Chunk:
    """At most 64 tokens of a slice."""

    parent: Slice  # the slice that it is a part of
    index: int

    @property
    def first(self) -> int:
        """Index of its first row in the step."""
        return self.parent.first + self.index * CHUNK

    @property
    def length(self) -> int:
        """Tokens: 64, or fewer in the last chunk of a slice."""
        return min(CHUNK, self.parent.length - self.index * CHUNK)

    @property
    def rows(self) -> slice:
        """Rows of the step."""
        return slice(self.first, self.first + self.length)

    @property
    def is_last(self) -> bool:
        """True if the slice ends with this chunk."""
        return (self.index + 1) * CHUNK >= self.parent.length

    @property
    def state_rows(self) -> list[int]:
        """Rows of the state memory that receive the state after this chunk."""
        end = self.parent.start + self.index * CHUNK + self.length
        rows = [row for position, row in self.parent.saves if position == end]
        return [*rows, self.parent.slot] if self.is_last else rows


def blocks(group: list[Slice], limit: int) -> Iterator[tuple[int, list[Chunk]]]:
    """Yield the chunks of slices (longest first) in the order of time: the n-th of each sequence, then the next.

    Each item is (number of sequences with a chunk in the block, chunks): at most `limit` chunks, at least one step, and
    the same sequences in every step.
    """
    n_chunks = [-(-s.length // CHUNK) for s in group]
    step = 0
    while step < n_chunks[0]:
        n_active = sum(n > step for n in n_chunks)
        n_steps = min(max(1, limit // n_active), n_chunks[n_active - 1] - step)
        yield n_active, [Chunk(s, i) for i in range(step, step + n_steps) for s in group[:n_active]]
        step += n_steps


@dataclass(frozen=True, eq=False)
class Round:
    """Slices of a step that are computed together: at most one of each slot."""

    slices: tuple[Slice, ...]
    rows: tuple[slice, ...]  # rows of the step, one range for each slice or one for all
    device: torch.device

    def of(self, x_NX: Tensor) -> Tensor:
        """Select the rows of this round from all rows of the step."""
        parts = [x_NX[at] for at in self.rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
