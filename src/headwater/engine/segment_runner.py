"""Segment work around a step's forward pass: placing of KV, gathering and saving of states."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headwater.memory.arena import Arena
from headwater.memory.segments import Segment
from headwater.memory.slots import StateMemory
from headwater.models.hybrid import HybridModel
from headwater.plan import Plan
from headwater.schedule.step import Leg


class SegmentRunner:
    """Row `slot` of the transitions belongs to the segment that the slot makes."""

    def __init__(self, model: HybridModel, arena: Arena, states: StateMemory, slots: int) -> None:
        self.model, self.arena, self.states, self.slots = model, arena, states, slots
        spec = model.spec
        row_bytes = spec.transition_pages * spec.page_bytes
        self.transitions = StateMemory(spec.transition, slots, row_bytes, arena.pages.device)

    def before(self, legs: Sequence[Leg]) -> list[Segment]:
        """Make ready what legs compose, in their order, and the transitions of segments that are begun."""
        segments: list[Segment] = []
        for leg in legs:
            if leg.plan.build is not None and leg.plan.start == 0:
                self.model.identities(self.transitions, leg.seq.slot)
                self.states.zero(self.slots + leg.seq.slot)
            segments += self._composed(leg.plan)
        return segments

    def _composed(self, plan: Plan) -> list[Segment]:
        segments = []
        for part in plan.composed:
            self.model.place(
                self.arena, self._table(part.table), self._table(plan.table), part.start, part.end, part.at
            )
            segments.append(
                Segment.gathered(
                    self.model.spec, self.arena.pages, range(part.start, part.end), part.state, part.transition
                )
            )
        return segments

    def after(self, legs: Sequence[Leg]) -> None:
        """Save the states and transitions of segments that are complete."""
        for leg in legs:
            build, slot = leg.plan.build, leg.seq.slot
            if build is not None and build.is_last:
                self.model.zero_start(self.states, self.slots + slot, slot, self.transitions, slot)
                self.states.save(slot, self.arena.pages, build.state)
                self.transitions.save(slot, self.arena.pages, build.transition)

    def release(self, slot: int) -> None:
        """Give back the memory that the slot's segment took."""
        self.states.release(self.slots + slot)
        self.transitions.release(slot)

    def _table(self, pages: Sequence[int]) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self.arena.pages.device)
