"""Scheduler: plans each step, and publishes what it computed. Its parts choose which sequences run."""

from __future__ import annotations

from headwater.cache.placement.base import Placement
from headwater.cache.prefix_cache import PrefixCache
from headwater.draft.forced import Grammar
from headwater.errors import OutOfPages
from headwater.plan import Plan
from headwater.request import Generation, Healing
from headwater.schedule.admission import Admission
from headwater.schedule.background import Background
from headwater.schedule.decoding import Decoding
from headwater.schedule.kinds.abandoned import AbandonedPrefill
from headwater.schedule.kinds.answer import FinishedAnswer
from headwater.schedule.kinds.healing import Healer, Recomputation
from headwater.schedule.kinds.request import Request
from headwater.schedule.kinds.segment import Composing
from headwater.schedule.limits import RESERVED_SLOTS, Limits
from headwater.schedule.planner import DecodeReuse, Planner
from headwater.schedule.preemption import Preemption
from headwater.schedule.sequence import Phase, Purpose, Sequence
from headwater.schedule.speculation import Speculation
from headwater.schedule.step import Step
from headwater.schedule.tiers import Tiers
from headwater.schedule.workload import Workload


class Scheduler:
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
        self.cache, self.layout, self.placement, self.limits = cache, cache.layout, placement, limits
        self.decode_reuse = decode_reuse
        self.composer = composer or Composing()
        self.planner = planner = Planner(cache, placement, decode_reuse != "none")
        self.workload = workload = Workload(cache, limits)
        self.waiting, self.running, self.slots = workload.waiting, workload.running, workload.slots
        self.failures, self.computed = workload.failures, workload.computed
        self.healer = Healer(cache, healing)
        self.preemption = preemption = Preemption(workload, planner, self.healer)
        speculation = Speculation() if speculation is None else speculation
        self.decoding = Decoding(workload, planner, preemption, decode_reuse, speculation)
        self.background = Background(workload, planner, preemption, self.composer, self.healer)
        self.answers, self.wanted = self.background.answers, self.background.wanted
        self.admission = Admission(workload, planner, preemption, self.composer, self.background)

    @property
    def tiers(self) -> Tiers:
        """Stores below memory."""
        return self.workload.tiers

    @tiers.setter
    def tiers(self, tiers: Tiers) -> None:
        self.workload.tiers = tiers

    @property
    def computing(self) -> int:
        """Number of running sequences, without the one that is healed."""
        return self.workload.computing

    @property
    def preemptions(self) -> int:
        """Number of preemptions since the start."""
        return self.preemption.count

    @property
    def speculation(self) -> Speculation:
        """Drafts for decoding requests."""
        return self.decoding.speculation

    @speculation.setter
    def speculation(self, speculation: Speculation) -> None:
        self.decoding.speculation = speculation

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
        self.workload.shares.join(seq.tenant)
        self.workload.gate.may_have_changed()

    def new_id(self) -> int:
        """Return the next id. Ids grow with arrival."""
        return self.workload.new_id()

    def cached_of(self, seq: Request) -> int | None:
        """Return how many tokens of a waiting prompt's beginning are cached, as events announce: without a tail.

        None: it has segments, or is scored.
        """
        return None if seq.generation.segments or seq.scores_prompt else self.planner.match(seq).checkpoint_tokens

    def check_fits(self, tokens: int) -> None:
        """Raise RequestTooLarge if a prompt and its output, `tokens` together, could never be served."""
        self.limits.check_fits(tokens, self.layout)

    def finish(self, seq: Request) -> None:
        """End an answered request: free its memory, and queue the prefill after which the next turn resumes."""
        self.cancel(seq)
        self.speculation.remember(seq.namespace, seq.tokens[seq.n_prompt :])
        if seq.marked_from is not None:
            self.healer.remember(seq)
        keeps = self.decode_reuse == "canonical" and seq.generation.keep_output and not seq.scores_prompt
        end = seq.answer_end(self.layout) if keeps else None
        if end is not None:
            self.answers.add(seq.answer(self.new_id(), end), self.limits.max_running)
        if seq.generation.ended:
            self.planner.end_conversation(seq)

    def keep_answer(self, asked: Generation) -> None:
        """Queue the prefill of an answer that another engine has decoded, as `finish` does for its own answers.

        `asked`: the request, with prompt and answer as its prompt. Without tails only its whole pages are prefilled.
        """
        n = len(asked.prompt)
        end = n if self.layout.tail_pages else n // self.layout.unit_tokens * self.layout.unit_tokens
        if self.decode_reuse == "canonical" and end:
            self.answers.add(FinishedAnswer.of(self.new_id(), asked, asked.prompt[:end]), self.limits.max_running)

    def cancel(self, seq: Sequence) -> None:
        """End a sequence, and give back all that it holds. Call it between steps."""
        self.workload.cancel(seq)

    def leave(self, seq: Request, error: Exception | None = None) -> None:
        """End a request that its client or its deadline gave up; `failures` has the error, if one is given.

        A long prefill is first continued to the end of one more page, where it saves its state: the same request
        resumes there. Call it between steps.
        """
        rest = AbandonedPrefill.of(seq, self.cache)
        if rest is None:
            self.cancel(seq)
        else:
            self.workload.replace(seq, rest)
        if error is not None:
            self.failures.append((seq, error))

    def give_up(self, seq: Sequence, error: Exception) -> None:
        """End a sequence that cannot be served; `failures` has the error. Call it between steps."""
        self.workload.give_up(seq, error)

    def room_was_made(self) -> None:
        """Note that a load or a copy, which is not a running sequence, has given memory back."""
        self.workload.gate.may_have_changed()

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self.answers or self.wanted or self.healer.queue)

    # -- one step

    def plan_step(self) -> Step:
        """Plan rows of decoding sequences, legs of running prefills, new requests, then background work."""
        workload, has_background = self.workload, self._has_background
        workload.begin_step()
        if has_background:
            self.background.make_way()
        self.decoding.plan()
        prefills = (seq for seq in workload.in_phase(Phase.PREFILL) if not isinstance(seq, Recomputation))
        for seq in workload.shares.order(prefills):
            workload.guarded(self.preemption.plan_leg, seq)
        if not workload.gate.is_crowded:
            if has_background:
                self.background.build_wanted()
            if self.waiting:
                self.admission.admit()
            if has_background:
                self.background.use_rest()
        return workload.step()

    @property
    def _has_background(self) -> bool:
        """True if background work waits or runs."""
        wanted = self.wanted or self.background.awaited.outcomes
        return bool(wanted or self.answers or self.healer.queue or self.healer.seq)

    def finish_step(self, step: Step) -> list[Request]:
        """Publish what the step computed; return the requests whose next token is to be sampled, in its order.

        A sequence whose leg cannot be published fails, and is not among them.
        """
        sampled = [item.seq for item in step.sampled()]
        for leg in step.legs:
            self.workload.guarded(self._finish_leg, leg.seq)
        for decode in step.decodes:
            self.workload.guarded(self._finish_decode, decode.seq)
        failed = {seq.id for seq, _ in self.failures}
        return [seq for seq in sampled if isinstance(seq, Request) and seq.id not in failed]

    def _finish_leg(self, seq: Sequence) -> None:
        plan, copies = self.workload.legs[seq.id].plan, self.tiers.copies
        self.cache.commit(plan)
        del self.workload.legs[seq.id]
        if plan.tails:  # they can be evicted now
            self.workload.gate.may_have_changed()
        if plan.build is None:
            copies.saved(seq.namespace, seq.key, self._resumable(seq, plan), plan.tails)
        segments = seq.segments_of(plan)
        if segments:
            (copies.reused if plan.build is None else copies.built)(segments)
        self.workload.count(seq, seq.purpose, plan.computed_tokens)
        seq.leg_ended(plan)
        if seq.computed == seq.n_prompt:
            phase = seq.prefill_ended()
            if phase is Phase.DONE:
                self.cancel(seq)
            else:
                seq.phase = phase

    def _resumable(self, seq: Sequence, plan: Plan) -> list[int]:
        """Return the positions of a leg from which later requests are likely to resume: speculative ones are not."""
        if not self.layout.is_stateless:
            return [save.position for save in plan.saves if save.position in seq.checkpoints]
        end = min(plan.end, seq.last_resumable) // self.layout.unit_tokens * self.layout.unit_tokens
        return [end] if end and plan.end == seq.n_prompt else []

    def _finish_decode(self, seq: Sequence) -> None:
        decode = self.workload.decodes[seq.id]
        if decode.plan is not None:
            self.cache.commit(decode.plan)
        del self.workload.decodes[seq.id]
        self.workload.count(seq, Purpose.DECODE, decode.rows)
        seq.computed += decode.count
        seq.accepted = 0

    def accept(self, seq: Request, drafted: int, right: int) -> None:
        """Keep the first `right` of a request's drafts, whose tokens it has; call it after `finish_step`."""
        seq.computed += right
        seq.accepted = right
        self.speculation.learn(seq.speculator, drafted, right)

    def abandon_step(self, step: Step) -> list[Sequence]:
        """Close the plans of a step that failed, and give back all that its sequences hold; return these."""
        failed = [item.seq for item in step.items if item.seq.phase is not Phase.DONE]
        for seq in failed:
            self.cancel(seq)
        return failed

    # -- steps that only decode, for a virtual clock

    def free_steps(self, most: int) -> int:
        """Return how many of the next steps, at most `most`, decode one token of each sequence, and publish no page.

        None if there are drafts: how many tokens they give is known step by step.
        """
        running, unit = self.running.values(), self.layout.unit_tokens
        if (
            self.speculation
            or self.answers
            or self.wanted
            or any(seq.phase is not Phase.DECODE or seq.uncomputed > 1 for seq in running)
        ):
            return 0
        if self.waiting and len(running) < self.limits.max_running + RESERVED_SLOTS:
            return 0
        if self.decode_reuse == "raw":
            most = min(most, *(unit - 1 - seq.computed % unit for seq in running))
        return most

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
            self.workload.count(seq, Purpose.DECODE, steps)
