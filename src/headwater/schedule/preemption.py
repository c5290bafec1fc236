"""Preemption: sequences that give way when memory is short for the next row or leg of another."""

from __future__ import annotations

from headwater.errors import OutOfPages
from headwater.schedule.kinds.healing import Healer
from headwater.schedule.kinds.request import Request
from headwater.schedule.planner import Planner
from headwater.schedule.sequence import Phase, Sequence
from headwater.schedule.workload import Workload


class Preemption:
    """Frees memory for a running sequence: healing gives way, then builds and answers, then the newest request."""

    def __init__(self, workload: Workload, planner: Planner, healer: Healer) -> None:
        self._workload, self._planner, self._healer = workload, planner, healer
        self.count = 0  # requests that were preempted, since the start

    def plan_leg(self, seq: Sequence) -> None:
        """Plan the next leg of a running prefill; other sequences give way if memory is short for it."""
        while seq.phase is Phase.PREFILL:
            try:
                plan = seq.next_leg(self._planner, self._workload.budget())
            except OutOfPages as error:
                if not (seq.compute_segments() or self.make_room_for(seq, error)):
                    return
                continue
            if plan is not None:
                self._workload.add_leg(seq, plan)
            return

    def make_room_for(self, seq: Sequence, error: OutOfPages) -> bool:
        """Free memory for `seq`. The newest request, which is preempted last, may be `seq` itself.

        False: `seq` is to wait until older requests or loads end.
        """
        running, tiers = self._workload.running, self._workload.tiers
        if self.park_healing():
            self._workload.gate.memory_ran_out()
            return True
        if tiers.make_room() or self.drop_optional():
            return True
        if tiers.give_up_loads():
            self._workload.gate.memory_ran_out()
            return False
        victim = running[max(running)]
        assert isinstance(victim, Request), f"{victim} is dropped, not preempted"
        if victim is not seq:
            self.preempt(victim)
        elif len(running) == 1:
            self.start_over(victim, error)
        elif seq.phase is Phase.PREFILL:
            return False
        else:
            self.preempt(victim)
        return True

    def drop_optional(self) -> bool:
        """Cancel a running sequence that is not a request. False: there is none."""
        running = self._workload.running.values()
        optional = next((seq for seq in running if not isinstance(seq, Request)), None)
        if optional is not None:
            self._workload.cancel(optional)
        return optional is not None

    def start_over(self, seq: Request, error: OutOfPages) -> None:
        """Preempt the only running request: it gives back its copies of pages that other requests published meanwhile.

        If it has started over before, it is given up: `check_fits` should have refused it.
        """
        if seq.started_over and not self._workload.tiers.busy:
            self._workload.give_up(seq, error)
            return
        seq.started_over = True
        self.preempt(seq)
        self._workload.gate.is_crowded = False  # no other sequence is left to leave

    def preempt(self, seq: Request) -> None:
        """Queue a running request again: it repeats its prefill, and replays its output through the decode kernels."""
        self._workload.release(seq)
        seq.phase = Phase.WAITING
        seq.computed, seq.accepted, seq.planned, seq.table = 0, 0, 0, ()
        seq.preemptions += 1
        self.count += 1
        self._workload.waiting.push(seq)
        self._workload.tiers.arrived(seq)
        self._workload.gate.is_crowded = True

    def park_healing(self) -> bool:
        """Stop healing now; it resumes after its last committed leg. False: nothing was being healed."""
        seq = self._healer.park()
        if seq is not None:
            self._workload.cancel(seq)
        return seq is not None
