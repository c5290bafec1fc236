"""Runs prompts through a model without the engine: one sequence or several, in slices, then decoding."""

import os
import time
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from headwater.memory.arena import Arena
from headwater.memory.slots import StateMemory
from headwater.mixers.batch import STATE, StepBatch
from headwater.mixers.slices import Slice
from headwater.models.hybrid import HybridModel

FULL = bool(os.environ.get("HEADWATER_TEST_FULL"))  # `make test-full`: as many steps as once; `make test`: fewer


def examples(n: int) -> int:
    """Return the number of examples that hypothesis draws: `n` in `make test-full`, and a third of them else."""
    return n if FULL else n // 3


class Clock:
    """Module `time` for a module under test, which a test sets ahead."""

    perf_counter, sleep = staticmethod(time.perf_counter), staticmethod(time.sleep)

    def __init__(self) -> None:
        self.ahead = 0.0  # seconds

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


@dataclass
class Sequence:
    """One running sequence: its slot, its pages and its length so far."""

    slot: int
    table: torch.Tensor
    length: int = 0


@dataclass
class Bench:
    """A model with an arena and state memory of its own. Pages are handed out in a shuffled order."""

    model: HybridModel
    n_pages: int = 64
    n_slots: int = 12
    poison: bool = False  # fill the arena with NaN first: whatever is read before it is written shows
    device: str = "cpu"
    _free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        spec = self.model.spec
        self.arena = Arena(spec, self.n_pages, self.device)
        row_bytes, area = spec.state_place
        self.states = StateMemory(spec.state, self.n_slots, row_bytes or spec.page_bytes, self.device, area)
        if self.poison:
            self.arena.pages.fill_(0xFF)
        order = torch.randperm(self.n_pages, generator=torch.Generator().manual_seed(1))
        self._free = order.tolist()
        self._slots = list(range(self.n_slots))

    def sequence(self, max_tokens: int) -> Sequence:
        """A new sequence at position 0 with pages for `max_tokens`."""
        taken = self.take_pages(-(-max_tokens // self.arena.page_size))
        sequence = Sequence(self._slots.pop(0), self._integers(taken))
        self.states.zero(sequence.slot)
        return sequence

    def take_pages(self, n: int) -> list[int]:
        """Take pages of the arena."""
        taken, self._free = self._free[:n], self._free[n:]
        assert len(taken) == n, f"{n} pages wanted, {len(taken)} left"
        return taken

    def step(
        self,
        prefill: list[tuple[Sequence, list[int]]],
        decode: list[tuple[Sequence, int]] = (),
        every_row: bool = False,
        drafted: tuple[int, ...] = (),
        accepted: tuple[int, ...] = (),
    ) -> torch.Tensor:
        """One forward pass: the next tokens of some sequences, one decoded token of others, or several in a row.

        Logits of the last token of each prompt and of each decoded one, in that order, or of every row. Of each decoded
        sequence the last `drafted` tokens are drafts, and `accepted` drafts of the step before are part of it.
        """
        slices, tokens, positions, wanted = [], [], [], []
        for seq, new in prefill:
            end = seq.length + len(new)
            table = seq.table[: -(-end // self.arena.page_size)]
            slices.append(Slice(len(tokens), len(new), seq.length, seq.slot, table, seq.length // self.arena.page_size))
            tokens += new
            positions += range(seq.length, end)
            wanted.append(len(tokens) - 1)
            seq.length = end
        tables = []
        firsts = [seq for i, (seq, _) in enumerate(decode) if not (i and seq is decode[i - 1][0])]
        for seq, n in zip(firsts, accepted, strict=False):
            seq.length += n
        for seq, token in decode:
            wanted.append(len(tokens))
            tokens.append(token)
            positions.append(seq.length)
            seq.length += 1
            tables.append(seq.table[: -(-seq.length // self.arena.page_size)])
        batch = StepBatch(
            token_N=self._integers(tokens),
            position_N=self._integers(positions),
            slices=tuple(slices),
            decode_slot_B=self._integers([seq.slot for seq, _ in decode]),
            decode_tables=tuple(tables),
            logits_row_R=self._integers(list(range(len(tokens))) if every_row else wanted),
            parents=tuple(i - 1 if i and seq is decode[i - 1][0] else STATE for i, (seq, _) in enumerate(decode)),
            drafted=drafted,
            accepted=accepted,
        )
        for seq, n in zip(firsts, drafted, strict=False):
            seq.length -= n
        return self.model.forward(batch, self.arena, self.states)

    def prefill(self, seq: Sequence, tokens: list[int], cuts: tuple[int, ...] = ()) -> torch.Tensor:
        """Logits of every token of a prompt that is computed in slices cut at `cuts`."""
        bounds = [0, *(c for c in cuts if c < len(tokens)), len(tokens)]
        parts = [self.step([(seq, tokens[a:b])], every_row=True) for a, b in pairwise(bounds)]
        return torch.cat(parts)

    def _integers(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def greedy(self, seq: Sequence, last_logits: torch.Tensor, n: int) -> list[int]:
        """The next n tokens."""
        out = [int(last_logits.argmax())]
        while len(out) < n:
            out.append(int(self.step([], [(seq, out[-1])])[0].argmax()))
        return out
