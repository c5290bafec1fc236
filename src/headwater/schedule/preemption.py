"""Preemption: which running sequence gives way when memory is short for the next row or leg of another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from headwater.draft.drafter import MOST_DRAFTS
from headwater.draft.mtp import MTP_DRAFTS
from headwater.errors import OutOfPages
from headwater.plan import Plan
from headwater.schedule.kinds.request import Request
from headwater.schedule.limits import REPLAYED
from headwater.schedule.running import RunningSequences
from headwater.schedule.sequence import Phase, Purpose, Sequence
from headwater.schedule.speculation import Speculator
from headwater.schedule.step import Decode


class Preemption(RunningSequences):
    """Plans rows and legs of running sequences; optional work, then the newest request, gives way to older ones."""

    # -- the next tokens, or the next leg

    def _plan_decode(self, seq: Sequence) -> None:
        """Plan the next row of a decoding sequence: others give way if memory is short for it."""
        while seq.phase is Phase.DECODE:
            try:
                self.planner.extend(seq, seq.computed + 1)
            except OutOfPages as error:
                if not self._make_room_for(seq, error):
                    return
                continue
            self._decodes[seq.id] = Decode(seq, accepted=seq.accepted)
            return

    def _plan_replay(self, seq: Sequence) -> None:
        """Add the next known rows of an answer that is replayed, and the page that they complete, if it is published.

        A step replays at most REPLAYED rows. No sequence gives way to them: they can be computed later.
        """
        decode = self._decodes.get(seq.id)
        if decode is None or (seq.uncomputed == 1 and self.decode_reuse != "raw"):
            return
        count = min(seq.uncomputed, 1 + self._rows_left()) if seq.uncomputed > 1 else 1
        if self.decode_reuse == "raw":
            count = min(count, self.layout.unit_tokens - seq.computed % self.layout.unit_tokens)
        count = self._with_pages(seq, count)
        self._decodes[seq.id] = replace(decode, count=count, plan=self._raw_page(seq, seq.computed + count))

    def _plan_drafts(self) -> None:
        """Add drafts of the requests whose next token is unknown, as many as pay. No sequence gives way to them."""
        if not self.speculation or self.decode_reuse == "raw":
            return
        rows = sum(one.rows for one in self._decodes.values())
        is_measured = bool(rows) and self.speculation.is_to_measure(rows)
        asked = [] if is_measured else list(self._ask_drafters())
        self.speculation.is_plain = not (asked or any(one.seq.accepted for one in self._decodes.values()))
        if self.speculation.head is not None and asked:
            self._ask_head(asked, rows)
        drafts = [(speculator, len(speculator.draft.tokens)) for _, speculator, _ in asked]
        counts = self.speculation.worth(drafts, rows, self._rows_left())
        for (one, speculator, _), n in zip(asked, counts, strict=True):
            speculator.note_verified(n)
            if n:
                self.speculation.asking.earn(speculator.asking)
            n = min(n, self._rows_left())
            n = self._with_pages(one.seq, one.count + n) - one.count
            self._decodes[one.seq.id] = replace(one, drafts=tuple(speculator.draft.tokens[:n]))

    def _ask_drafters(self) -> Iterator[tuple[Decode, Speculator, int]]:
        """Yield the requests that were asked for drafts of their next tokens, and how many an answer has room for."""
        for one in self._decodes.values():
            seq = one.seq
            if not (one.wants_token and isinstance(seq, Request)):
                continue
            if seq.speculator is None:
                seq.speculator = self.speculation.speculator(seq.generation, seq.grammar)
            left = seq.generation.params.max_tokens - seq.n_output - 1
            speculator, may_ask = seq.speculator, self.speculation.asking.is_left
            if speculator is not None and left > 0 and not speculator.is_paused(may_ask):
                self.speculation.propose(speculator, seq.tokens, min(MOST_DRAFTS, left))
                yield one, speculator, left

    def _ask_head(self, asked: list[tuple[Decode, Speculator, int]], rows: int) -> None:
        """Let the model's head draft for requests, as far as there are pages; not after rows that are replayed."""
        wanted = []
        for one, speculator, left in asked:
            if speculator.uses_head and one.count == 1:
                most = min(left, MTP_DRAFTS, speculator.most, self._rows_left())
                wanted.append((one.seq, speculator, self._with_pages(one.seq, 1 + most) - 1))
        if wanted:
            self.speculation.ask_head(wanted, rows)

    def _rows_left(self) -> int:
        """Return how many more rows a step takes beside those that each sequence needs."""
        return max(0, min(REPLAYED, self.limits.tokens_per_step) - sum(one.rows for one in self._decodes.values()))

    def _with_pages(self, seq: Sequence, rows: int) -> int:
        """Reserve pages for the next rows of a sequence, as far as any are free; return how many have pages."""
        try:
            self.planner.extend(seq, seq.computed + rows)
        except OutOfPages:
            return min(rows, len(seq.table) * self.layout.page_size - seq.computed)
        return rows

    def _raw_page(self, seq: Sequence, end: int) -> Plan | None:
        """Return the plan that publishes a page which the token before `end` completes, with decode-reuse raw.

        None, too, if there is no room for it, or a recording does not know the page's tokens, or the request started
        over for want of memory: behind pages that it published before, it would hold those twice.
        """
        if self.decode_reuse != "raw" or end % self.layout.unit_tokens or end > seq.known_tokens:
            return None
        if isinstance(seq, Request) and seq.started_over:
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

    def extend_ahead(self, steps: int) -> bool:
        """Reserve the pages that `steps` steps of decode rows write.

        False: memory ran out. Some pages are reserved then, and the next step is to be planned.
        """
        try:
            for seq in self.running.values():
                self.planner.extend(seq, seq.computed + steps)
        except OutOfPages:
            return False
        return True

    def decode_ahead(self, steps: int) -> None:
        """Do to sequences what `steps` steps of decode rows do, whose pages are reserved; the caller appends tokens."""
        for seq in self.running.values():
            seq.computed += steps
            self._count(seq, Purpose.DECODE, steps)

    # -- when memory runs out

    def _make_room_for(self, seq: Sequence, error: OutOfPages) -> bool:
        """Free memory for `seq`: from healing, a build or an answer, then loads, then from the newest request.

        The newest may be `seq` itself. False: `seq` is to wait until older requests or loads end.
        """
        if self._park_healing():
            self._full = True
            return True
        if self.tiers.make_room() or self._drop_optional():
            return True
        if self.tiers.give_up_loads():
            self._full = True
            return False
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
        if seq.started_over and not self.tiers.busy:
            self.give_up(seq, error)
            return
        seq.started_over = True
        self._preempt(seq)
        self._crowded = False  # no other sequence is left to leave

    def _preempt(self, seq: Request) -> None:
        """Queue a running request again: it repeats its prefill, and replays its output through the decode kernels."""
        self._let_go(seq)
        seq.phase = Phase.WAITING
        seq.computed, seq.accepted, seq.planned, seq.table = 0, 0, 0, ()
        seq.preemptions += 1
        self.preemptions += 1
        self.waiting.push(seq)
        self.tiers.arrived(seq)
        self._crowded = True

    def _park_healing(self) -> bool:
        """Stop healing at once; it resumes after its last committed leg. False: nothing was being healed."""
        seq = self.healer.park()
        if seq is not None:
            self.cancel(seq)
        return seq is not None
