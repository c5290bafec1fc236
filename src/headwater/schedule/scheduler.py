"""Scheduler: moves sequences through their phases, and chooses what runs in each step."""

from __future__ import annotations

from collections import deque
from functools import partial

from headwater.cache.placement.base import Placement
from headwater.cache.prefix_cache import PrefixCache
from headwater.cache.segments.store import SegmentKey
from headwater.draft.forced import Grammar
from headwater.errors import OutOfPages
from headwater.plan import Plan
from headwater.request import Generation, Healing
from headwater.schedule.kinds.answer import Answers, FinishedAnswer
from headwater.schedule.kinds.healing import Recomputation
from headwater.schedule.kinds.request import Request
from headwater.schedule.kinds.segment import Composing, SegmentBuild
from headwater.schedule.limits import (
    ANSWERS_AT_ONCE,
    BUILDS_AT_ONCE,
    BUILT_TOGETHER,
    LOOKED_AT,
    OTHERS,
    PREFETCHED,
    RESERVED,
    Budget,
    Limits,
)
from headwater.schedule.planner import DecodeReuse, Planner
from headwater.schedule.preemption import Preemption
from headwater.schedule.segment_loads import Awaited
from headwater.schedule.sequence import Phase, Purpose, Sequence
from headwater.schedule.speculation import Speculation
from headwater.schedule.step import Step


class Scheduler(Preemption):
    """Moves sequences through their phases. `plan_step` and `finish_step` are called in turn, by one thread."""

    def __init__(
        self,
        cache: PrefixCache,
        placement: Placement,
        limits: Limits,
        decode_reuse: DecodeReuse = "canonical",
        composer: Composing | None = None,
        healing: Healing = Healing.OFF,
        speculation: Speculation | None = None,
    ) -> None:
        planner = Planner(cache, placement, decode_reuse != "none")
        speculation = Speculation() if speculation is None else speculation
        super().__init__(planner, limits, decode_reuse, healing, speculation)
        self.placement = placement
        self.composer = composer or Composing()
        self.answers = Answers()
        self.wanted: deque[SegmentKey] = deque()  # segments to build before a request has them, as slots are free
        self._awaited = Awaited()  # those of them that tiers are asked for
        self._next_id = 0

    # -- arrivals and ends

    def submit(self, generation: Generation, grammar: Grammar | None = None) -> Request:
        """Queue a request, whose drafts keep to `grammar`. Raises RequestTooLarge if it could never be served."""
        seq = Request(self.new_id(), generation, grammar=grammar)
        self.enqueue(seq)
        return seq

    def enqueue(self, seq: Request) -> None:
        """Queue a request that has an id of this scheduler. Raises RequestTooLarge, as `submit` does."""
        self.check_fits(seq.n_prompt + seq.generation.params.max_tokens)
        self.waiting.push(seq)
        self.shares.join(seq.namespace)
        self._full = False

    def cached_of(self, seq: Request) -> int | None:
        """Return how many tokens of a waiting prompt's beginning are cached. None: it has segments, or is scored."""
        return None if seq.generation.segments or seq.scores_prompt else self.planner.match(seq).checkpoint_tokens

    def check_fits(self, tokens: int) -> None:
        """Raise RequestTooLarge if a prompt and its output, `tokens` together, could never be served."""
        self.limits.check_fits(tokens, self.layout)

    def finish(self, seq: Request) -> None:
        """End an answered request: free its memory, and queue the prefill after which the next turn resumes."""
        self.cancel(seq)
        self.speculation.remember(seq.namespace, seq.tokens[seq.n_prompt :])
        self.healer.remember(seq)
        keeps = self.decode_reuse == "canonical" and seq.generation.keep_output and not seq.scores_prompt
        end = seq.answer_end(self.layout.unit_tokens) if keeps else None
        if end is not None:
            self.answers.add(seq.answer(self.new_id(), end), self.limits.max_running)
        if seq.generation.ended:
            self.planner.end_conversation(seq)

    def keep_answer(self, asked: Generation) -> None:
        """Queue the prefill of an answer that another engine has decoded, as `finish` does of one of its own.

        `asked`: the request, with prompt and answer as its prompt, up to a page boundary.
        """
        if self.decode_reuse == "canonical":
            self.answers.add(FinishedAnswer.of(self.new_id(), asked, asked.prompt), self.limits.max_running)

    def stop_healing(self) -> None:
        """Give up all prefixes that are to be healed; the one being healed leaves before the next step."""
        self.healer = self.healer.stopped()

    @property
    def idle(self) -> bool:
        return not (len(self.waiting) or self.running or self.answers or self.wanted or self.healer.queue)

    def new_id(self) -> int:
        """Return the next id. Ids grow with arrival."""
        self._next_id += 1
        return self._next_id

    # -- one step

    def plan_step(self) -> Step:
        """Plan decoding sequences, then running prefills, then new requests, then finished answers, then healing."""
        self._legs, self._decodes = {}, {}
        if not self._may_heal():
            self._park_healing()
        decoding = [self.running[i] for i in sorted(self.running) if self.running[i].phase is Phase.DECODE]
        for plan in (self._plan_decode, self._plan_replay):
            for seq in decoding:
                self._alone(plan, seq)
        self._plan_drafts()
        for seq in self.shares.order(s for s in self._prefills() if not isinstance(s, Recomputation)):
            self._alone(self._plan_leg, seq)
        if not self._crowded:
            self._build_wanted()
            self._admit()
            self._prefill_answers()
            self._heal()
        by_slot = sorted(self._decodes.values(), key=lambda one: one.seq.slot or 0)  # adjacent states together
        return Step(tuple(self._legs.values()), tuple(by_slot))

    def finish_step(self, step: Step) -> list[Request]:
        """Publish what the step computed; returns the requests whose next token is to be sampled, in its order.

        A sequence whose leg cannot be published fails, and is not among them.
        """
        wanting = [item.seq for item in step.items if item.wants_token]
        for leg in step.legs:
            self._alone(self._finish_leg, leg.seq)
        for decode in step.decodes:
            self._alone(self._finish_decode, decode.seq)
        failed = {seq.id for seq, _ in self.failures}
        return [seq for seq in wanting if isinstance(seq, Request) and seq.id not in failed]

    def _finish_leg(self, seq: Sequence) -> None:
        plan = self._legs[seq.id].plan
        self.cache.commit(plan)
        del self._legs[seq.id]
        if plan.build is None:
            self.tiers.saved(seq.namespace, seq.key, self._resumable(seq, plan))
        segments = seq.segments_of(plan)
        if segments:
            (self.tiers.reused if plan.build is None else self.tiers.built)(segments)
        self._count(seq, seq.purpose, plan.computed_tokens)
        seq.leg_ended(plan)
        if seq.computed == seq.n_prompt:
            phase = seq.prefill_ended()
            if phase is Phase.DONE:
                self.cancel(seq)
            else:
                seq.phase = phase

    def _resumable(self, seq: Sequence, plan: Plan) -> list[int]:
        """Return the positions of a leg from which later requests are likely to resume: speculative ones are not."""
        if not self.layout.every_page:
            return [save.position for save in plan.saves if save.position in seq.checkpoints]
        end = min(plan.end, seq.last_resumable) // self.layout.unit_tokens * self.layout.unit_tokens
        return [end] if end and plan.end == seq.n_prompt else []

    def _finish_decode(self, seq: Sequence) -> None:
        decode = self._decodes[seq.id]
        if decode.plan is not None:
            self.cache.commit(decode.plan)
        del self._decodes[seq.id]
        self._count(seq, Purpose.DECODE, decode.rows)
        seq.computed += decode.count
        seq.accepted = 0

    def accept(self, seq: Request, drafted: int, right: int) -> None:
        """Keep the first `right` of a request's drafts, whose tokens it has; call it after `finish_step`."""
        seq.computed += right
        seq.accepted = right
        self.speculation.learn(seq.speculator, drafted, right)

    def abandon_step(self, step: Step) -> list[Sequence]:
        """Close the plans of a step that failed, and give back all that its sequences hold; returns these."""
        failed = [item.seq for item in step.items if item.seq.phase is not Phase.DONE]
        for seq in failed:
            self.cancel(seq)
        return failed

    def free_steps(self, most: int) -> int:
        """Return how many of the next steps, at most `most`, decode one token of each sequence, and publish no page.

        None where there are drafts: how many tokens they give is known step by step.
        """
        running, unit = self.running.values(), self.layout.unit_tokens
        if (
            self.speculation
            or self.answers
            or self.wanted
            or any(seq.phase is not Phase.DECODE or seq.uncomputed > 1 for seq in running)
        ):
            return 0
        if len(self.waiting) and len(running) < self.limits.max_running + RESERVED:
            return 0
        if self.decode_reuse == "raw":
            most = min(most, *(unit - 1 - seq.computed % unit for seq in running))
        return most

    # -- new requests

    def _admit(self) -> None:
        homes = self._homes()
        if self._full:
            return
        full = len(homes) >= self.limits.max_running
        if full:
            self.tiers.prefetch([seq for seq in self.waiting.first(PREFETCHED) if not seq.scores_prompt])
        if self._is_taken(homes):
            return
        for seq in self.shares.order(self.waiting.fronts(LOOKED_AT, homes if full else ())):
            homes = self._homes()
            if self._is_taken(homes):
                return
            if len(homes) >= self.limits.max_running and seq.namespace in homes:
                continue
            if not self._alone(self._start_or_follow, seq):
                return

    def _is_taken(self, homes: list[str]) -> bool:
        """Return whether all slots for requests are taken, or the step has no tokens left."""
        return self._budget().tokens <= 0 or len(homes) >= self.limits.max_running + RESERVED

    def _start_or_follow(self, seq: Request) -> bool:
        """Take the first leg of a waiting request, unless it waits for a load, or a running one computes its prefix.

        False: no room now.
        """
        if not seq.scores_prompt and self.tiers.holds_back(seq):
            return True
        missing, waits = self.composer.prepare(seq)
        absent = tuple(dict.fromkeys((*missing, *self.composer.unused(seq))))  # a segment may stand there twice
        held = self.tiers.hold_segments(seq.awaited, absent)
        for key in absent:
            if key not in held and self._may_build():
                seq.tried.add(key)
                if self._build(key):
                    seq.built.add(key)
        if missing or waits or held:
            seq.release_segments()
            return True
        if self.planner.leader_of(seq, self._prefills()) is not None:
            seq.waited = True
            seq.release_segments()
            return True
        self.answers.drop_covered_by(seq)
        started = self._start(seq)
        if seq.phase is Phase.WAITING:
            seq.release_segments()  # waiting requests hold none: others need the memory
        return started

    def _start(self, seq: Request) -> bool:
        others = [s for s in self.waiting.first(OTHERS + 1) if s is not seq]
        while True:
            try:
                plan = self.planner.first_leg(seq, self._budget(), others)
            except OutOfPages as error:
                if self._drop_optional():
                    continue
                if seq.composition is not None:
                    seq.start_without_segments()
                    continue
                if self.tiers.make_room():
                    continue
                if not (self.running or self.tiers.busy):
                    self.give_up(seq, error)
                self._full = seq.phase is not Phase.DONE
                return False
            if plan is None:
                return False
            self.waiting.remove(seq)
            self._begin(seq, plan)
            self.tiers.forget(seq.id)
            if plan.start:
                self.tiers.resumed(seq.namespace, seq.key, plan.start)
            return True

    # -- segments, finished answers, healing

    def _build_wanted(self) -> None:
        self._awaited.forget_all_but(set(self.wanted))  # others are not wanted any more
        held = self.tiers.hold_segments(self._awaited, [key for key in self.wanted if self.composer.find(key) is None])
        for key in [key for key in self.wanted if key not in held]:
            if not self._may_build() or not self._may_build_beside(key):
                return
            self.wanted.remove(key)
            self._awaited.forget(key)
            if self.composer.find(key) is None:
                self._build(key)

    def _may_build(self) -> bool:
        builds = sum(isinstance(seq, SegmentBuild) for seq in self.running.values())
        return builds < BUILDS_AT_ONCE and len(self.slots) > 0

    def _may_build_beside(self, key: SegmentKey) -> bool:
        """Return whether a segment is begun now: long ones one by one, so that each is there early (HYPIC, 4.4)."""
        building = sum(seq.n_prompt for seq in self.running.values() if isinstance(seq, SegmentBuild))
        return not building or building + key.tokens <= BUILT_TOGETHER

    def _build(self, key: SegmentKey) -> bool:
        """Begin to build a segment. False: there is no memory for it."""
        seq = self.composer.build(self.new_id(), key)
        if seq is None and self.tiers.make_room():
            seq = self.composer.build(self.new_id(), key)
        if seq is None:
            return False
        self._begin(seq, None)
        self._alone(self._plan_leg, seq)
        return True

    def _prefill_answers(self) -> None:
        while self.answers and len(self.running) - len(self._homes()) < ANSWERS_AT_ONCE:
            if not self._alone(self._begin_answer, self.answers.popleft()):
                return

    def _begin_answer(self, seq: FinishedAnswer) -> bool:
        """Begin an answer's prefill; without memory for it, drop it. False: the budget is used up."""
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

    def _may_heal(self) -> bool:
        if self._full or len(self.waiting) or self.answers or self.wanted:
            return False
        return self.healer.may_run(self.computing, len(self._homes()))

    def _heal(self) -> None:
        """Plan one leg of the prefix that is healed, or of the next one, in what the budget leaves."""
        unit = self.layout.unit_tokens
        budget = Budget(min(self._budget().tokens, max(self.limits.shared_step, unit)), 1)
        while budget.tokens >= unit and len(self.slots) and self._may_heal():
            seq = self.healer.current(self.new_id)
            if seq is None or self._alone(partial(self._plan_healing, budget), seq):
                return

    def _plan_healing(self, budget: Budget, seq: Recomputation) -> bool:
        """Plan one leg. False: none of this prefix is computed now."""
        try:
            plan = seq.next_leg(self.planner, budget)
        except OutOfPages:
            plan = None
            if self.computing:  # they need the memory: healing waits until one has left
                self._full = self._park_healing()
        if plan is None:
            self.cancel(seq)
        elif seq.slot is None:
            self._begin(seq, plan)
        else:
            self._put(seq, plan)
        return plan is not None
