"""Steps: ragged batches of the next tokens of decoding sequences, and of prefill legs under a budget."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

from headwater.plan import Plan, PrefillFlops
from headwater.schedule.sequence import Sequence


def _slot(seq: Sequence) -> int:
    assert seq.slot is not None, f"sequence {seq.id} is in a step, and has no slot"
    return seq.slot


@dataclass(frozen=True, slots=True)
class Leg:
    """A prefill slice of one sequence, with the plan that owns its pages."""

    seq: Sequence
    plan: Plan

    @property
    def slot(self) -> int:
        return _slot(self.seq)

    @property
    def wants_token(self) -> bool:
        return self.seq.wants_token_after(self.plan.end)

    @property
    def drafts(self) -> tuple[int, ...]:
        """No tokens: drafts are verified by rows of decoding sequences."""
        return ()

    @property
    def n_scored(self) -> int:
        """Number of leading rows whose logits are wanted for the prompt's next token."""
        return max(0, min(self.plan.end, self.seq.n_prompt - 1) - self.plan.start) if self.seq.scores_prompt else 0


@dataclass(frozen=True, slots=True)
class Decode:
    """The next tokens of one decoding sequence, a row each: one, or several of an answer that is replayed, then drafts.

    `plan` saves the state after them (decode-reuse raw, a full page). `accepted` are the drafts of the sequence's last
    step that are part of it: their keys are in place, and the state is not.
    """

    seq: Sequence
    count: int = 1
    plan: Plan | None = None
    drafts: tuple[int, ...] = ()
    accepted: int = 0

    @property
    def slot(self) -> int:
        return _slot(self.seq)

    @property
    def positions(self) -> range:
        return range(self.seq.computed, self.seq.computed + self.rows)

    @property
    def rows(self) -> int:
        return self.count + len(self.drafts)

    @property
    def tokens(self) -> list[int]:
        return [*self.seq.tokens[self.seq.computed : self.seq.computed + self.count], *self.drafts]

    @property
    def wants_token(self) -> bool:
        return self.seq.wants_token_after(self.seq.computed + self.count)


@dataclass(frozen=True, slots=True)
class Step:
    """The order for one run of the executor. Legs come first in the batch, then decoding sequences."""

    legs: tuple[Leg, ...]
    decodes: tuple[Decode, ...]

    @property
    def items(self) -> tuple[Leg | Decode, ...]:
        """Legs and decoding sequences, in the order of the batch."""
        return (*self.legs, *self.decodes)

    def sampled(self) -> list[Leg | Decode]:
        """Return the items from whose rows tokens are sampled. Call it before the step is published."""
        return [item for item in self.items if item.wants_token]

    def __bool__(self) -> bool:
        return bool(self.legs or self.decodes)

    def prefill_flops(self, flops: PrefillFlops) -> float:
        """Return the FLOPs of its legs, by those of the model."""
        return sum(flops.between(start, end) for leg in self.legs for start, end in leg.plan.intervals)


class SlotIds:
    """Free slots. Low ids are taken first: these keep their memory between sequences."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))  # a heap
        self._left: set[int] = set()

    def __len__(self) -> int:
        """Return the number of free slots."""
        return len(self._free)

    def take(self) -> int:
        """Return the lowest free slot, which is taken from now on."""
        slot = heappop(self._free)
        self._left.discard(slot)
        return slot

    def give(self, slot: int) -> None:
        """Give a slot back."""
        heappush(self._free, slot)
        self._left.add(slot)

    def take_left(self) -> set[int]:
        """Return the slots that were given back since the last call and are still free."""
        left, self._left = self._left, set()
        return left
