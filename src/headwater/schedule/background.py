"""Background work, which no client waits for: segments built ahead, prefills of finished answers, healing."""

from __future__ import annotations

from collections import deque
from functools import partial

from headwater.cache.segments.store import SegmentKey
from headwater.errors import OutOfPages
from headwater.schedule.kinds.answer import Answers, FinishedAnswer
from headwater.schedule.kinds.healing import Healer, Recomputation
from headwater.schedule.kinds.segment import Composing, SegmentBuild
from headwater.schedule.limits import MAX_ANSWER_PREFILLS, MAX_BUILD_TOKENS, MAX_BUILDS, Budget
from headwater.schedule.planner import Planner
from headwater.schedule.preemption import Preemption
from headwater.schedule.segment_loads import Awaited
from headwater.schedule.sequence import Phase
from headwater.schedule.workload import Workload


class Background:
    """Plans sequences that are not requests, in the slots and tokens that requests leave."""

    def __init__(
        self, workload: Workload, planner: Planner, preemption: Preemption, composer: Composing, healer: Healer
    ) -> None:
        self._workload, self._planner, self._preemption = workload, planner, preemption
        self._composer, self.healer = composer, healer
        self.answers = Answers()
        self.wanted: deque[SegmentKey] = deque()  # segments to build before a request has them, as slots are free
        self.awaited = Awaited()  # those of them that tiers are asked for

    def use_rest(self) -> None:
        """Begin prefills of finished answers, then heal, in the rest of the step's budget."""
        self._prefill_answers()
        self._heal()

    # -- segments

    def build_wanted(self) -> None:
        """Begin to build segments that are wanted, unless tiers may have them."""
        if not self.wanted and not self.awaited.outcomes:
            return
        self.awaited.forget_all_but(set(self.wanted))
        missing = [key for key in self.wanted if self._composer.find(key) is None]
        held = self._workload.tiers.hold_segments(self.awaited, missing)
        for key in [key for key in self.wanted if key not in held]:
            if not self.may_build() or not self._may_build_with_others(key):
                return
            self.wanted.remove(key)
            self.awaited.forget(key)
            if self._composer.find(key) is None:
                self.build(key)

    def may_build(self) -> bool:
        """Return whether one more segment may be built."""
        return len(self._builds()) < MAX_BUILDS and len(self._workload.slots) > 0

    def _may_build_with_others(self, key: SegmentKey) -> bool:
        """Return whether a build may begin now: long ones run one by one, so that each ends early (HYPIC, 4.4)."""
        tokens = sum(seq.n_prompt for seq in self._builds())
        return not tokens or tokens + key.tokens <= MAX_BUILD_TOKENS

    def _builds(self) -> list[SegmentBuild]:
        return [seq for seq in self._workload.running.values() if isinstance(seq, SegmentBuild)]

    def build(self, key: SegmentKey) -> bool:
        """Begin to build a segment. False: there is no memory for it."""
        seq = self._composer.build(self._workload.new_id(), key)
        if seq is None and self._workload.tiers.make_room():
            seq = self._composer.build(self._workload.new_id(), key)
        if seq is None:
            return False
        self._workload.begin(seq, None)
        self._workload.guarded(self._preemption.plan_leg, seq)
        return True

    # -- finished answers

    def _prefill_answers(self) -> None:
        """Begin prefills of finished answers."""
        workload = self._workload
        while self.answers and len(workload.running) - len(workload.homes()) < MAX_ANSWER_PREFILLS:
            if not workload.guarded(self._begin_answer, self.answers.popleft()):
                return

    def _begin_answer(self, seq: FinishedAnswer) -> bool:
        """Begin an answer's prefill, or drop it if it is cached or memory is short. False: the budget is used up."""
        if self._planner.match(seq).resumed_tokens == seq.n_prompt:
            seq.phase = Phase.DONE
            return True
        try:
            plan = self._planner.first_leg(seq, self._workload.budget(), ())
        except OutOfPages:
            seq.phase = Phase.DONE
            return True
        if plan is None:
            self.answers.appendleft(seq)
            return False
        self._workload.begin(seq, plan)
        return True

    # -- healing

    def make_way(self) -> None:
        """Park what is being healed, if healing may not run now."""
        if self.healer.seq is not None and not self._may_heal():
            self._preemption.park_healing()

    def _may_heal(self) -> bool:
        workload = self._workload
        if workload.gate.is_full or workload.waiting or self.answers or self.wanted:
            return False
        return self.healer.may_run(workload.computing, len(workload.homes()))

    def _heal(self) -> None:
        """Plan one leg of the prefix that is being healed, or of the next one, in the rest of the budget."""
        workload, unit = self._workload, self._workload.layout.unit_tokens
        budget = Budget(min(workload.budget().tokens, max(workload.limits.shared_step, unit)), 1)
        while budget.tokens >= unit and len(workload.slots) and self._may_heal():
            seq = self.healer.current(workload.new_id)
            if seq is None or workload.guarded(partial(self._plan_healing, budget), seq):
                return

    def _plan_healing(self, budget: Budget, seq: Recomputation) -> bool:
        """Plan one leg. False: none of this prefix is computed now."""
        workload = self._workload
        try:
            plan = seq.next_leg(self._planner, budget)
        except OutOfPages:
            plan = None
            if workload.computing and self._preemption.park_healing():
                workload.gate.memory_ran_out()  # for running sequences: healing waits until one has left
        if plan is None:
            workload.cancel(seq)
        elif seq.slot is None:
            workload.begin(seq, plan)
        else:
            workload.add_leg(seq, plan)
        return plan is not None
