"""MTP head of a model: it keeps an entry of every token that steps compute, and drafts between steps.

Entries stand in an arena of the head's own, by the page ids of the model's arena; only those of true tokens are kept,
and made of the model's hidden states. Each page has the hidden state of its last token, from which a
resumed sequence continues. Entries that are missing, as of composed segments, cost drafts that are wrong, and no bit.
The last leg of a prompt has its entries written once the first token is sent, which does not wait for them.

N rows of a step, M tokens of a sequence, C model width, P pages, S sequences.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from headwater.draft.drafter import Draft, draft_of
from headwater.engine.draft_passes import PassSeconds, best_of
from headwater.memory.arena import Arena, LazyBytes
from headwater.mixers.batch import StepBatch
from headwater.mixers.slices import Slice
from headwater.models.decode_graphs import filled_up_rows
from headwater.models.mtp import MtpGraphs, MtpModule
from headwater.plan import Tail
from headwater.schedule.kinds.request import Request
from headwater.schedule.limits import MAX_REPLAYED_ROWS
from headwater.schedule.sequence import Phase
from headwater.schedule.sequence import Sequence as AnySequence
from headwater.schedule.step import Decode, Leg, Step

MAX_WAITING_ENTRIES = 32  # of a sequence, until it drafts
ROWS_PER_SLOT = MAX_WAITING_ENTRIES + MAX_REPLAYED_ROWS
LATEST = 10.0  # seconds: entries that are late are written within a step

T = TypeVar("T")

log = logging.getLogger("headwater.engine")


@dataclass(slots=True)
class Waiting:
    """Entries of a slot's sequence that are not written yet, and for which the hidden states are known."""

    sequence: int = 0  # its id; 0: none
    first: int = 0  # position of the first of them
    known: int = 0  # how many: those of drafts are among them

    def of(self, seq: AnySequence) -> int:
        """Return how many entries wait up to the sequence's last token; 0 if a hidden state for one is missing."""
        n = seq.computed + 1 - self.first
        return n if self.sequence == seq.id and 0 < n <= self.known else 0


@dataclass(frozen=True)
class Entries:
    """Entries of a sequence's successive tokens, and what they are made of."""

    first: int  # position
    tokens: Tensor  # [M]
    hidden_MC: Tensor  # before each token
    table_P: Tensor
    write_from: int = 0  # earlier pages of the table have theirs
    completes: Sequence[int] = ()  # pages that have all entries with these


def drafts(seq: AnySequence) -> bool:
    """Return whether the head may draft for a sequence."""
    return isinstance(seq, Request) and seq.speculator is not None and seq.speculator.uses_head


def filled_up(rows: list[T]) -> list[T]:
    """Return rows, the last one repeated up to a power of two: fewer numbers of rows are recorded."""
    return rows + rows[-1:] * ((1 << max(0, len(rows) - 1).bit_length()) - len(rows))


class MtpRunner:
    """Keeps the entries of a head, and computes its drafts. Called only on the engine's thread."""

    def __init__(self, module: MtpModule, n_pages: int, slots: int, device: torch.device | str = "cpu") -> None:
        spec = module.spec
        self.module, self.page_size, self.device = module, spec.page_size, device
        self.arena = Arena(spec, n_pages, device)
        self.graphs = MtpGraphs(module, self.arena)
        dtype: torch.dtype = getattr(torch, spec.dtype_name)
        memory = LazyBytes(n_pages * spec.hidden_size * spec.element_bytes, device).tensor
        self.last_PC = memory.view(dtype).view(n_pages, spec.hidden_size)  # the hidden state of each page's last token
        self.complete_P = np.zeros(n_pages, np.bool_)  # pages of the cache, all entries of whose tokens are written
        self._complete_from: dict[int, int] = {}  # by slot: the first page of its last leg that has all entries
        self._copies: list[tuple[Leg, Tail]] = []  # tails to whose pages entries are copied by `write`
        self.written = threading.Event()  # no entries are late
        self.written.set()
        self._late: list[tuple[AnySequence, Entries]] = []  # to be written by `write`
        self._seconds = PassSeconds()
        self._waiting = [Waiting() for _ in range(slots)]
        self._hidden_WC = self.hidden(
            slots * ROWS_PER_SLOT
        )  # before the entries that wait, ROWS_PER_SLOT rows of each slot

    @property
    def pass_seconds(self) -> float:
        return self._seconds.mean

    def hidden(self, rows: int) -> Tensor:
        """Return memory for the hidden states of a step's rows."""
        return torch.empty(rows, self.module.spec.hidden_size, dtype=self.last_PC.dtype, device=self.device)

    # -- after a step ------------------------------------------------------------

    def take(self, step: Step, batch: StepBatch, hidden_NC: Tensor) -> None:
        """Keep the entries of a step's tokens; `hidden_NC` are the model's hidden states of its rows.

        Of legs after which a token is sent, `write` writes them.
        """
        legs = [leg for leg in step.legs if leg.plan.build is None]  # a segment's pages are not a prefix of a sequence
        of_legs = [(leg, entries) for leg in legs for entries in self._of_leg(leg, batch, hidden_NC)]
        self._store([entries for leg, entries in of_legs if not leg.wants_token])
        late = [(leg.seq, entries) for leg, entries in of_legs if leg.wants_token]
        row, rows, places = batch.n_prefill, list[int](), list[int]()
        decodes = [(decode, drafts(decode.seq)) for decode in step.decodes]
        self._write_waiting([decode.seq for decode, is_drafting in decodes if is_drafting])
        for decode, is_drafting in decodes:
            if is_drafting:
                rows += range(row, row + decode.rows)
                places += self._places_for(decode)
            row += decode.rows
        if rows:
            row_M, place_M = torch.from_numpy(np.array((rows, places))).to(self.device)
            self._hidden_WC.index_copy_(0, place_M, hidden_NC.index_select(0, row_M))
        if late:
            self._late = late
            self.written.clear()

    @torch.inference_mode()
    def write(self) -> None:
        """Write the entries that are late, and copy those of tails.

        Not for sequences that have ended: their pages may be others' now. If that fails, the pages have none.
        """
        late, copies, self._late, self._copies = self._late, self._copies, [], []
        try:
            self._store([entries for seq, entries in late if seq.phase is not Phase.DONE])
        except Exception:  # no request needs drafts
            log.exception("entries of the head cannot be written")
            for _, entries in late:
                self.clear(entries.table_P[entries.write_from :].tolist())
            self._complete_from.clear()
        for leg, tail in copies:
            if leg.seq.phase is not Phase.DONE:
                self._copy_to(leg, tail)
        self.written.set()

    def complete(self, pages: Sequence[int]) -> bool:
        """Return whether all entries of pages are there; wait for those that are late. For any thread."""
        of_pages = list(pages)
        return bool(self.complete_P[of_pages].all()) or (
            self.written.wait(LATEST) and bool(self.complete_P[of_pages].all())
        )

    def _of_leg(self, leg: Leg, batch: StepBatch, hidden_NC: Tensor) -> Iterator[Entries]:
        """Yield the entries of a leg's tokens, and note its last hidden state, and those at the ends of pages."""
        if leg.plan.composed:
            self.clear(leg.plan.table[leg.plan.write_from :])
        for s in batch.slices:
            if s.slot != leg.slot or not s.length:
                continue
            before_1C, rows = self._before(leg, s), hidden_NC[s.first : s.first + s.length]
            if before_1C is None:
                first, hidden_MC = s.start + 1, rows[:-1]
            else:
                first, hidden_MC = s.start, torch.cat((before_1C, rows[:-1]))
            self._keep_last(s, rows)
            completes = self._completed(leg, s)
            self._waiting[leg.slot] = Waiting(leg.seq.id, s.end, 1)
            self._hidden_WC[leg.slot * ROWS_PER_SLOT] = rows[-1]
            if len(hidden_MC):
                tokens = batch.token_N[s.first + first - s.start : s.first + s.length]
                yield Entries(first, tokens, hidden_MC, s.table_P, s.write_from, completes)
            else:
                self.complete_P[list(completes)] = True

    def _before(self, leg: Leg, s: Slice) -> Tensor | None:
        """Return the hidden state before a slice, if it is known: of the leg before, or of the page before."""
        if self._waits_at(leg, s.start):
            return self._hidden_WC[leg.slot * ROWS_PER_SLOT][None].clone()
        if s.start and s.start == leg.plan.start and s.start % self.page_size == 0:
            return self.last_PC[leg.plan.table[s.start // self.page_size - 1]][None]
        return None

    def _waits_at(self, leg: Leg, position: int) -> bool:
        """Return whether the sequence's last leg ended at `position`, with a hidden state."""
        waiting = self._waiting[leg.slot]
        return waiting.sequence == leg.seq.id and waiting.first == position and waiting.known > 0

    def _keep_last(self, s: Slice, rows_MC: Tensor) -> None:
        """Keep the hidden states of the last tokens of the pages that a slice fills."""
        ends = range((s.start // self.page_size + 1) * self.page_size, s.end + 1, self.page_size)
        new = [end for end in ends if end // self.page_size > s.write_from]
        if new:
            at_P, page_P = (
                torch.tensor(x, device=self.device) for x in (new, [end // self.page_size - 1 for end in new])
            )
            self.last_PC[s.table_P[page_P]] = rows_MC[at_P - 1 - s.start]

    def _completed(self, leg: Leg, s: Slice) -> Sequence[int]:
        """Return which of the pages that a slice writes have all entries then: each is made with the token before it.

        Until then none of the pages is complete.
        """
        begin, table = s.start // self.page_size, leg.plan.table
        first = max(s.write_from, begin)
        self.complete_P[list(table[first : -(-s.end // self.page_size)])] = False
        is_known = s.start == 0 or self._waits_at(leg, s.start)
        if s.start % self.page_size:
            is_known = is_known and self._has_entries(leg.plan.kept)
        if first == begin and not (is_known or (s.start % self.page_size == 0 and self.complete_P[table[begin - 1]])):
            first += 1
        self._complete_from[leg.slot] = first
        return table[first : s.end // self.page_size]

    def clear(self, pages: Sequence[int]) -> None:
        """Set entries of pages to zeros: they may be another sequence's, and some will not be written."""
        page_P = torch.tensor(pages, dtype=torch.int64, device=self.device)
        self.arena.pages[page_P] = 0
        self.last_PC[page_P] = 0
        self.complete_P[list(pages)] = False

    def _write_waiting(self, seqs: list[AnySequence]) -> None:
        """Write the entries that wait of all these sequences, in one pass, once as many wait as may of one of them."""
        if max((self._of(seq) for seq in seqs), default=0) >= MAX_WAITING_ENTRIES:
            self._store([self._waiting_of(seq) for seq in seqs if self._of(seq)])

    def _waiting_of(self, seq: AnySequence) -> Entries:
        """Return the entries of a sequence that wait; from now on none do."""
        slot, n, end = seq.slot or 0, self._of(seq), seq.computed + 1
        waiting, first = self._waiting[slot], slot * ROWS_PER_SLOT
        tokens = torch.tensor(seq.tokens[waiting.first : end], device=self.device)
        entries = Entries(waiting.first, tokens, self._hidden_WC[first : first + n], self._table(seq))
        waiting.first, waiting.known = end, 0
        return entries

    def _places_for(self, decode: Decode) -> range:
        """Return places for the hidden states of a sequence's rows: the first is that of its next token."""
        seq, waiting, at = decode.seq, self._waiting[decode.slot], decode.seq.computed + 1
        n = waiting.of(seq)
        if n == 0:
            waiting.sequence, waiting.first = seq.id, at
        waiting.known = n + decode.rows
        first = decode.slot * ROWS_PER_SLOT + n
        return range(first, first + decode.rows)

    def _store(self, entries: list[Entries]) -> None:
        """Write entries by one pass of the head."""
        if not entries:
            return
        slices, row = [], 0
        for number, one in enumerate(entries):
            n = len(one.tokens)
            slices.append(Slice(row, n, one.first, number, one.table_P, one.write_from))
            row += n
        positions = [torch.arange(s.start, s.end, device=self.device) for s in slices]
        none_B = torch.empty(0, dtype=torch.int64, device=self.device)
        tokens = torch.cat([one.tokens for one in entries])
        batch = StepBatch(tokens, torch.cat(positions), tuple(slices), none_B, (), none_B)
        self.module.store(batch, self.arena, torch.cat([one.hidden_MC for one in entries]))
        self.complete_P[[page for one in entries for page in one.completes]] = True

    def forget(self, request: int) -> None:
        """Do nothing: entries of a request are its slot's, and its pages'."""

    # -- tails of the cache

    def copy_entries(self, page: int, to: int, is_complete: bool = False) -> None:
        """Copy the entries of a part-filled page, those that are written, to another page."""
        self.arena.pages[to], self.last_PC[to] = self.arena.pages[page], self.last_PC[page]
        self.complete_P[to] = is_complete

    def copy_later(self, leg: Leg, tail: Tail) -> None:
        """Let `write` copy the entries of a tail that a leg wrote."""
        self._copies.append((leg, tail))
        self.written.clear()

    def _copy_to(self, leg: Leg, tail: Tail) -> None:
        at = tail.start // self.page_size
        own, plan = leg.plan.table[at], leg.plan
        has_all = bool(self.complete_P[own]) or at >= self._complete_from.get(leg.slot, at + 1)
        self.copy_entries(own, tail.kv[0], has_all if plan.start < plan.end else self._has_entries(plan.kept))

    def _has_entries(self, tail: Tail | None) -> bool:
        """Return whether all entries of the tokens of a cached tail exist."""
        return tail is not None and bool(tail.kv) and bool(self.complete_P[tail.kv[0]])

    def continue_after(self, leg: Leg, hidden_C: Tensor) -> None:
        """Continue a sequence at the start of a leg, from the hidden state of the token before it."""
        self._waiting[leg.slot] = Waiting(leg.seq.id, leg.plan.start, 1)
        self._hidden_WC[leg.slot * ROWS_PER_SLOT] = hidden_C

    # -- between steps -----------------------------------------------------------

    @torch.inference_mode()
    def guess(self, wanted: Sequence[tuple[AnySequence, int]], least: float) -> list[Draft]:
        """Draft for sequences; see `Guesser.guess`. The first pass writes the entries that wait, too."""
        ready = [(number, seq, most) for number, (seq, most) in enumerate(wanted) if self._of(seq)]
        drafts: list[list[int]] = [[] for _ in wanted]
        chances, first_chances = [1.0] * len(wanted), [0.0] * len(wanted)
        hidden_SC: Tensor | None = None
        while ready:
            begun, recorded = time.perf_counter(), len(self.graphs)
            if hidden_SC is None:
                batch, hidden_NC = self._catch_up([seq for _, seq, _ in ready])
            else:
                batch, hidden_NC = self._next([(seq, drafts[number]) for number, seq, _ in ready]), hidden_SC
            logits_SV, hidden_SC = self.graphs.forward(batch, hidden_NC)
            going = []
            for at, (token, p) in enumerate(best_of(logits_SV[: len(ready)])):
                number, _, most = ready[at]
                if not drafts[number]:
                    first_chances[number] = p
                chances[number] *= p
                drafts[number].append(token)
                if len(drafts[number]) < most and chances[number] >= least:
                    going.append(at)
            if len(self.graphs) == recorded:  # else most of the time was recording's
                self._seconds.note(time.perf_counter() - begun)
            ready = [ready[at] for at in going]
            hidden_SC = hidden_SC[torch.tensor(filled_up(going), dtype=torch.int64, device=self.device)]
        return list(map(draft_of, drafts, first_chances))

    def _of(self, seq: AnySequence) -> int:
        """Return how many entries of a sequence wait; 0 if it cannot draft."""
        return 0 if seq.slot is None else self._waiting[seq.slot].of(seq)

    def _catch_up(self, seqs: list[AnySequence]) -> tuple[StepBatch, Tensor]:
        """Return the rows of all entries that wait, up to each sequence's last token: the one from which it drafts."""
        rows, places, wanted = list[tuple[AnySequence, int, int]](), list[int](), list[int]()
        for seq in seqs:
            n, slot = self._of(seq), seq.slot or 0
            waiting = self._waiting[slot]
            rows += ((seq, at, seq.tokens[at]) for at in range(waiting.first, seq.computed + 1))
            places += range(slot * ROWS_PER_SLOT, slot * ROWS_PER_SLOT + n)
            wanted.append(len(rows) - 1)
            waiting.first, waiting.known = seq.computed + 1, 0
        more = filled_up_rows(len(rows)) - len(rows)
        batch = self._batch(rows + rows[-1:] * more, filled_up(wanted))
        return batch, self._hidden_WC[torch.tensor(places + places[-1:] * more, dtype=torch.int64, device=self.device)]

    def _next(self, drafted: list[tuple[AnySequence, list[int]]]) -> StepBatch:
        """Return the rows of each sequence's last draft."""
        rows = filled_up([(seq, seq.computed + len(tokens), tokens[-1]) for seq, tokens in drafted])
        return self._batch(rows, list(range(len(rows))))

    def _batch(self, rows: list[tuple[AnySequence, int, int]], wanted: list[int]) -> StepBatch:
        """Return a step of rows: sequence, position, token."""
        numbers = [[token for _, _, token in rows], [at for _, at, _ in rows], [seq.slot or 0 for seq, _, _ in rows]]
        token_B, position_B, slot_B = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        tables = {seq.id: self._table(seq) for seq, _, _ in rows}
        return StepBatch(
            token_N=token_B,
            position_N=position_B,
            slices=(),
            decode_slot_B=slot_B,
            decode_tables=tuple(tables[seq.id][: at // self.page_size + 1] for seq, at, _ in rows),
            logits_row_R=torch.tensor(wanted, dtype=torch.int64, device=self.device),
            wants_all=wanted == list(range(len(rows))),
        )

    def _table(self, seq: AnySequence) -> Tensor:
        return torch.tensor(seq.table, dtype=torch.int64, device=self.device)
