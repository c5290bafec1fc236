"""One ragged step of the model as tensors, and its prefill slices cut into chunks of 64 tokens.

Rows of the step are tokens: first the rows of all prefill slices, one slice after the other, then the rows of decoding
sequences. A decoding sequence has one row, or several if its next tokens are known. N = all rows, P = prefill rows,
B = rows of decoding sequences, S = decoding sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, zip_longest
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.draft.drafter import MOST_DRAFTS
from headwater.kernels import recording
from headwater.mixers.slices import Round, Slice

Value = TypeVar("Value")

STATE = -1  # instead of a parent: the row continues the state in its slot
DROPPED = -1  # instead of a kept row's number

Rows = np.ndarray[Any, Any]  # int64


@dataclass(frozen=True)
class StepBatch:
    """Everything that one forward pass needs apart from the weights.

    Slices that share a slot are parts of one sequence, in the order of positions. Decoding rows of one sequence follow
    one another: the parent of the first is STATE, the parent of each other one is the row before it. Raises ValueError
    for other parents.
    """

    token_N: Tensor  # int64
    position_N: Tensor  # int64
    slices: tuple[Slice, ...]
    decode_slot_B: Tensor  # int64, rows of the state memory, updated in place
    decode_tables: tuple[Tensor, ...]  # B int64 tensors: pages that hold KV of [0, position + 1)
    logits_row_R: Tensor  # int64, rows whose logits are returned
    wants_all: bool = False  # the rows whose logits are returned are known to be all, in order
    parents: tuple[int, ...] = ()  # of each decoding row: the row that it continues, or STATE; empty: STATE for all
    drafted: tuple[int, ...] = ()  # of each decoding sequence: its last rows that are drafts; none: no row is
    accepted: tuple[int, ...] = ()  # of each: drafts of its step before that were accepted; none: all 0

    def __post_init__(self) -> None:
        if self.parents and len(self.parents) != self.n_decode:
            raise ValueError(f"{self.n_decode} decoding rows have {len(self.parents)} parents")
        for row, parent in enumerate(self.parents):
            if parent != STATE and not 0 <= parent == row - 1:
                raise ValueError(f"decoding row {row} continues row {parent}: it may continue only the row before it")
        for of_each, what in ((self.drafted, "drafts"), (self.accepted, "accepted drafts")):
            if of_each and len(of_each) != len(self.firsts) - 1:
                raise ValueError(f"{len(self.firsts) - 1} decoding sequences, and {what} of {len(of_each)}")
        for first, n, (start, end) in zip(self.firsts, self.drafted, pairwise(self.firsts), strict=False):
            if n > MOST_DRAFTS:
                raise ValueError(f"{n} drafts of a sequence, and at most {MOST_DRAFTS} are kept")
            if not 0 <= n < end - start:
                raise ValueError(f"{n} drafts in {end - start} rows of the sequence that begins with row {first}")

    def check_slots(self) -> None:
        """Raise ValueError if two decoding sequences have the same slot: one of their updates would be lost.

        Slots on a GPU are not checked, since the host would wait for the device.
        """
        if self.decode_slot_B.device.type != "cpu":
            return
        slots = self.decode_slot_B.numpy().tolist()  # a step in which torch reads numbers is not recorded
        for row, parent in enumerate(self.parents):
            if parent != STATE and slots[row] != slots[parent]:
                slot, its = slots[row], slots[parent]
                raise ValueError(f"decoding row {row} continues row {parent}: its slot is {slot}, that row's is {its}")
        if self.has_chains:
            slots = [slot for slot, parent in zip(slots, self.parents, strict=True) if parent == STATE]
        if len(set(slots)) < len(slots):
            raise ValueError(f"{len(slots)} decoding sequences have slots {slots}: each needs one of its own")

    @cached_property
    def n_prefill(self) -> int:
        """Rows of prefill slices."""
        return sum(s.length for s in self.slices)

    @property
    def n_decode(self) -> int:
        """Rows of decoding sequences; they follow the rows of slices."""
        return len(self.decode_tables)

    @cached_property
    def has_chains(self) -> bool:
        """True if a decoding sequence has several rows."""
        return any(parent != STATE for parent in self.parents)

    @cached_property
    def firsts(self) -> list[int]:
        """The first row of each decoding sequence, counted among decoding rows, and the end of the last: S + 1."""
        if not self.has_chains:
            return list(range(self.n_decode + 1))
        return [row for row, parent in enumerate((*self.parents, STATE)) if parent == STATE]

    @property
    def speculates(self) -> bool:
        """True if some rows are drafts, or drafts of the step before were accepted."""
        return bool(self.drafted or self.accepted)

    @cached_property
    def first_drafts(self) -> list[int]:
        """The first draft of each decoding sequence, or the end of its rows, counted among decoding rows."""
        ends = self.firsts[1:]
        return [end - n for end, n in zip(ends, self.drafted, strict=True)] if self.drafted else ends

    @cached_property
    def draft_rows(self) -> DraftRows:
        """The drafts among the decoding rows."""
        of_each = zip(self.first_drafts, self.firsts[1:], strict=True)
        return DraftRows.of(self, [(row, row - first) for first, end in of_each for row in range(first, end)])

    @cached_property
    def with_accepted(self) -> WithAccepted:
        """The step's decoding rows, with those that were accepted before each sequence's own."""
        return WithAccepted.of(self)

    @property
    def with_accepted_for_kernels(self) -> WithAccepted:
        """The step's decoding rows with accepted drafts, for kernels on a CPU, which read them from memory."""
        return self.with_accepted

    @cached_property
    def true_and_drafted(self) -> tuple[tuple[Tensor, StepBatch], tuple[Tensor, StepBatch]]:
        """Decoding rows that are not drafts, then drafts: their numbers, and a step of only them, without tokens."""
        is_draft = [False] * self.n_decode
        for row in self.draft_rows.row_A.tolist():
            is_draft[row] = True
        true, drafts = ([row for row, its in enumerate(is_draft) if its is kind] for kind in (False, True))
        return self.some_rows(true), self.some_rows(drafts)

    def some_rows(self, rows: list[int]) -> tuple[Tensor, StepBatch]:
        """Return decoding rows by their numbers, and a step of only these rows."""
        place = {row: at for at, row in enumerate(rows)}
        row_B = torch.tensor(rows, dtype=torch.int64, device=self.position_N.device)
        parents = self.parents or (STATE,) * self.n_decode
        batch = StepBatch(
            token_N=self.token_N[:0],
            position_N=self.position_N[self.decode_rows][row_B],
            slices=(),
            decode_slot_B=self.decode_slot_B[row_B],
            decode_tables=tuple(self.decode_tables[row] for row in rows),
            logits_row_R=self.logits_row_R[:0],
            parents=tuple(place.get(parents[row], STATE) for row in rows),
        )
        return row_B, batch

    @cached_property
    def decode_parts(self) -> tuple[tuple[slice, StepBatch], ...]:
        """Parts of the decoding rows, to be computed in this order: no part has two rows of a sequence.

        A part is a run of adjacent rows of the step, and a batch with these as its decoding rows. A step in which each
        sequence has one row is one part. Raises ValueError if sequences in several parts have the same slot.
        """
        bounds = [0]
        for row, parent in enumerate(self.parents):
            if parent != STATE and parent >= bounds[-1]:
                bounds.append(row)
        if len(bounds) == 1:
            return ((self.decode_rows, self),) if self.n_decode else ()
        self.check_slots()
        return tuple(self._part(first, end) for first, end in pairwise((*bounds, self.n_decode)))

    def _part(self, first: int, end: int) -> tuple[slice, StepBatch]:
        at = slice(self.n_prefill + first, self.n_prefill + end)
        slots, tables = self.decode_slot_B[first:end], self.decode_tables[first:end]
        return at, StepBatch(self.token_N[at], self.position_N[at], (), slots, tables, self.logits_row_R[:0])

    @property
    def logits_rows(self) -> Tensor | slice:
        """Rows whose logits are returned."""
        return slice(None) if self.wants_all else self.logits_row_R

    @cached_property
    def decode_sequences(self) -> tuple[Rows, Rows, Rows]:
        """Slots of the decoding sequences, [S], their first rows, [S + 1], and first drafts, [S], for CPU kernels.

        Rows are counted among decoding rows; the last of the first rows is the end of all. Raises ValueError if two
        sequences have one slot.
        """
        self.check_slots()
        slots, firsts = self.decode_slot_B.numpy(), np.array(self.firsts)
        return slots[firsts[:-1]] if self.has_chains else slots, firsts, np.array(self.first_drafts, np.int64)

    @cached_property
    def derived(self) -> dict[Any, Any]:
        """Values that layers compute from this batch and share, by the object that computes them."""
        return {}

    @cached_property
    def decode_table_BT(self) -> Tensor:
        """Page tables of the decoding rows as one tensor."""
        return padded_tables(self.decode_tables, self.position_N)

    @cached_property
    def sequences(self) -> tuple[tuple[Slice, ...], ...]:
        """Slices grouped by slot."""
        by_slot: dict[int, list[Slice]] = {}
        for s in self.slices:
            by_slot.setdefault(s.slot, []).append(s)
        return tuple(map(tuple, by_slot.values()))

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """Slices in the order of work: the n-th of each sequence, then the next. One round in an ordinary step."""
        device = self.position_N.device
        if len(self.sequences) == len(self.slices):
            return (Round(self.slices, (slice(0, self.n_prefill),), device),) if self.slices else ()
        rounds = ([s for s in together if s is not None] for together in zip_longest(*self.sequences))
        return tuple(
            Round(tuple(slices), tuple(slice(s.first, s.first + s.length) for s in slices), device) for slices in rounds
        )

    @cached_property
    def decode_rows(self) -> slice:
        """Rows of the step that belong to decoding sequences."""
        return slice(self.n_prefill, self.n_prefill + self.n_decode)

    @cached_property
    def decode_lengths(self) -> list[int]:
        """Tokens of each decoding row's sequence, its own the last."""
        return [position + 1 for position in self.position_N[self.decode_rows].tolist()]

    @property
    def longest(self) -> int:
        """One past the largest position of a decoding sequence."""
        return max(self.decode_lengths)


@dataclass(frozen=True)
class RecordedBatch(StepBatch):
    """Recorded step of only decoding rows, which is repeated with other content in the same memory.

    The content includes which rows are of one sequence, and which are drafts. Work that reads these in another form
    than `decode_sequences` and `with_accepted_for_kernels` is not repeatable.
    """

    table_BT: Tensor = field(kw_only=True)  # int64, page tables
    most: int = field(kw_only=True)  # tokens, at most, of a sequence
    recorded_sequences: tuple[Rows, Rows, Rows] | None = field(kw_only=True, default=None)  # of a step with chains
    whole: WithAccepted | None = field(kw_only=True, default=None)  # of a step that speculates

    def __post_init__(self) -> None:
        """Check nothing: the steps that it repeats were checked."""

    @property
    def decode_sequences(self) -> tuple[Rows, Rows, Rows]:
        return super().decode_sequences if self.recorded_sequences is None else self.recorded_sequences

    @property
    def with_accepted(self) -> WithAccepted:
        recording.note_read("accepted drafts")
        return super().with_accepted

    @property
    def with_accepted_for_kernels(self) -> WithAccepted:
        return self.with_accepted if self.whole is None else self.whole

    @property
    def draft_rows(self) -> DraftRows:
        recording.note_read("rows of drafts")
        return super().draft_rows

    @property
    def decode_parts(self) -> tuple[tuple[slice, StepBatch], ...]:
        if self.has_chains:
            recording.note_read("rows of a sequence")
        return super().decode_parts

    @property
    def decode_table_BT(self) -> Tensor:
        return self.table_BT

    @property
    def longest(self) -> int:
        return self.most


@dataclass(frozen=True)
class DraftRows:
    """Drafts among the decoding rows of a step: A rows, and of each the slot of its sequence and its number there."""

    row_A: Tensor  # int64, counted among decoding rows
    slot_A: Tensor
    number_A: Tensor

    @classmethod
    def of(cls, batch: StepBatch, drafts: list[tuple[int, int]]) -> DraftRows:
        """Build it from rows and their numbers."""
        row_A, number_A = torch.tensor(drafts, dtype=torch.int64, device=batch.position_N.device).view(-1, 2).unbind(1)
        return cls(row_A, batch.decode_slot_B[row_A], number_A)

    def some(self, chosen: list[bool]) -> DraftRows:
        """Return some of these drafts."""
        at_A = torch.tensor(chosen, dtype=torch.bool, device=self.row_A.device)
        return DraftRows(self.row_A[at_A], self.slot_A[at_A], self.number_A[at_A])

    @property
    def kept(self) -> Rows:
        """Numbers of the kept rows of these drafts: each slot has MOST_DRAFTS of them."""
        kept: Rows = self.slot_A.numpy() * MOST_DRAFTS + self.number_A.numpy()
        return kept


@dataclass(frozen=True)
class WithAccepted:
    """A step's decoding rows with accepted drafts of the step before in front of each sequence's own rows.

    A layer with a state computes these rows: it kept the drafts' inputs, and not the states after them.
    """

    batch: StepBatch  # of all these rows, for layers with a state; without tokens
    own_B: Tensor  # int64, the step's own rows among them
    accepted: DraftRows  # the others
    drafts: DraftRows  # among the step's own rows

    @cached_property
    def copies(self) -> tuple[Rows, Rows]:
        """Sources of all these rows, and places where the step's own are kept, for `kernels.drafts.gather_into`."""
        sources = np.empty(self.batch.n_decode, np.int64)
        sources[self.own_B.numpy()] = np.arange(len(self.own_B))
        sources[self.accepted.row_A.numpy()] = -1 - self.accepted.kept
        keeps = np.full(len(self.own_B), DROPPED)
        keeps[self.drafts.row_A.numpy()] = self.drafts.kept
        return sources, keeps

    @classmethod
    def of(cls, batch: StepBatch) -> WithAccepted:
        """Build it from a step."""
        accepted = batch.accepted or (0,) * (len(batch.firsts) - 1)
        source, drafts, own, parents = list[int](), list[tuple[int, int]](), list[int](), list[int]()
        offsets = list[int]()  # of a row's position, from that of its source
        for (first, end), n in zip(pairwise(batch.firsts), accepted, strict=True):
            drafts += ((len(source) + i, i) for i in range(n))
            own += range(len(source) + n, len(source) + n + end - first)
            parents += (STATE if i == 0 else len(source) + i - 1 for i in range(n + end - first))
            source += (*[first] * n, *range(first, end))
            offsets += (*range(-n, 0), *[0] * (end - first))
        device = batch.position_N.device
        source_B, offset_B, own_B = (torch.tensor(x, dtype=torch.int64, device=device) for x in (source, offsets, own))
        whole = StepBatch(
            token_N=batch.token_N[:0],
            position_N=batch.position_N[batch.decode_rows][source_B] + offset_B,
            slices=(),
            decode_slot_B=batch.decode_slot_B[source_B],
            decode_tables=tuple(batch.decode_tables[row] for row in source),
            logits_row_R=batch.logits_row_R[:0],
            parents=tuple(parents),
            drafted=batch.drafted,
        )
        return cls(whole, own_B, DraftRows.of(whole, drafts), batch.draft_rows)


@dataclass(frozen=True)
class RecordedAccepted(WithAccepted):
    """Rows of a recorded step, in memory that stays where it is; those beyond the rows of sequences are idle."""

    copies: tuple[Rows, Rows] = field(kw_only=True)


def padded_tables(tables: Sequence[Tensor], like: Tensor) -> Tensor:
    """Stack page tables, [tables, pages of the longest], padded with zeros; without tables, an empty one as `like`."""
    width = max((len(table) for table in tables), default=0)
    missing = ((table, width - len(table)) for table in tables)
    rows = [F.pad(table, (0, n)) if n else table for table, n in missing]
    return torch.stack(rows) if rows else like.new_empty(0, 0)


class LastValue(Generic[Value]):
    """The value for the last object: the same from layer to layer of a step, or from step to step.

    Threads may share it, as engines in one process that share a model do: each gets the value for its own object.
    """

    def __init__(self, make: Callable[..., Value]) -> None:
        """`make`: computes the value."""
        self._make = make
        self._last: tuple[object, Value] | None = None

    def of(self, key: object, *given: object) -> Value:
        """Return the value for the object `key`: that of the last call, or else what `make` returns for `given`."""
        last = self._last  # another thread may replace it
        if last is None or last[0] is not key:
            last = self._last = key, self._make(*given)
        return last[1]
