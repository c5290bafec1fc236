"""Legs of a model that keep tails and continue them in mid-page, driven by hand."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass

import torch

from headwater.memory.tails import TailMemory
from headwater.mixers.batch import StepBatch
from headwater.mixers.slices import Keep, Slice
from headwater.models.hybrid import HybridModel
from tests.support import Bench, Sequence

PAGE = 64
TAILS = 6  # rows of the tail memory


@dataclass(frozen=True)
class Leg:
    """The next tokens of a sequence, up to `end`, after `kept` tokens of the tail in a row of the tail memory."""

    seq: Sequence
    end: int
    kept: int = 0
    tail: int = 0
    keeps: tuple[Keep, ...] = ()
    saves: tuple[tuple[int, int], ...] = ()


@dataclass
class Stored:
    """A stored tail: its tokens [start, end), its page of KV, its pages of rows, and the checkpoint before it."""

    start: int
    end: int
    page: int
    rows: list[int]
    state_B: torch.Tensor


class TailBench:
    """A bench whose sequences all have the same tokens; memory is filled with NaN first."""

    def __init__(self, model: HybridModel, tokens: list[int], n_pages: int = 160) -> None:
        self.bench = Bench(model, n_pages=n_pages, n_slots=24, poison=True)
        self.model, self.spec, self.tokens = model, model.spec, tokens
        self.arena, self.states = self.bench.arena, self.bench.states
        self.tails = TailMemory(model.spec, TAILS)
        self.tails.bytes_RB.fill_(0xFF)
        self.last: Sequence | None = None  # that was resumed

    def sequence(self) -> Sequence:
        return self.bench.sequence(len(self.tokens) + 2 * PAGE)

    def step(self, legs: Several[Leg], decode: Several[tuple[Sequence, int]] = ()) -> list[torch.Tensor]:
        """Run a step; return the logits of each leg's rows, then of each decoding row."""
        slices, token_N, positions = list[Slice](), list[int](), list[int]()
        for leg in legs:
            seq = leg.seq
            table = seq.table[: -(-leg.end // PAGE)]
            n = leg.end - seq.length
            slices.append(
                Slice(
                    len(token_N), n, seq.length, seq.slot, table, seq.length // PAGE, leg.saves,
                    kept=leg.kept, tail=leg.tail, keeps=leg.keeps,
                )
            )  # fmt: skip
            token_N += self.tokens[seq.length : leg.end]
            positions += range(seq.length, leg.end)
            seq.length = leg.end
        tables = []
        for seq, token in decode:
            token_N.append(token)
            positions.append(seq.length)
            seq.length += 1
            tables.append(seq.table[: -(-seq.length // PAGE)])
        batch = StepBatch(
            torch.tensor(token_N), torch.tensor(positions), tuple(slices),
            torch.tensor([seq.slot for seq, _ in decode], dtype=torch.int64), tuple(tables),
            torch.arange(len(token_N)),
        )  # fmt: skip
        logits_NV = self.model.forward(batch, self.arena, self.states, tails=self.tails)
        return list(logits_NV.split([s.length for s in slices] + [1] * len(decode)))

    def advance(self, leg: Leg) -> None:
        """Advance the states of a leg without rows."""
        seq = leg.seq
        one = Slice(0, 0, seq.length, seq.slot, seq.table, 0, kept=leg.kept, tail=leg.tail)
        self.model.advance([one], self.states, self.tails)

    def prefilled(self, end: int) -> Sequence:
        """A sequence whose first tokens were computed in one leg."""
        seq = self.sequence()
        if end:
            self.step([Leg(seq, end)])
        return seq

    def state(self, row: int) -> torch.Tensor:
        """The bytes of a row's states, and of no padding."""
        return self.states.bytes_RB[row, : self.spec.state.bytes].clone()

    def store(self, row: int, seq: Sequence, start: int, end: int, state_B: torch.Tensor) -> Stored:
        """Store a tail of a sequence, whose rows are in a row of the tail memory, in pages of the arena."""
        page, *rows = self.bench.take_pages(1 + self.spec.tail.pages(end - start, self.spec.page_bytes))
        self.tails.save(row, self.arena.pages, rows, end - start)
        self.arena.pages[page] = self.arena.pages[seq.table[start // PAGE]]
        self.tails.bytes_RB[row] = 0xFF
        return Stored(start, end, page, rows, state_B)

    def stored(self, end: int, n: int | None = None) -> tuple[Sequence, Stored, list[torch.Tensor]]:
        """Prefill up to a page, then a leg up to `n` that keeps a tail up to `end`; return the leg's logits, too."""
        start = (end - 1) // PAGE * PAGE
        seq = self.prefilled(start)
        before_B = self.state(seq.slot)
        logits = self.step([Leg(seq, n or end, keeps=(Keep(start, end, 0, (n or end) == end),))])
        return seq, self.store(0, seq, start, end, before_B), logits

    def resumed(self, like: Sequence, stored: Stored, end: int, row: int = 1) -> tuple[Sequence, int]:
        """A new sequence at `end` with a stored tail in a row of the tail memory, and the tokens of it that it uses."""
        seq, kept = self.sequence(), end - stored.start
        first = stored.start // PAGE
        seq.table[:first] = like.table[:first]
        self.arena.pages[seq.table[first]] = self.arena.pages[stored.page]
        self.states.bytes_RB[seq.slot, : self.spec.state.bytes] = stored.state_B
        self.tails.restore(row, self.arena.pages, stored.rows, kept)
        seq.length, self.last = end, seq
        return seq, kept

    def kv(self, seq: Sequence, start: int, end: int) -> list[torch.Tensor]:
        """The entries of a sequence's tokens in the arena, of each layer."""
        layers = self.spec.attention_layers
        return [x for layer in layers for x in self.arena.read(layer, seq.table, start, end)]


def same(one: Several[torch.Tensor], other: Several[torch.Tensor]) -> bool:
    """Return whether all tensors have the same bits, and no NaN."""
    return len(one) == len(other) and all(
        torch.equal(a, b) and not (a.is_floating_point() and a.isnan().any()) for a, b in zip(one, other, strict=True)
    )
