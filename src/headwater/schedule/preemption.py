"""Preemption: which running sequence gives way when memory is short for the next row or leg of another."""

from __future__ import annotations

from headwater.errors import OutOfPages
from headwater.plan import Plan
from headwater.schedule.kinds.request import Request
from headwater.schedule.limits import REPLAYED
from headwater.schedule.running import RunningSequences
from headwater.schedule.sequence import Phase, Purpose, Sequence
from headwater.schedule.step import Decode


class Preemption(RunningSequences):
    """Plans rows and legs of running sequences; optional work, then the newest request, gives way to older ones."""

    # -- the next tokens, or the next leg

    def _plan_decode(self, seq: Sequence) -> None:
        count = min(seq.left, REPLAYED)
        if self.decode_reuse == "raw":
            count = min(count, self.layout.unit_tokens - seq.computed % self.layout.unit_tokens)
        while seq.phase is Phase.DECODE:
            try:
                self.planner.extend(seq, seq.computed + count)
            except OutOfPages as error:
                if count == 1:
                    self._make_room_for(seq, error)
                count = 1  # nobody has to leave for tokens that can come later
                continue
            self._decodes[seq.id] = Decode(seq, count, self._raw_page(seq, seq.computed + count))
            return

    def _raw_page(self, seq: Sequence, end: int) -> Plan | None:
        """Return the plan that publishes a page which the token before `end` completes, with decode-reuse raw.

        None, too, if there is no room for it, or a recording does not know the page's tokens.
        """
        if self.decode_reuse != "raw" or end % self.layout.unit_tokens or end > seq.known_tokens:
            return None
        try:
            return self.planner.raw_page(seq, end)
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
