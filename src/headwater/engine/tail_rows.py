"""Tails in a step: legs that continue one in mid-page, and legs that write some, through rows of the tail memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from headwater.engine.mtp import MtpRunner
from headwater.memory.arena import Arena
from headwater.memory.slots import StateMemory
from headwater.memory.tails import TailMemory
from headwater.mixers.slices import Keep, Slice
from headwater.models.hybrid import HybridModel
from headwater.plan import Plan, Tail
from headwater.schedule.sequence import Phase
from headwater.schedule.step import Leg

WARM_ROWS = 2  # of the tail memory, which keep their memory between steps: touching fresh memory costs 0.3 ms a MB


def has_rows(leg: Leg) -> bool:
    """Return whether a leg computes tokens; one that only continues a tail up to its end does not."""
    return leg.plan.start < leg.plan.end


class TailRunner:
    """Rows of the tail memory belong to the legs of one step."""

    def __init__(self, model: HybridModel, arena: Arena, states: StateMemory, mtp: MtpRunner | None) -> None:
        self.model, self.arena, self.states, self.mtp = model, arena, states, mtp
        self.memory = TailMemory(model.spec, 0, arena.pages.device)
        self._kept: dict[int, int] = {}  # by slot: the row of the tail that its leg continues
        self._written: dict[int, list[int]] = {}  # by slot: rows of the tails that its leg writes
        self._late: list[tuple[Leg, Slice]] = []  # legs without rows, whose first tokens do not wait for their states
        self._no_pages = torch.empty(0, dtype=torch.int64, device=arena.pages.device)
        self.of_step: TailMemory | None = None  # the tail memory, if a leg of the step uses it

    def before(self, legs: Sequence[Leg]) -> None:
        """Assign rows to the legs of a step; restore the tails that they continue, and copy their KV."""
        self._kept, self._written = {}, {}
        row = 0
        for leg in legs:
            if leg.plan.kept is not None:
                self._kept[leg.slot] = row
                row += 1
            if leg.plan.tails:
                n = len(leg.plan.tails) if has_rows(leg) else 0  # else they are parts of the tail that it continues
                self._written[leg.slot] = list(range(row, row + n)) or [self._kept[leg.slot]] * len(leg.plan.tails)
                row += n
        self.of_step = self.memory if self._kept or self._written else None
        self.memory.provide(row)
        for leg in legs:
            if leg.plan.kept is not None:
                self._restore(leg, leg.plan, leg.plan.kept)

    def _restore(self, leg: Leg, plan: Plan, kept: Tail) -> None:
        row, n = self._kept[leg.slot], plan.start - kept.start
        if kept.rows:
            self.memory.restore(row, self.arena.pages, kept.rows, n)
        at = kept.start // self.arena.page_size
        if n and kept.kv and plan.write_from <= at:  # else the page is cached, and has these bits
            self.arena.pages[plan.table[at]] = self.arena.pages[kept.kv[0]]
            if self.mtp is not None:
                self.mtp.copy_entries(kept.kv[0], plan.table[at])
        if self.mtp is not None and kept.has_hidden and kept.end == plan.start:
            self.mtp.continue_after(leg, self.memory.hidden_RC[row])

    def applied_to(self, slices: Sequence[Slice], leg: Leg) -> list[Slice]:
        """Return the slices of a leg, the first of which continues its tail, with the tails that they write."""
        if leg.slot not in self._kept and leg.slot not in self._written:
            return list(slices)
        return [self._with_tails(s, leg, is_first=i == 0) for i, s in enumerate(slices)]

    def _with_tails(self, s: Slice, leg: Leg, is_first: bool) -> Slice:
        """Return a slice with the tail that it continues, if it is the leg's first, and those that lie in it."""
        kept, row = leg.plan.kept, self._kept.get(leg.slot, 0)
        n_kept = leg.plan.start - kept.start if kept is not None and is_first else 0
        first = s.start - n_kept  # a tail without tokens has the hidden row of the token before it
        keeps = (
            Keep(tail.start, tail.end, to, tail.has_hidden)
            for tail, to in zip(leg.plan.tails, self._written.get(leg.slot, ()), strict=True)
            if first <= tail.start and first < tail.end <= s.end
        )
        return replace(s, kept=n_kept, tail=row, keeps=tuple(keeps))

    def after(self, legs: Sequence[Leg]) -> None:
        """Write the tails of a step's legs to their pages, with their KV; note the legs without rows for `end`."""
        for leg in legs:
            plan = leg.plan
            if plan.kept is not None and not has_rows(leg):
                kept, row = plan.start - plan.kept.start, self._kept[leg.slot]
                self._late.append((leg, Slice(0, 0, plan.start, leg.slot, self._no_pages, 0, kept=kept, tail=row)))
            for tail, row in zip(plan.tails, self._written.get(leg.slot, ()), strict=True):
                self.memory.save(row, self.arena.pages, tail.rows, tail.end - tail.start)
                if tail.kv and tail.start < tail.end:
                    own = plan.table[tail.start // self.arena.page_size]
                    self.arena.pages[tail.kv[0]] = self.arena.pages[own]
                    if self.mtp is not None:
                        self.mtp.copy_later(leg, tail)

    def logits(self, legs: Sequence[Leg], logits_RV: torch.Tensor) -> torch.Tensor:
        """Add the rows of legs without rows, from the hidden rows of their tails, to the logits of a step."""
        wanting = [has_rows(leg) for leg in legs if leg.wants_token] if self._kept else []
        if all(wanting):
            return logits_RV
        rows = [self._kept[leg.slot] for leg in legs if leg.wants_token and not has_rows(leg)]
        of_kept = iter(self.model.logits(self.memory.hidden_RC[rows]).split(1))
        of_legs = iter(logits_RV[: sum(wanting)].split(1))
        ordered = [next(of_legs if computed else of_kept) for computed in wanting]
        rest_RV = logits_RV[sum(wanting) :]
        return torch.cat([*ordered, rest_RV] if len(rest_RV) else ordered)

    def end(self) -> None:
        """Advance the states of legs without rows, unless their sequences have ended; give back the step's memory."""
        self.of_step = None
        late, self._kept, self._written, self._late = self._late, {}, {}, []
        slices = [one for leg, one in late if leg.seq.phase is not Phase.DONE]
        if slices:
            self.model.advance(slices, self.states, self.memory)
        self.memory.release(WARM_ROWS)
