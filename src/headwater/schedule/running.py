"""Running sequences: their next rows and legs, and which of them gives way when memory is short."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from headwater.errors import OutOfPages, PlanClosed
from headwater.plan import Plan
from headwater.request import Healing
from headwater.schedule.kinds.healing import HEALERS, Recomputation
from headwater.schedule.kinds.request import Request
from headwater.schedule.limits import EXTRA_SLOTS, Budget, Limits
from headwater.schedule.planner import DecodeReuse, Planner
from headwater.schedule.queue import Queue, Shares
from headwater.schedule.sequence import Phase, Purpose, Sequence
from headwater.schedule.step import DecodeRow, Leg, SlotIds

AnySequence = TypeVar("AnySequence", bound=Sequence)


class RunningSequences:
    """Sequences that share slots, pages and the step that is being planned."""

    def __init__(self, planner: Planner, limits: Limits, decode_reuse: DecodeReuse, healing: Healing) -> None:
        self.planner, self.cache, self.layout = planner, planner.cache, planner.layout
        self.limits, self.decode_reuse = limits, decode_reuse
        self.waiting = Queue()
        self.running: dict[int, Sequence] = {}  # in PREFILL and DECODE, by id
        self.shares = Shares()
        self.slots = SlotIds(limits.max_running + EXTRA_SLOTS)
        self.healer = HEALERS[healing](self.cache)
        self.failures: list[tuple[Sequence, Exception]] = []  # sequences that were given up; the engine reports them
        self.preemptions = 0
        self.computed: Counter[Purpose] = Counter()  # tokens
        self._legs: dict[int, Leg] = {}
        self._rows: dict[int, DecodeRow] = {}
        self._crowded = False  # after a preemption none is admitted until a sequence has left
        self._full = False  # memory was short for the next request: admission waits for an arrival or a departure

    @property
    def computing(self) -> int:
        """Number of running sequences, without what is healed."""
        return sum(not isinstance(seq, Recomputation) for seq in self.running.values())

    def _homes(self) -> list[str]:
        """Return the namespace of each running request."""
        return [seq.namespace for seq in self.running.values() if isinstance(seq, Request)]

    def _budget(self) -> Budget:
        """Return what the step has left for prefill; a step on which several requests wait is short."""
        used = sum(leg.plan.computed_tokens for leg in self._legs.values())
        saves = sum(len(leg.plan.saves) for leg in self._legs.values())
        alone, unit = len(self._homes()) + len(self.waiting) <= 1, self.layout.unit_tokens
        most = self.limits.tokens_per_step if alone else min(self.limits.tokens_per_step, self.limits.shared_step)
        tokens = max(unit, (most - len(self._rows)) // unit * unit)
        return Budget(max(0, tokens - used), self.limits.saves_per_step - saves)

    def _prefills(self) -> list[Sequence]:
        return [seq for seq in self.running.values() if seq.phase is Phase.PREFILL]

    def _count(self, seq: Sequence, purpose: Purpose, tokens: int) -> None:
        self.computed[purpose] += tokens
        self.shares.charge(seq.charged_to, tokens)

    # -- joining and leaving

    def _begin(self, seq: Sequence, plan: Plan | None) -> None:
        """Give a sequence a slot, and its first leg, if there is one, a place in the step."""
        seq.phase, seq.slot = Phase.PREFILL, self.slots.take()
        self.running[seq.id] = seq
        if plan is not None:
            seq.computed = plan.start
            self._put(seq, plan)

    def _put(self, seq: Sequence, plan: Plan) -> None:
        """Put a leg into the step."""
        seq.table = plan.table
        self._legs[seq.id] = Leg(seq, plan)

    def _let_go(self, seq: Sequence) -> None:
        """Take a running sequence out of the step, and give back its pages, slot and segments."""
        held = self._legs.pop(seq.id, None) or self._rows.pop(seq.id, None)
        seq.release_segments()
        if held is not None and held.plan is not None:
            with suppress(PlanClosed):  # its commit failed
                self.cache.abandon(held.plan)
        self.cache.release(seq.id)
        if seq.slot is not None:
            self.slots.give(seq.slot)
            seq.slot = None
        del self.running[seq.id]
        self._crowded = self._full = False

    def cancel(self, seq: Sequence) -> None:
        """Give back all that a sequence holds. Call it between steps."""
        if seq.phase is Phase.DONE:
            return
        if seq.id in self.running:
            self._let_go(seq)
        elif isinstance(seq, Request):
            self.waiting.remove(seq)
            seq.release_segments()
            self._full = False
        if isinstance(seq, Request):
            self.shares.leave(seq.namespace)
        seq.phase = Phase.DONE
        seq.ended()

    def give_up(self, seq: Sequence, error: Exception) -> None:
        """End a sequence that cannot be served, and note why in `failures`. Call it between steps, or in planning."""
        self.cancel(seq)
        self.failures.append((seq, error))

    def _alone(self, plan: Callable[[AnySequence], bool | None], seq: AnySequence) -> bool:
        """Plan for one sequence. An unforeseen error ends this sequence alone."""
        try:
            return bool(plan(seq))
        except Exception as error:
            self.give_up(seq, error)
            return True

    # -- the next token, or the next leg

    def _plan_row(self, seq: Sequence) -> None:
        while seq.phase is Phase.DECODE:
            try:
                self.planner.extend(seq, seq.computed + 1)
            except OutOfPages as error:
                self._make_room_for(seq, error)
                continue
            self._rows[seq.id] = DecodeRow(seq, self._raw_page(seq))
            return

    def _raw_page(self, seq: Sequence) -> Plan | None:
        """Return the plan that publishes a page which the next token completes, with decode-reuse raw.

        None, too, if there is no room for it, or a recording does not know the page's tokens.
        """
        end = seq.computed + 1
        if self.decode_reuse != "raw" or end % self.layout.unit_tokens or end > seq.known_tokens:
            return None
        try:
            return self.planner.raw_page(seq)
        except OutOfPages:
            return None

    def _plan_leg(self, seq: Sequence) -> None:
        while seq.phase is Phase.PREFILL:
            try:
                plan = seq.next_leg(self.planner, self._budget())
            except OutOfPages as error:
                if not (seq.compute_segments() or self._make_room_for(seq, error)):
                    return
                continue
            if plan is not None:
                self._put(seq, plan)
            return

    def decode_ahead(self, steps: int) -> bool:
        """Do to cache and sequences what `steps` steps of decode rows do; the caller appends their tokens.

        False: memory ran out. Some pages are reserved then, and the next step is to be planned.
        """
        try:
            for seq in self.running.values():
                self.planner.extend(seq, seq.computed + steps)
        except OutOfPages:
            return False
        for seq in self.running.values():
            seq.computed += steps
            self._count(seq, Purpose.DECODE, steps)
        return True

    # -- when memory runs out

    def _make_room_for(self, seq: Sequence, error: OutOfPages) -> bool:
        """Free memory for `seq`: first from healing, then from a build or an answer, then from the newest request.

        The newest may be `seq` itself. False: `seq` is to wait until older requests end.
        """
        if self._park_healing():
            self._full = True
            return True
        if self._drop_optional():
            return True
        victim = self.running[max(self.running)]
        assert isinstance(victim, Request), f"{victim} is dropped, not preempted"
        if victim is not seq:
            self._preempt(victim)
        elif len(self.running) == 1:
            self._start_over(victim, error)
        elif seq.phase is Phase.PREFILL:
            return False
        else:
            self._preempt(victim)
        return True

    def _drop_optional(self) -> bool:
        """Cancel a running sequence that is no request. False: there is none."""
        optional = next((seq for seq in self.running.values() if not isinstance(seq, Request)), None)
        if optional is not None:
            self.cancel(optional)
        return optional is not None

    def _start_over(self, seq: Request, error: OutOfPages) -> None:
        """Preempt the only running request: pages that others published meanwhile, it holds twice until it restarts.

        If that does not help, it is given up: check_fits should have refused it.
        """
        if seq.started_over:
            self.give_up(seq, error)
            return
        seq.started_over = True
        self._preempt(seq)
        self._crowded = False  # no other sequence is left to leave

    def _preempt(self, seq: Request) -> None:
        """Queue a running request again: it repeats its prefill, and replays its output through the decode kernels."""
        self._let_go(seq)
        seq.phase = Phase.WAITING
        seq.computed, seq.planned, seq.table = 0, 0, ()
        seq.preemptions += 1
        self.preemptions += 1
        self.waiting.push(seq)
        self._crowded = True

    def _park_healing(self) -> bool:
        """Stop healing at once; it resumes after its last committed leg. False: nothing was being healed."""
        seq = self.healer.park()
        if seq is not None:
            self.cancel(seq)
        return seq is not None
