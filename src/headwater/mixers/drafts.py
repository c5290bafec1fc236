"""Drafted tokens in layers with a state: a step ends with the state after its true rows, and keeps the drafts' inputs.

Accepted drafts are replayed at the beginning of the sequence's next step: the state is read and written once a step,
and each row sees the same state as in plain decoding. A rejected draft changes no state.

A drafts, B decoding rows, S slots, X trailing dimensions of a layer's inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from headwater.draft.drafter import MOST_DRAFTS
from headwater.mixers.batch import DraftRows, StepBatch


@dataclass(frozen=True)
class Kept:
    """The inputs of one layer's last drafts: [S, MOST_DRAFTS, X] of each kind. The list is empty before any."""

    parts: list[Tensor] = field(default_factory=list)

    def keep(self, parts: tuple[Tensor, ...], drafts: DraftRows) -> None:
        """Keep inputs of drafts, [A, X] each, until the next ones of their slots."""
        if len(drafts.row_A):
            self.make_room(parts, int(drafts.slot_A.max()) + 1)
        for kept_SAX, part_AX in zip(self.parts, parts, strict=True):
            kept_SAX[drafts.slot_A, drafts.number_A] = part_AX

    def of(self, drafts: DraftRows) -> tuple[Tensor, ...]:
        """Return kept inputs, [A, X] each."""
        return tuple(kept_SAX[drafts.slot_A, drafts.number_A] for kept_SAX in self.parts)

    def make_room(self, parts: tuple[Tensor, ...], slots: int) -> None:
        """Grow the memory to `slots` slots of inputs like these; once a step is recorded it must not grow again."""
        known = len(self.parts[0]) if self.parts else 0
        if known >= slots:
            return
        grown = [part_AX.new_empty(slots, MOST_DRAFTS, *part_AX.shape[1:]) for part_AX in parts]
        for new_SAX, old_SAX in zip(grown, self.parts, strict=False):
            new_SAX[:known] = old_SAX
        self.parts[:] = grown


def with_accepted(parts: tuple[Tensor, ...], batch: StepBatch, kept: Kept) -> tuple[Tensor, ...]:
    """Return inputs of all rows of `batch.with_accepted` from those of the decoding rows; keep those of the drafts."""
    whole, drafts = batch.with_accepted, batch.draft_rows
    n = len(whole.batch.position_N)
    inputs = tuple(part_BX.new_empty(n, *part_BX.shape[1:]) for part_BX in parts)
    for all_BX, part_BX in zip(inputs, parts, strict=True):
        all_BX[whole.own_B] = part_BX
    if len(whole.accepted.row_A):
        for all_BX, kept_AX in zip(inputs, kept.of(whole.accepted), strict=True):
            all_BX[whole.accepted.row_A] = kept_AX
    if len(drafts.row_A):
        kept.keep(tuple(part_BX[drafts.row_A] for part_BX in parts), drafts)
    return inputs
