"""Workload of a scheduler: requests that wait, sequences that run, and the step that is planned for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from headwater.cache.prefix_cache import PrefixCache
from headwater.errors import PlanClosed
from headwater.plan import Plan
from headwater.schedule.kinds.healing import Recomputation
from headwater.schedule.kinds.request import Request
from headwater.schedule.limits import EXTRA_SLOTS, Budget, Limits
from headwater.schedule.queue import Queue, Shares
from headwater.schedule.sequence import Phase, Purpose, Sequence
from headwater.schedule.step import Decode, Leg, SlotIds, Step
from headwater.schedule.tiers import Tiers

AnySequence = TypeVar("AnySequence", bound=Sequence)


class AdmissionGate:
    """Reasons for which no waiting request begins, each of which ends with an event and not with time."""

    def __init__(self) -> None:
        self.is_crowded = False  # a request was preempted, and no sequence has left since
        self.is_full = False  # memory was short for the next request, and nothing has arrived, left or been freed since

    def memory_ran_out(self) -> None:
        """Note that the next request finds no memory."""
        self.is_full = True

    def may_have_changed(self) -> None:
        """Note that a request arrived or ended, or that a load or a copy gave memory back."""
        self.is_full = False

    def sequence_left(self) -> None:
        """Note that a running sequence gave back its memory."""
        self.is_crowded = self.is_full = False


class Workload:
    """Sequences of a scheduler, which share slots, pages and the next step. All parts of the scheduler work on it."""

    def __init__(self, cache: PrefixCache, limits: Limits) -> None:
        self.cache, self.layout, self.limits = cache, cache.layout, limits
        self.waiting = Queue()
        self.running: dict[int, Sequence] = {}  # in PREFILL and DECODE, by id
        self.shares = Shares()
        self.slots = SlotIds(limits.max_running + EXTRA_SLOTS)
        self.gate = AdmissionGate()
        self.tiers = Tiers()
        self.failures: list[tuple[Sequence, Exception]] = []  # sequences that were given up and are not reported yet
        self.computed: Counter[Purpose] = Counter()  # tokens
        self.legs: dict[int, Leg] = {}  # of the next step, by sequence
        self.decodes: dict[int, Decode] = {}
        self._last_id = 0

    def new_id(self) -> int:
        """Return the next id. Ids grow with arrival."""
        self._last_id += 1
        return self._last_id

    @property
    def computing(self) -> int:
        """Number of running sequences, without the one that is healed."""
        return sum(not isinstance(seq, Recomputation) for seq in self.running.values())

    def homes(self) -> list[str]:
        """Return the namespace of each running request."""
        return [seq.namespace for seq in self.running.values() if isinstance(seq, Request)]

    def in_phase(self, phase: Phase) -> list[Sequence]:
        """Return the running sequences in a phase."""
        return [seq for seq in self.running.values() if seq.phase is phase]

    def count(self, seq: Sequence, purpose: Purpose, tokens: int) -> None:
        """Count computed tokens, and charge them to the sequence's namespace."""
        self.computed[purpose] += tokens
        self.shares.charge(seq.charged_to, tokens)

    # -- the next step

    def begin_step(self) -> None:
        """Empty the step that is planned."""
        self.legs, self.decodes = {}, {}

    def step(self) -> Step:
        """Return the planned step: decoding sequences by slot, so that adjacent states are read together."""
        by_slot = sorted(self.decodes.values(), key=lambda one: one.seq.slot or 0)
        return Step(tuple(self.legs.values()), tuple(by_slot))

    def budget(self) -> Budget:
        """Return what the step has left for prefill. A step for which several requests wait is short."""
        used = sum(leg.plan.computed_tokens for leg in self.legs.values())
        saves = sum(len(leg.plan.saves) for leg in self.legs.values())
        is_shared, unit = len(self.homes()) + len(self.waiting) > 1, self.layout.unit_tokens
        tokens = self.limits.tokens_per_step
        if is_shared:
            tokens = min(tokens, self.limits.shared_step)
        rows = sum(decode.rows for decode in self.decodes.values())
        tokens = max(unit, (tokens - rows) // unit * unit)
        return Budget(max(0, tokens - used), self.limits.saves_per_step - saves)

    def guarded(self, plan: Callable[[AnySequence], bool | None], seq: AnySequence) -> bool:
        """Call `plan` for one sequence. An unforeseen error ends only this sequence, and counts as True."""
        try:
            return bool(plan(seq))
        except Exception as error:
            self.give_up(seq, error)
            return True

    # -- sequences that begin and leave

    def begin(self, seq: Sequence, plan: Plan | None) -> None:
        """Give a sequence a slot, and add its first leg, if there is one, to the step."""
        seq.phase, seq.slot = Phase.PREFILL, self.slots.take()
        self.running[seq.id] = seq
        if plan is not None:
            seq.computed = plan.start
            self.add_leg(seq, plan)

    def add_leg(self, seq: Sequence, plan: Plan) -> None:
        """Add a leg to the step."""
        seq.table = plan.table
        self.legs[seq.id] = Leg(seq, plan)

    def release(self, seq: Sequence) -> None:
        """Remove a running sequence from the step, and give back its pages, slot and segments."""
        held = self.legs.pop(seq.id, None) or self.decodes.pop(seq.id, None)
        seq.release_segments()
        seq.release_tail()
        if held is not None and held.plan is not None:
            with suppress(PlanClosed):  # its commit failed
                self.cache.abandon(held.plan)
        self.cache.release(seq.id)
        if seq.slot is not None:
            self.slots.give(seq.slot)
            seq.slot = None
        del self.running[seq.id]
        self.gate.sequence_left()

    def cancel(self, seq: Sequence) -> None:
        """End a sequence, and give back all that it holds. Call it between steps."""
        if seq.phase is Phase.DONE:
            return
        if seq.id in self.running:
            self.release(seq)
        elif isinstance(seq, Request):
            self.waiting.remove(seq)
            seq.release_segments()
            self.tiers.forget(seq.id)
            self.gate.may_have_changed()
        if isinstance(seq, Request):
            self.shares.leave(seq.namespace)
        seq.phase = Phase.DONE
        seq.ended()

    def replace(self, seq: Request, rest: Sequence) -> None:
        """End a running request, and let `rest`, which has its id, continue with all that it holds."""
        self.running[seq.id] = rest
        seq.slot = None
        self.shares.leave(seq.namespace)
        seq.phase = Phase.DONE
        seq.ended()

    def give_up(self, seq: Sequence, error: Exception) -> None:
        """End a sequence that cannot be served, with an entry in `failures`. Call it between steps, or in planning."""
        self.cancel(seq)
        self.failures.append((seq, error))
