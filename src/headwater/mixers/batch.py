"""One ragged step as tensors: what the model computes on.

Rows of the step are tokens: first those of all prefill slices, one slice after the other, then one row for each
decoding sequence, then idle ones, of which nothing is kept, where products are faster with a few rows more.
N = all rows, P = prefill rows, B = decoding sequences (N ≥ P + B).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, zip_longest
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from headwater.mixers.gpu.ragged import Ragged


@dataclass(frozen=True)
class Slice:
    """The next tokens of one sequence that is being prefilled.

    `start` is a multiple of 64; only around segments it is any position. The state before the first token is in row
    `slot` of the state memory (the runner has zeroed or restored it); the state after the last token is left there. For
    each `(position, row)` of `saves` (position a multiple of 64 tokens from `start`, or the end) the state after
    `position` tokens is also left in `row`.

    For each `(segment, at)` of `composes`, in order, the state in `slot` is first composed with one of the step's
    segments, which begins at position `at` of the sequence.
    """

    first: int  # index of its first row in the step
    length: int
    start: int  # position of its first token in the sequence
    slot: int
    table_P: torch.Tensor  # int64, the pages that hold KV of positions [0, start + length)
    write_from: int  # index into table_P: KV of earlier pages is there already and is not written
    saves: tuple[tuple[int, int], ...] = ()
    transition: int | None = None  # row of the transitions that moves on with the slice, where one is wanted
    composes: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        """One past the position of its last token."""
        return self.start + self.length


@dataclass(frozen=True)
class Round:
    """Slices of a step that are worked through together: at most one of each slot."""

    slices: tuple[Slice, ...]
    rows: tuple[slice, ...]  # of the step, where the slices' rows are
    device: torch.device

    @cached_property
    def ragged(self) -> Ragged:
        """The slices as GPU kernels read them, `rows` one after the other."""
        from headwater.mixers.gpu.ragged import Ragged

        firsts = accumulate((s.length for s in self.slices), initial=0)
        return Ragged.of([replace(s, first=first) for s, first in zip(self.slices, firsts, strict=False)], self.device)

    def of(self, x_NX: torch.Tensor) -> torch.Tensor:
        """These rows of all of a step's."""
        parts = [x_NX[at] for at in self.rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True)
class StepBatch:
    """Everything one forward pass needs to know beside the weights.

    Several slices may have one slot: they are of one sequence, in the order of positions.
    """

    token_N: torch.Tensor  # int64
    position_N: torch.Tensor  # int64
    slices: tuple[Slice, ...]
    decode_slot_B: torch.Tensor  # int64, rows of the state memory, updated in place
    decode_tables: tuple[torch.Tensor, ...]  # B int64 tensors: pages that hold KV of [0, position + 1)
    logits_row_R: torch.Tensor  # int64, the rows whose logits are wanted

    @cached_property
    def n_prefill(self) -> int:
        """Rows that belong to prefill slices."""
        return sum(s.length for s in self.slices)

    @property
    def n_decode(self) -> int:
        """Rows that belong to decoding sequences; they come after those of slices."""
        return len(self.decode_tables)

    @cached_property
    def decode_table_BT(self) -> torch.Tensor:
        """Tables of decoding sequences as one."""
        return padded_tables(self.decode_tables, self.position_N)

    @cached_property
    def sequences(self) -> tuple[tuple[Slice, ...], ...]:
        """The slices of each slot."""
        by_slot: dict[int, list[Slice]] = {}
        for s in self.slices:
            by_slot.setdefault(s.slot, []).append(s)
        return tuple(map(tuple, by_slot.values()))

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """The slices in the order of work: the n-th of each sequence, then the next. One round in an ordinary step."""
        device = self.position_N.device
        if len(self.sequences) == len(self.slices):
            return (Round(self.slices, (slice(0, self.n_prefill),), device),) if self.slices else ()
        rounds = ([s for s in together if s is not None] for together in zip_longest(*self.sequences))
        return tuple(
            Round(tuple(slices), tuple(slice(s.first, s.first + s.length) for s in slices), device) for slices in rounds
        )

    @cached_property
    def decode_rows(self) -> slice:
        """Where they are."""
        return slice(self.n_prefill, self.n_prefill + self.n_decode)

    @cached_property
    def decode_lengths(self) -> list[int]:
        """Tokens of each, the one of this step included."""
        return [position + 1 for position in self.position_N[self.decode_rows].tolist()]


def padded_tables(tables: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Page tables as one, [tables, pages of the longest], filled up with zeros; without any, empty as `like` is."""
    width = max((len(table) for table in tables), default=0)
    missing = ((table, width - len(table)) for table in tables)
    rows = [F.pad(table, (0, n)) if n else table for table, n in missing]
    return torch.stack(rows) if rows else like.new_empty(0, 0)


def batch_height(n_rows: int, least: int) -> int:
    """Rows that a step is filled up to, at a cost of a sixteenth or so: one of few heights.

    A product's kernel is made for each height that comes up (half a millisecond and 0.7 MB for each shape of weight, in
    bfloat16 on AVX-512). With `least` 1 nothing is filled up.
    """
    if least == 1:
        return n_rows
    grid = least if n_rows <= 16 else 8 if n_rows <= 128 else 16 if n_rows <= 256 else 32
    return -(-n_rows // grid) * grid
