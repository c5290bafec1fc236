"""What runs next. One step is a ragged batch: a row for each decoding sequence, and prefill legs under a budget."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.plan import Plan
from headwater.schedule.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Leg:
    """A prefill slice of one sequence, with the plan that owns its pages."""

    seq: Sequence
    plan: Plan

    @property
    def wants_token(self) -> bool:
        return self.seq.samples and self.plan.end == len(self.seq.tokens)

    @property
    def n_scored(self) -> int:
        """How many of its first rows have logits that are wanted for the prompt's next token."""
        return min(self.plan.end, self.seq.n_prompt - 1) - self.plan.start if self.seq.scores_prompt else 0


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One token of one decoding sequence. `plan` saves the state after it (decode-reuse raw, a full page)."""

    seq: Sequence
    token: int
    position: int
    plan: Plan | None = None

    @property
    def wants_token(self) -> bool:
        return self.position + 1 == len(self.seq.tokens)


@dataclass(frozen=True, slots=True)
class Step:
    """The order for one run of the executor. Legs come first in the batch, then rows."""

    legs: tuple[Leg, ...]
    rows: tuple[DecodeRow, ...]

    @property
    def items(self) -> tuple[Leg | DecodeRow, ...]:
        """Both, in the order of the batch."""
        return (*self.legs, *self.rows)

    def __bool__(self) -> bool:
        return bool(self.legs or self.rows)
