"""Admission: waiting requests that begin in the next step, in order of their tenants' shares."""

from __future__ import annotations

from headwater.errors import OutOfPages
from headwater.schedule.background import Background
from headwater.schedule.kinds.request import Request
from headwater.schedule.kinds.segment import Composing
from headwater.schedule.limits import MAX_BRANCHING, MAX_CANDIDATES, MAX_PREFETCHED, RESERVED_SLOTS
from headwater.schedule.planner import Planner
from headwater.schedule.preemption import Preemption
from headwater.schedule.sequence import Phase
from headwater.schedule.workload import Workload


class Admission:
    """Begins waiting requests while there are slots, tokens and memory."""

    def __init__(
        self, workload: Workload, planner: Planner, preemption: Preemption, composer: Composing, background: Background
    ) -> None:
        self._workload, self._planner, self._preemption = workload, planner, preemption
        self._composer, self._background = composer, background

    def admit(self) -> None:
        """Plan the first legs of waiting requests. One slot is reserved for a tenant that has no running request."""
        workload = self._workload
        if workload.gate.is_full:
            return
        homes = workload.homes()
        is_full = len(homes) >= workload.limits.max_running
        if is_full:
            first = workload.waiting[:MAX_PREFETCHED]
            workload.tiers.prefetch([seq for seq in first if not seq.scores_prompt])
        if self._is_used_up(homes):
            return
        for seq in workload.shares.order(workload.waiting.fronts(MAX_CANDIDATES, homes if is_full else ())):
            homes = workload.homes()
            if self._is_used_up(homes):
                return
            if len(homes) >= workload.limits.max_running and seq.tenant in homes:
                continue
            if not workload.guarded(self._start_or_follow, seq):
                return

    def _is_used_up(self, homes: list[str]) -> bool:
        """Return whether all slots for requests are used, or the step has no tokens left."""
        is_used = len(homes) >= self._workload.limits.max_running + RESERVED_SLOTS
        return is_used or self._workload.budget().tokens <= 0

    def _start_or_follow(self, seq: Request) -> bool:
        """Plan the first leg of a request, unless it waits for a load or a build, or a running one computes its prefix.

        False: there is no memory now.
        """
        workload = self._workload
        if not seq.scores_prompt and workload.tiers.holds_back(seq):
            return True
        if seq.composes and self._waits_for_segments(seq):
            seq.release_segments()
            return True
        if self._planner.leader_of(seq, workload.in_phase(Phase.PREFILL)) is not None:
            seq.waited = True
            seq.release_segments()
            return True
        self._background.answers.drop_covered_by(seq)
        started = self._start(seq)
        if seq.phase is Phase.WAITING:
            seq.release_segments()  # waiting requests hold none: others need the memory
        return started

    def _waits_for_segments(self, seq: Request) -> bool:
        """Pin the segments of a request, and load or build missing ones; return whether it waits for any."""
        missing, waits = self._composer.prepare(seq)
        absent = tuple(dict.fromkeys((*missing, *self._composer.unused(seq))))  # a segment may stand there twice
        held = self._workload.tiers.hold_segments(seq.awaited, absent)
        for key in absent:
            if key not in held and self._background.may_build():
                seq.tried.add(key)
                if self._background.build(key):
                    seq.built.add(key)
        return bool(missing or waits or held)

    def _start(self, seq: Request) -> bool:
        """Plan the first leg of a request; optional work gives way to it. False: there is no memory, or no budget."""
        workload = self._workload
        others = [one for one in workload.waiting[: MAX_BRANCHING + 1] if one is not seq]
        while True:
            try:
                plan = self._planner.first_leg(seq, workload.budget(), others)
            except OutOfPages as error:
                if self._preemption.drop_optional():
                    continue
                if seq.composition is not None:
                    seq.start_without_segments()
                    continue
                if workload.tiers.make_room():
                    continue
                if workload.running or workload.tiers.busy:
                    workload.gate.memory_ran_out()
                else:
                    workload.give_up(seq, error)
                return False
            if plan is None:
                return False
            workload.waiting.remove(seq)
            workload.begin(seq, plan)
            workload.tiers.forget(seq.id)
            resumed_at = plan.start if plan.kept is None else plan.kept.start
            if resumed_at:
                workload.tiers.copies.resumed(seq.namespace, seq.key, resumed_at)
            return True
