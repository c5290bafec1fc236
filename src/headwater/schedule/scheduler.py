"""Moves requests through their phases: who runs in the next step, who waits, who gives way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from headwater.cache.positions import Placement
from headwater.cache.segments.store import SegmentKey
from headwater.errors import OutOfPages, PlanClosed
from headwater.plan import CacheLayout, Plan
from headwater.request import Generation, Healing, SamplingParams
from headwater.schedule.answers import Answers
from headwater.schedule.composer import Composer
from headwater.schedule.healer import Healer
from headwater.schedule.limits import ANSWERS_AT_ONCE, EXTRA_SLOTS, GUESTS, LOOKED_AT, MADE_AT_ONCE, OTHERS, Limits
from headwater.schedule.planner import Budget, Cache, Planner
from headwater.schedule.queue import Queue
from headwater.schedule.sequence import Phase, Sequence
from headwater.schedule.shares import Shares
from headwater.schedule.slot_ids import SlotIds
from headwater.schedule.step import DecodeRow, Leg, Step

DecodeReuse = Literal["canonical", "raw", "none"]


@dataclass
class Scheduler:
    """Moves sequences through their phases. `plan_step` and `finish_step` are called in turn, by one thread."""

    cache: Cache
    placement: Placement
    layout: CacheLayout
    limits: Limits
    decode_reuse: DecodeReuse = "canonical"
    waiting: Queue = field(default_factory=Queue)
    running: dict[int, Sequence] = field(default_factory=dict)  # PREFILL and DECODE, by id
    answers: Answers = field(default_factory=Answers)
    wanted: deque[SegmentKey] = field(default_factory=deque)  # segments that are to be made before they are needed
    shares: Shares = field(default_factory=Shares)
    composer: Composer | None = None  # where there is a cache
    healing: Healing = Healing.OFF

    def __post_init__(self) -> None:
        self.healer = Healer(self.cache, self.layout, self.healing)
        self.planner = Planner(self.cache, self.placement, self.layout, self.decode_reuse != "none")
        self.slots = SlotIds(self.limits.max_running + EXTRA_SLOTS)
        self._next_id = 0
        self._crowded = False  # after a preemption nobody is admitted until somebody has left
        self._full = False  # memory was short for who is next: asked again when somebody has come or left
        self._legs: dict[int, Leg] = {}
        self._rows: dict[int, DecodeRow] = {}
        self.failures: list[tuple[Sequence, Exception]] = []  # requests that were given up; the engine tells them
        self.preemptions = 0
        self.prefill_tokens = 0  # computed for prompts
        self.answer_tokens = 0  # recomputed so that answers can be resumed
        self.segment_tokens = 0  # computed so that segments can be composed
        self.decode_tokens = 0

    # -- requests come and go --------------------------------------------------

    def submit(self, generation: Generation) -> Sequence:
        """Queue a request; raises RequestTooLarge if no amount of waiting could serve it."""
        seq = Sequence(self.new_id(), generation)
        self.enqueue(seq)
        return seq

    def enqueue(self, seq: Sequence) -> None:
        """Queue a sequence that has an id of this scheduler; raises RequestTooLarge, as `submit` does."""
        self.check_fits(seq.n_prompt + seq.generation.params.max_tokens)
        self.waiting.push(seq)
        self.shares.join(seq.namespace)
        self._full = False

    def check_fits(self, tokens: int) -> None:
        """Raises RequestTooLarge where a prompt and its output could never be served; changes nothing."""
        self.limits.check_fits(tokens, self.layout)

    def cancel(self, seq: Sequence) -> None:
        """Give back all it holds. Between steps only."""
        if seq.phase is Phase.WAITING and seq.samples:
            self.waiting.remove(seq)
            self._leave_segments(seq)
            self._full = False
        elif seq.phase in (Phase.PREFILL, Phase.DECODE):
            self._let_go(seq)
        if seq.samples and seq.phase is not Phase.DONE:
            self.shares.leave(seq.namespace)
        seq.phase = Phase.DONE
        self.healer.ended(seq)

    def finish(self, seq: Sequence) -> None:
        """The answer is complete: free its memory, and queue the prefill that lets the next turn resume after it."""
        self.cancel(seq)
        self.healer.remember(seq)
        keeps = self.decode_reuse == "canonical" and seq.generation.keep_output and not seq.scores_prompt
        end = seq.answer_end(self.layout.unit_tokens) if keeps else None
        if end is not None:
            self.answers.add(seq.answer(self.new_id(), end), self.limits.max_running)

    @property
    def idle(self) -> bool:
        return not (len(self.waiting) or self.running or self.answers or self.wanted or self.healer.queue)

    @property
    def computing(self) -> int:
        """What runs because somebody asked for it: all but what is healed."""
        return sum(seq is not self.healer.seq for seq in self.running.values())

    def new_id(self) -> int:
        """Ids grow with arrival."""
        self._next_id += 1
        return self._next_id

    # -- one step ----------------------------------------------------------------

    def plan_step(self) -> Step:
        """Decode first, then the prefills under way, then new requests, then finished answers, then healing."""
        self._legs, self._rows = {}, {}
        if not self._may_heal():
            self._park_healing()
        for seq in [self.running[i] for i in sorted(self.running)]:
            if seq.phase is Phase.DECODE:
                self._alone(self._plan_row, seq)
        prefills = (seq for seq in self.running.values() if seq.phase is Phase.PREFILL and seq is not self.healer.seq)
        for seq in self.shares.order(prefills):
            self._alone(self._plan_leg, seq)
        if not self._crowded:
            self._make_wanted()
            self._admit()
            self._prefill_answers()
            self._heal()
        # by slot, so that the rows' states mostly lie side by side
        rows = sorted(self._rows.values(), key=lambda row: row.seq.slot or 0)
        return Step(tuple(self._legs.values()), tuple(rows))

    def _alone(self, plan: Callable[[Sequence], bool | None], seq: Sequence) -> bool:
        """Plan for one sequence; what nobody foresaw ends that one, and the others go on."""
        try:
            return bool(plan(seq))
        except Exception as error:
            self.give_up(seq, error)
            return True

    def finish_step(self, step: Step) -> list[Sequence]:
        """Publish what the step computed; returns the sequences whose next token is to be sampled, in its order.

        One whose leg cannot be published fails, and is not among them.
        """
        for leg in step.legs:
            self._alone(self._finish_leg, leg.seq)
        for row in step.rows:
            self._alone(self._finish_row, row.seq)
        failed = {seq.id for seq, _ in self.failures}
        return [item.seq for item in step.items if item.wants_token and item.seq.id not in failed]

    def _finish_leg(self, seq: Sequence) -> None:
        plan = self._legs[seq.id].plan
        if seq.made is None:
            self.cache.commit(plan)
        del self._legs[seq.id]
        self._count(seq, plan.computed_tokens)
        seq.computed = plan.end
        if plan.making is not None:
            if plan.making.is_last:
                self._end_making(seq)
            return
        if plan.composed and self.composer is not None:
            self.composer.finished(seq)
        seq.checkpoints = tuple(c for c in seq.checkpoints if c > seq.computed)
        seq.speculative = tuple(c for c in seq.speculative if c > seq.computed)
        if seq.computed == seq.n_prompt:
            self._end_prefill(seq)

    def _finish_row(self, seq: Sequence) -> None:
        plan = self._rows[seq.id].plan
        if plan is not None:
            self.cache.commit(plan)
        del self._rows[seq.id]
        self.decode_tokens += 1
        self.shares.charge(seq.namespace, 1)
        seq.computed += 1

    def _count(self, seq: Sequence, tokens: int) -> None:
        """A leg's tokens, by what they were for. Healing is charged to nobody: it takes what nobody wants."""
        if seq is self.healer.seq:
            self.healer.tokens += tokens
            return
        self.shares.charge(seq.namespace, tokens)
        if seq.samples:
            self.prefill_tokens += tokens
        elif seq.made is not None:
            self.segment_tokens += tokens
        else:
            self.answer_tokens += tokens

    def abandon_step(self, step: Step) -> list[Sequence]:
        """The step failed: close its plans and give back all that its sequences hold; returns them."""
        failed = [item.seq for item in step.items if item.seq.phase is not Phase.DONE]
        for seq in failed:
            self.cancel(seq)
        return failed

    def _end_prefill(self, seq: Sequence) -> None:
        if seq.samples:
            seq.phase = Phase.DECODE
        else:
            self.healer.completed(seq)
            self.cancel(seq)

    # -- decode ------------------------------------------------------------------

    def _plan_row(self, seq: Sequence) -> None:
        while seq.phase is Phase.DECODE:
            try:
                self.extend(seq)
            except OutOfPages as error:
                self._make_room_for(seq, error)
                continue
            self._rows[seq.id] = DecodeRow(seq, seq.tokens[seq.computed], seq.computed, self._raw_page(seq))
            return

    def extend(self, seq: Sequence) -> None:
        """Reserve the page that the token at `seq.computed` falls into, unless it has it."""
        if self.layout.kv_pages_per_unit and seq.computed >= len(seq.table) * self.layout.page_size:
            plan = self.planner.decode_page(seq)
            try:
                self.cache.commit(plan)
            except Exception:
                self._abandon(plan)
                raise
            seq.table = plan.table

    def _raw_page(self, seq: Sequence) -> Plan | None:
        """With decode-reuse raw: the plan that publishes the page which this row completes, if there is room.

        None, too, where a recording does not know what the page holds.
        """
        end = seq.computed + 1
        if self.decode_reuse != "raw" or end % self.layout.unit_tokens or end > seq.known_tokens:
            return None
        try:
            return self.planner.raw_page(seq)
        except OutOfPages:
            return None

    # -- prefill -----------------------------------------------------------------

    def _budget(self) -> Budget:
        page = self.layout.unit_tokens
        used = sum(leg.plan.computed_tokens for leg in self._legs.values())
        alone = len(self._homes()) + len(self.waiting) <= 1
        most = self.limits.tokens_per_step if alone else min(self.limits.tokens_per_step, self.limits.shared_step)
        tokens = max(page, (most - len(self._rows)) // page * page)
        saves = sum(len(leg.plan.saves) for leg in self._legs.values())
        return Budget(max(0, tokens - used), self.limits.saves_per_step - saves)

    def _plan_leg(self, seq: Sequence) -> None:
        if seq.made is not None:
            self._plan_making(seq)
            return
        while seq.phase is Phase.PREFILL:
            try:
                plan = self.planner.next_leg(seq, self._budget())
            except OutOfPages as error:
                if self.composer is not None and seq.composition is not None:
                    self.composer.go_on_without(seq)
                elif not self._make_room_for(seq, error):
                    return
                continue
            if plan is not None:
                self._start_leg(seq, plan)
            return

    def _start_leg(self, seq: Sequence, plan: Plan) -> None:
        if self.composer is not None and seq.composition is not None and plan.end > seq.composition.tail_start:
            plan = self.composer.composed_plan(seq, plan)
        seq.table = plan.table
        self._legs[seq.id] = Leg(seq, plan)

    def _admit(self) -> None:
        for seq in self.shares.order(self._welcome()):
            homes = self._homes()
            if self._budget().tokens <= 0 or len(homes) >= self.limits.max_running + GUESTS:
                return
            if len(homes) >= self.limits.max_running and seq.namespace in homes:
                continue
            if not self._alone(self._start_or_follow, seq):
                return

    def _welcome(self) -> list[Sequence]:
        """Those that wait and for whom there may be a place."""
        homes = self._homes()
        if self._full or self._budget().tokens <= 0 or len(homes) >= self.limits.max_running + GUESTS:
            return []
        return self.waiting.fronts(LOOKED_AT, homes if len(homes) >= self.limits.max_running else ())

    def _homes(self) -> list[str]:
        """The namespace of each running request."""
        return [seq.namespace for seq in self.running.values() if seq.samples]

    def _start_or_follow(self, seq: Sequence) -> bool:
        """Take the first leg of a waiting request, unless a running one computes its prefix. False: no room now."""
        if self.composer is not None and seq.composes:
            missing, waits = self.composer.missing(seq)
            for key in (*missing, *self.composer.unused(seq)):
                if self._may_make():
                    seq.asked.add(key)
                    if self._make(key):
                        seq.had_made.add(key)
            if missing or waits:
                return True
        match = self.cache.match(seq.key, seq.n_prompt, seq.namespace)
        prefills = (s for s in self.running.values() if s.phase is Phase.PREFILL)
        if self.planner.leader_of(seq, match, prefills) is not None:
            seq.waited = True
            self._leave_segments(seq)
            return True
        self.answers.drop_covered_by(seq)
        started = self._start(seq)
        if seq.phase is Phase.WAITING:
            self._leave_segments(seq)
        return started

    def _start(self, seq: Sequence) -> bool:
        while True:
            others = [s for s in self.waiting.first(OTHERS + 1) if s is not seq]
            try:
                plan = self.planner.first_leg(seq, self._budget(), others)
            except OutOfPages as error:
                if self._drop_running_answer():
                    continue
                if self.composer is not None and seq.composition is not None:
                    self.composer.give_up(seq)
                    continue
                if not self.running:
                    self.give_up(seq, error)
                self._full = bool(self.running)
                return False
            if plan is None:
                return False
            self.waiting.remove(seq)
            self._begin(seq, plan)
            return True

    def _begin(self, seq: Sequence, plan: Plan) -> None:
        seq.computed = plan.start
        self._run(seq)
        self._start_leg(seq, plan)

    def _run(self, seq: Sequence) -> None:
        seq.phase, seq.slot = Phase.PREFILL, self.slots.take()
        self.running[seq.id] = seq

    # -- segments ------------------------------------------------------------------

    def _leave_segments(self, seq: Sequence) -> None:
        """It needs none now: who waits holds none, or nobody else could have their memory."""
        if self.composer is not None:
            self.composer.leave(seq)

    def want(self, key: SegmentKey) -> None:
        """Have a segment made before a request asks for it, when there is a place."""
        self.wanted.append(key)

    @property
    def _maker(self) -> Composer:
        assert self.composer is not None, "segments are made where they are composed"
        return self.composer

    def _make_wanted(self) -> None:
        while self.wanted and self._may_make():
            key = self.wanted.popleft()
            if self._maker.cache.segments.find(key) is None:
                self._make(key)

    def _may_make(self) -> bool:
        made = sum(seq.made is not None for seq in self.running.values())
        return made < MADE_AT_ONCE and len(self.slots) > 0

    def _make(self, key: SegmentKey) -> bool:
        """Begin to make a segment; False where there is no memory for it."""
        made = self._maker.begin(key)
        if made is None:
            return False
        generation = Generation(key.token_ids, SamplingParams(), key.namespace)
        seq = Sequence(self.new_id(), generation, samples=False, made=made)
        self._run(seq)
        self._alone(self._plan_making, seq)
        return True

    def _plan_making(self, seq: Sequence) -> None:
        plan = self._maker.making_plan(seq, self._budget().tokens)
        if plan is not None:
            self._start_leg(seq, plan)

    def _end_making(self, seq: Sequence) -> None:
        assert seq.made is not None, "only segments are made"
        self._maker.cache.publish_segment(seq.made)
        self.cancel(seq)

    # -- finished answers ----------------------------------------------------------

    def _prefill_answers(self) -> None:
        """Finished answers, in what the budget leaves; one for which there is no memory is let go."""
        while self.answers and len(self.running) - len(self._homes()) < ANSWERS_AT_ONCE:
            if not self._alone(self._begin_answer, self.answers.popleft()):
                return

    def _begin_answer(self, seq: Sequence) -> bool:
        """False: the budget is used up, and the answer is the next one's first."""
        try:
            plan = self.planner.first_leg(seq, self._budget(), ())
        except OutOfPages:
            seq.phase = Phase.DONE
            return True
        if plan is None:
            self.answers.appendleft(seq)
            return False
        self._begin(seq, plan)
        return True

    def _drop_running_answer(self) -> bool:
        for seq in tuple(self.running.values()):
            if not seq.samples:
                self.cancel(seq)
                return True
        return False

    # -- healing -------------------------------------------------------------------

    def _may_heal(self) -> bool:
        """Whether nobody waits for anything; and nothing runs, or only requests that healing may go on beside."""
        if self.healer.when is Healing.OFF or self._full or len(self.waiting) or self.answers or self.wanted:
            return False
        if self.healer.when is Healing.IDLE:
            return not self.computing
        return self.computing == len(self._homes())

    def _park_healing(self) -> None:
        """Make way at once: what its legs have computed is cached, and from there it goes on later."""
        seq = self.healer.park()
        if seq is None:
            return
        if seq.id in self.running:
            self._let_go(seq)
        seq.phase = Phase.DONE

    def _let_healing_wait(self) -> None:
        """Until somebody has come or left: those that run need the memory."""
        self._park_healing()
        self._full = True

    def _heal(self) -> None:
        """One leg of the prefix that is being healed, or the next one, in what the budget leaves."""
        tokens = min(self._budget().tokens, max(self.limits.shared_step, self.layout.unit_tokens))
        while tokens >= self.layout.unit_tokens and len(self.slots) and self._may_heal():
            seq = self.healer.current(self.new_id)
            if seq is None or self._alone(partial(self._plan_healing, tokens), seq):
                return

    def _plan_healing(self, tokens: int, seq: Sequence) -> bool:
        """False: nothing of this one is computed now."""
        plan = self.healer.next_leg(seq, tokens)
        if plan is None and self.healer.seq is seq and self.computing:
            self._let_healing_wait()
        elif plan is None:
            self.cancel(seq)
        elif seq.slot is None:
            self._begin(seq, plan)
        else:
            self._start_leg(seq, plan)
        return plan is not None

    # -- when memory runs out --------------------------------------------------------

    def _make_room_for(self, seq: Sequence, error: OutOfPages) -> bool:
        """Free memory for `seq`: what is healed first, then an answer, then the request that came last, maybe `seq`.

        False if `seq` is to wait for older requests to end.
        """
        if self.healer.seq is not None:
            self._let_healing_wait()
            return True
        if self._drop_running_answer():
            return True
        victim = self.running[max(self.running)]
        if victim is seq and len(self.running) == 1:
            self._start_over(seq, error)
            return True
        if victim is seq and seq.phase is Phase.PREFILL:
            return False
        self._preempt(victim)
        return True

    def _start_over(self, seq: Sequence, error: OutOfPages) -> None:
        """It is alone and memory is short: what others published beside it, it holds twice until it begins again.

        If that does not help, check_fits should have refused it.
        """
        if seq.started_over:
            self.give_up(seq, error)
            return
        seq.started_over = True
        self._preempt(seq)
        self._crowded = False  # nobody is left to leave

    def give_up(self, seq: Sequence, error: Exception) -> None:
        """End a request that cannot be served; the engine tells it from `failures`. Between steps, or in planning."""
        self.cancel(seq)
        self.failures.append((seq, error))

    def _preempt(self, seq: Sequence) -> None:
        """Back to the queue: it will prefill its prompt again and replay its output through the decode kernels."""
        self._let_go(seq)
        seq.phase = Phase.WAITING
        seq.computed, seq.planned, seq.table = 0, 0, ()
        seq.preemptions += 1
        self.preemptions += 1
        self.waiting.push(seq)
        self._crowded = True

    def _let_go(self, seq: Sequence) -> None:
        held = self._legs.pop(seq.id, None) or self._rows.pop(seq.id, None)
        self._leave_segments(seq)
        if seq.made is None:
            if held is not None and held.plan is not None:
                self._abandon(held.plan)
            self.cache.release(seq.id)
        if seq.slot is not None:
            self.slots.give(seq.slot)
            seq.slot = None
        del self.running[seq.id]
        self._crowded = self._full = False

    def _abandon(self, plan: Plan) -> None:
        with suppress(PlanClosed):  # it was its commit that failed
            self.cache.abandon(plan)
