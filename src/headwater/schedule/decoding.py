"""Decoding: rows of the next step for sequences that decode, and the drafts among them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from headwater.draft.drafter import MOST_DRAFTS, MTP_DRAFTS
from headwater.errors import OutOfPages
from headwater.plan import Plan
from headwater.schedule.kinds.request import Request
from headwater.schedule.limits import MAX_REPLAYED_ROWS
from headwater.schedule.planner import DecodeReuse, Planner
from headwater.schedule.preemption import Preemption
from headwater.schedule.sequence import Phase, Sequence
from headwater.schedule.speculation import Speculation, Speculator
from headwater.schedule.step import Decode
from headwater.schedule.workload import Workload


class Decoding:
    """Plans rows: one of each decoding sequence, then more of answers that are replayed, then drafts that pay."""

    def __init__(
        self,
        workload: Workload,
        planner: Planner,
        preemption: Preemption,
        decode_reuse: DecodeReuse,
        speculation: Speculation,
    ) -> None:
        self._workload, self._planner, self._preemption = workload, planner, preemption
        self._layout, self._decode_reuse, self.speculation = workload.layout, decode_reuse, speculation

    def plan(self) -> None:
        """Plan the rows of the next step. Requests that came first get memory first."""
        decoding = sorted(self._workload.in_phase(Phase.DECODE), key=lambda seq: seq.id)
        for plan in (self._plan_row, self._plan_replay):
            for seq in decoding:
                self._workload.guarded(plan, seq)
        if self.speculation and self._decode_reuse != "raw":
            self._plan_drafts()

    def _plan_row(self, seq: Sequence) -> None:
        """Plan the next row of a sequence; other sequences give way if memory is short for it."""
        while seq.phase is Phase.DECODE and not self._has_pages(seq, seq.computed + 1):
            try:
                self._planner.extend(seq, seq.computed + 1)
            except OutOfPages as error:
                if not self._preemption.make_room_for(seq, error):
                    return
        if seq.phase is Phase.DECODE:
            self._workload.decodes[seq.id] = Decode(seq, accepted=seq.accepted)

    def _plan_replay(self, seq: Sequence) -> None:
        """Add the next known rows of an answer that is replayed, and the page that they complete, if it is published.

        A step replays at most MAX_REPLAYED_ROWS rows. No sequence gives way to them: they can be computed later.
        """
        decode = self._workload.decodes.get(seq.id)
        if decode is None or (seq.uncomputed == 1 and self._decode_reuse != "raw"):
            return
        count = min(seq.uncomputed, 1 + self._rows_left()) if seq.uncomputed > 1 else 1
        if self._decode_reuse == "raw":
            count = min(count, self._layout.unit_tokens - seq.computed % self._layout.unit_tokens)
        count = self._with_pages(seq, count)
        plan = self._raw_page(seq, seq.computed + count)
        self._workload.decodes[seq.id] = replace(decode, count=count, plan=plan)

    def _raw_page(self, seq: Sequence, end: int) -> Plan | None:
        """Return the plan that publishes the page which the token before `end` completes, with decode-reuse raw.

        None also if there is no memory for it, if a recording does not have the page's tokens, or if the request
        started over for want of memory: after pages that it published before, it would hold those twice.
        """
        if self._decode_reuse != "raw" or end % self._layout.unit_tokens or end > seq.known_tokens:
            return None
        if isinstance(seq, Request) and seq.started_over:
            return None
        try:
            return self._planner.raw_page(seq, end)
        except OutOfPages:
            return None

    # -- drafts

    def _plan_drafts(self) -> None:
        """Add drafts of requests whose next token is unknown, as many as pay. No sequence gives way to them."""
        speculation, decodes = self.speculation, self._workload.decodes
        rows = sum(one.rows for one in decodes.values())
        is_measured = bool(rows) and speculation.is_to_measure(rows)
        asked = [] if is_measured else list(self._ask_drafters())
        speculation.is_plain = not (asked or any(one.seq.accepted for one in decodes.values()))
        if speculation.head is not None and asked:
            self._ask_head(asked, rows)
        drafts = [(speculator, len(speculator.draft.tokens)) for _, speculator, _ in asked]
        counts = speculation.worth(drafts, rows, self._rows_left())
        for (one, speculator, _), n in zip(asked, counts, strict=True):
            speculator.note_verified(n)
            if n:
                speculation.asking.earn(speculator.asking)
            n = min(n, self._rows_left())
            n = self._with_pages(one.seq, one.count + n) - one.count
            decodes[one.seq.id] = replace(one, drafts=tuple(speculator.draft.tokens[:n]))

    def _ask_drafters(self) -> Iterator[tuple[Decode, Speculator, int]]:
        """Yield each request that was asked for drafts, and the number of tokens that its answer may still have."""
        for one in self._workload.decodes.values():
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
        """Let the model's head draft for requests that have pages for its drafts, but not after replayed rows."""
        wanted = []
        for one, speculator, left in asked:
            if speculator.uses_head and one.count == 1:
                most = min(left, MTP_DRAFTS, speculator.most, self._rows_left())
                wanted.append((one.seq, speculator, self._with_pages(one.seq, 1 + most) - 1))
        if wanted:
            self.speculation.ask_head(wanted, rows)

    # -- rows

    def _rows_left(self) -> int:
        """Return the number of rows that a step may have beyond the one that each sequence needs."""
        rows = sum(one.rows for one in self._workload.decodes.values())
        return max(0, min(MAX_REPLAYED_ROWS, self._workload.limits.tokens_per_step) - rows)

    def _has_pages(self, seq: Sequence, end: int) -> bool:
        """Return whether a sequence has pages for the tokens before `end`."""
        return not self._layout.kv_pages_per_unit or len(seq.table) * self._layout.page_size >= end

    def _with_pages(self, seq: Sequence, rows: int) -> int:
        """Reserve pages for the next rows of a sequence while any are free; return how many rows have pages."""
        if self._has_pages(seq, seq.computed + rows):
            return rows
        try:
            self._planner.extend(seq, seq.computed + rows)
        except OutOfPages:
            return min(rows, len(seq.table) * self._layout.page_size - seq.computed)
        return rows
