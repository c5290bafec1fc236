"""Execution of one step on the model: restore checkpoints, one ragged forward pass, save checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from headwater.engine.mtp import MtpRunner
from headwater.engine.tail_rows import TailRunner, has_rows
from headwater.memory.arena import Arena
from headwater.memory.slots import Segment, StateMemory
from headwater.mixers.batch import STATE, StepBatch
from headwater.mixers.gpu import has_kernels
from headwater.mixers.slices import Slice
from headwater.models.decode_graphs import DecodeGraphs, filled_up_rows
from headwater.models.hybrid import HybridModel
from headwater.plan import Run
from headwater.schedule.limits import MAX_REPLAYED_ROWS
from headwater.schedule.step import Decode, Leg, Step

# So many slots keep their memory between requests, and the pages that back them theirs: touching fresh memory costs
# about 0.3 ms a MB, which one user's chat need not pay at every turn.
WARM_SLOTS = 2


class SegmentRunner:
    """Row `slot` of the transitions belongs to the segment that the slot makes."""

    def __init__(self, model: HybridModel, arena: Arena, states: StateMemory, slots: int) -> None:
        self.model, self.arena, self.states, self.slots = model, arena, states, slots
        spec = model.spec
        row_bytes, area = spec.transition_place
        self.transitions = StateMemory(spec.transition, slots, row_bytes, arena.pages.device, area)

    def before(self, legs: Sequence[Leg]) -> list[Segment]:
        """Make ready what legs compose, in their order, and the transitions of segments that are begun."""
        segments: list[Segment] = []
        for leg in legs:
            if leg.plan.build is not None and leg.plan.start == 0:
                self.model.identities(self.transitions, leg.slot)
                self.states.zero(self.slots + leg.slot)
                for page in leg.plan.table[-1:]:  # it is not filled, and segments are stored with whole pages
                    self.arena.pages[page].zero_()
            for part in leg.plan.composed:
                tables = self._table(part.table), self._table(leg.plan.table)
                self.model.place(self.arena, *tables, part.start, part.end, part.at)
                tokens = range(part.start, part.end)
                stored = Segment.gathered(self.model.spec, self.arena.pages, tokens, part.state, part.transition)
                segments.append(stored)
        return segments

    def after(self, legs: Sequence[Leg]) -> None:
        """Save the states and transitions of segments that are complete."""
        for leg in legs:
            build, slot = leg.plan.build, leg.slot
            if build is not None and build.is_last:
                self.model.zero_start(self.states, self.slots + slot, slot, self.transitions, slot)
                last = leg.plan.table[-1:] if self.model.spec.states_in_pages else ()
                self.states.save(slot, self.arena.pages, last or build.state)
                self.transitions.save(slot, self.arena.pages, last or build.transition)

    def release(self, slot: int) -> None:
        """Give back the memory that the slot's segment took."""
        self.states.release(self.slots + slot)
        self.transitions.release(slot)

    def _table(self, pages: Sequence[int]) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self.arena.pages.device)


class Runner:
    """The executor that uses torch.

    Rows of the state memory: slots, then one for each slot with the state after the head of a segment that it makes,
    then those for saves.
    """

    def __init__(
        self, model: HybridModel, arena: Arena, states: StateMemory, slots: int, mtp: MtpRunner | None = None
    ) -> None:
        self.arena, self.states, self.mtp = arena, states, mtp
        self.slots = slots
        self.page_size = arena.page_size
        self.device = arena.pages.device
        self._chooses_tokens = has_kernels(self.device)  # on the device, so that logits stay there
        most = filled_up_rows(slots + MAX_REPLAYED_ROWS)  # more rows than any step decodes
        self._all_rows = torch.arange(most, device=self.device)
        self._hidden_BC = None if mtp is None else mtp.hidden(most)
        self.segments = SegmentRunner(model, arena, states, slots)
        self.tails = TailRunner(model, arena, states, mtp)
        self.use_model(model)
        self._tables: dict[int, tuple[Sequence[int], torch.Tensor]] = {}  # by request: its page table twice

    def use_model(self, model: HybridModel) -> None:
        """Compute with this model from now on."""
        self.model = self.segments.model = self.tails.model = model
        self.graphs = DecodeGraphs.over(model, self.arena, self.states, self._hidden_BC)

    def drop_model(self) -> None:
        """Forget the model; no step runs until another one is used."""
        del self.model, self.segments.model, self.tails.model
        self.graphs = None

    @property
    def was_new(self) -> bool:
        """Return whether the last step was of a kind that later ones repeat faster, since it is recorded."""
        return self.graphs is not None and self.graphs.was_new

    @torch.inference_mode()
    def run(self, step: Step) -> torch.Tensor:
        """Run a step; return float32 logits [R, vocabulary] of each leg, then each answer, that needs a token.

        They are where tokens are chosen: on a GPU whose kernels choose them, else on the CPU. The step has ended.

        Rows of legs whose prompts are scored follow, `n_scored` of each.
        """
        self._end_tails()
        logits_RV = self._with_tails(step) if step.legs else self._computed(step)
        if not self._chooses_tokens:
            return logits_RV.cpu()
        self._wait()
        return logits_RV

    def _with_tails(self, step: Step) -> torch.Tensor:
        """Return the logits of a step with legs, which may continue tails and write some."""
        for leg in step.legs:
            self._restore(leg)
        self.tails.before(step.legs)
        logits_RV = self._computed(replace(step, legs=tuple(filter(has_rows, step.legs))))
        logits_RV = self.tails.logits(step.legs, logits_RV)
        self.tails.after(step.legs)
        return logits_RV

    def _end_tails(self) -> None:
        if self.tails.of_step is not None:
            self.tails.end()

    def _computed(self, step: Step) -> torch.Tensor:
        """Return the logits of a step all of whose legs compute tokens."""
        if not step:
            return torch.empty(0, 0, device=self.device)
        rows_of_saves, batch = self._batch(step) if step.legs else ([], self._decode_batch(step.decodes))
        hidden_NC = self._hidden_BC
        if step.legs or self.graphs is None:
            segments = self.segments.before(step.legs)
            hidden_NC = None if self.mtp is None else self.mtp.hidden(len(batch.token_N))
            transitions = self.segments.transitions
            of_step = segments, transitions, hidden_NC, self.tails.of_step
            logits_RV = self.model.forward(batch, self.arena, self.states, *of_step)
            self.segments.after(step.legs)
        else:
            logits_RV = self.graphs.forward(batch)
        for leg, rows in zip(step.legs, rows_of_saves, strict=True):
            for save, row in zip(leg.plan.saves, rows, strict=True):
                self.states.save(row, self.arena.pages, save.pages)
        for decode in step.decodes:
            for save in decode.plan.saves if decode.plan else ():
                self.states.save(decode.slot, self.arena.pages, save.pages)
        if self.mtp is not None and hidden_NC is not None:
            self.mtp.take(step, batch, hidden_NC)
        return logits_RV

    def _wait(self) -> None:
        """Wait until what was begun on a card has ended."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    @torch.inference_mode()
    def end_step(self) -> None:
        """Do the work of a step that its tokens did not wait for; call it once they are sent."""
        self.write_entries()
        self._end_tails()

    def write_entries(self) -> None:
        """Write the entries of the MTP head that the step's tokens did not wait for; call it once they are sent."""
        if self.mtp is not None:
            self.mtp.write()

    def forget(self, request: int) -> None:
        """Drop the page table of a request that has ended."""
        self._tables.pop(request, None)

    def release(self, slots: set[int]) -> None:
        """Return the physical memory of unused slots to the system."""
        for slot in slots:
            if slot >= WARM_SLOTS:
                self.states.release(slot)
            self.segments.release(slot)

    def _restore(self, leg: Leg) -> None:
        if leg.slot >= WARM_SLOTS:
            self.arena.discard(leg.plan.lent)
        if leg.plan.restore:
            self.states.restore(leg.slot, self.arena.pages, leg.plan.restore)
        elif (leg.plan.kept or leg.plan).start == 0:
            self.states.zero(leg.slot)

    def _batch(self, step: Step) -> tuple[list[list[int]], StepBatch]:
        tokens: list[int] = []
        positions: list[torch.Tensor] = []
        slices: list[Slice] = []
        rows_of_saves: list[list[int]] = []
        wanted: list[int] = []
        scored: list[int] = []
        next_row = 2 * self.slots
        next_segment = 0
        for leg in step.legs:
            plan, first = leg.plan, len(tokens)
            rows = []
            for save in plan.saves:  # the state at the end of the leg is saved out of the slot itself
                rows.append(leg.slot if save.position == plan.end else next_row)
                next_row += save.position != plan.end
            rows_of_saves.append(rows)
            saves = tuple((save.position, row) for save, row in zip(plan.saves, rows, strict=True))
            leg_slices = self._slices(leg, first, saves, next_segment)
            next_segment += len(plan.composed)
            for s in leg_slices:
                tokens += leg.seq.tokens[s.start : s.end]
                positions.append(torch.arange(s.start, s.end, device=self.device))
            slices += self.tails.applied_to(leg_slices, leg)
            if leg.wants_token:
                wanted.append(len(tokens) - 1)
            scored += range(first, first + leg.n_scored)
        decoding = self._decode_batch(step.decodes)
        wanted_B = decoding.logits_row_R + len(tokens)
        batch = replace(
            decoding,
            token_N=torch.cat((self._tensor(tokens), decoding.token_N)),
            position_N=torch.cat((*positions, decoding.position_N)),
            slices=tuple(slices),
            logits_row_R=torch.cat((self._tensor(wanted), wanted_B, self._tensor(scored))),
            wants_all=False,
        )
        return rows_of_saves, batch

    def _decode_batch(self, decodes: Sequence[Decode]) -> StepBatch:
        """Return the batch of a step without legs, which is built with few calls of torch."""
        at = [(decode, position) for decode in decodes for position in decode.positions]
        tokens = [token for decode in decodes for token in decode.tokens]
        of_rows = [tokens, [position for _, position in at], [decode.slot for decode, _ in at]]
        token_B, position_B, slot_B = torch.tensor(of_rows, dtype=torch.int64, device=self.device)
        ends = accumulate(decode.rows for decode in decodes)
        judged = [(decode, end) for decode, end in zip(decodes, ends, strict=True) if decode.wants_token]
        wanted = [row for decode, end in judged for row in range(end - len(decode.drafts) - 1, end)]
        return StepBatch(
            token_N=token_B,
            position_N=position_B,
            slices=(),
            decode_slot_B=slot_B,
            decode_tables=tuple(self._table(*row) for row in at),
            logits_row_R=self._all_rows[: len(at)] if len(wanted) == len(at) else self._tensor(wanted),
            wants_all=len(wanted) == len(at),
            parents=tuple(_parents(decodes)),
            drafted=_unless_none(len(decode.drafts) for decode in decodes),
            accepted=_unless_none(decode.accepted for decode in decodes),
        )

    def _slices(self, leg: Leg, first: int, saves: tuple[tuple[int, int], ...], first_segment: int) -> list[Slice]:
        """Return a slice for each run of adjacent tokens that the leg computes, and one for a segment's head."""
        plan, slot = leg.plan, leg.slot
        runs = plan.runs or (Run(plan.start, plan.end, ()),)
        if plan.kept is not None and runs[0].composed:  # the tail comes before the segments
            runs = (Run(plan.start, plan.start, ()), *runs)
        if plan.build is not None and plan.start < plan.build.head:
            runs = (Run(0, plan.build.head, ()), Run(plan.build.head, plan.end, ()))[: 1 + (plan.end > plan.build.head)]
        table_P = self._tensor(plan.table)
        slices = []
        for run in runs:
            in_head = plan.build is not None and run.end == plan.build.head
            first_state = run.start if plan.kept is None or run.start > plan.start else plan.kept.start
            inner = tuple((at, row) for at, row in saves if row != slot and first_state < at <= run.end)
            one = Slice(
                first=first,
                length=run.end - run.start,
                start=run.start,
                slot=slot,
                table_P=table_P,
                write_from=plan.write_from,
                saves=((run.end, self.slots + slot),) if in_head else inner,
                transition=slot if plan.build is not None and not in_head else None,
                composes=tuple((first_segment + i, plan.composed[i].at) for i in run.composed),
            )
            slices.append(one)
            first += run.end - run.start
        return slices

    def _tensor(self, values: Sequence[int] | memoryview) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _table(self, decode: Decode, position: int) -> torch.Tensor:
        """Return the page table up to a position as a tensor, built once a page."""
        table = decode.seq.table
        known = self._tables.get(decode.seq.id)
        if known is None or known[0] is not table:
            known = self._tables[decode.seq.id] = (table, self._tensor(table))
        return known[1][: position // self.page_size + 1]


def _parents(decodes: Sequence[Decode]) -> Iterator[int]:
    """Yield the parent of each decoding row: the row before it in its sequence, or STATE if it is the first."""
    row = 0
    for decode in decodes:
        for i in range(decode.rows):
            yield row - 1 if i else STATE
            row += 1


def _unless_none(counts: Iterable[int]) -> tuple[int, ...]:
    """Return the counts, or nothing if all are 0."""
    found = tuple(counts)
    return found if any(found) else ()
