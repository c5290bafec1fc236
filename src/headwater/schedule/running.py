"""Running sequences: what they share, and how each joins and leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from headwater.errors import PlanClosed
from headwater.plan import Plan
from headwater.request import Healing
from headwater.schedule.kinds.healing import HEALERS, Recomputation
from headwater.schedule.kinds.request import Request
from headwater.schedule.limits import EXTRA_SLOTS, Budget, Limits
from headwater.schedule.planner import DecodeReuse, Planner
from headwater.schedule.queue import Queue, Shares
from headwater.schedule.sequence import Phase, Purpose, Sequence
from headwater.schedule.speculation import Speculation
from headwater.schedule.step import Decode, Leg, SlotIds
from headwater.schedule.tiers import Tiers

AnySequence = TypeVar("AnySequence", bound=Sequence)


class RunningSequences:
    """Sequences that share slots, pages and the step that is being planned."""

    def __init__(
        self, planner: Planner, limits: Limits, decode_reuse: DecodeReuse, healing: Healing, speculation: Speculation
    ) -> None:
        self.planner, self.cache, self.layout = planner, planner.cache, planner.layout
        self.limits, self.decode_reuse, self.speculation = limits, decode_reuse, speculation
        self.waiting = Queue()
        self.running: dict[int, Sequence] = {}  # in PREFILL and DECODE, by id
        self.shares = Shares()
        self.slots = SlotIds(limits.max_running + EXTRA_SLOTS)
        self.healer = HEALERS[healing](self.cache)
        self.failures: list[tuple[Sequence, Exception]] = []  # sequences that were given up; the engine reports them
        self.tiers = Tiers()
        self.preemptions = 0
        self.computed: Counter[Purpose] = Counter()  # tokens
        self._legs: dict[int, Leg] = {}
        self._decodes: dict[int, Decode] = {}
        self._crowded = False  # after a preemption none is admitted until a sequence has left
        self._full = False  # memory was short for the next request: admission waits for an arrival or a departure

    @property
    def computing(self) -> int:
        """Number of running sequences, without what is healed."""
        return sum(not isinstance(seq, Recomputation) for seq in self.running.values())

    def _homes(self) -> list[str]:
        """Return the namespace of each running request."""
        return [seq.namespace for seq in self.running.values() if isinstance(seq, Request)]

    def _budget(self) -> Budget:
        """Return what the step has left for prefill; a step on which several requests wait is short."""
        used = sum(leg.plan.computed_tokens for leg in self._legs.values())
        saves = sum(len(leg.plan.saves) for leg in self._legs.values())
        alone, unit = len(self._homes()) + len(self.waiting) <= 1, self.layout.unit_tokens
        most = self.limits.tokens_per_step if alone else min(self.limits.tokens_per_step, self.limits.shared_step)
        rows = sum(decode.rows for decode in self._decodes.values())
        tokens = max(unit, (most - rows) // unit * unit)
        return Budget(max(0, tokens - used), self.limits.saves_per_step - saves)

    def _prefills(self) -> list[Sequence]:
        return [seq for seq in self.running.values() if seq.phase is Phase.PREFILL]

    def _count(self, seq: Sequence, purpose: Purpose, tokens: int) -> None:
        self.computed[purpose] += tokens
        self.shares.charge(seq.charged_to, tokens)

    # -- joining and leaving

    def room_was_made(self) -> None:
        """Note that a load or a copy, which is no running sequence, has given memory back."""
        self._full = False

    def _begin(self, seq: Sequence, plan: Plan | None) -> None:
        """Give a sequence a slot, and its first leg, if there is one, a place in the step."""
        seq.phase, seq.slot = Phase.PREFILL, self.slots.take()
        self.running[seq.id] = seq
        if plan is not None:
            seq.computed = plan.start
            self._put(seq, plan)

    def _put(self, seq: Sequence, plan: Plan) -> None:
        """Put a leg into the step."""
        seq.table = plan.table
        self._legs[seq.id] = Leg(seq, plan)

    def _let_go(self, seq: Sequence) -> None:
        """Take a running sequence out of the step, and give back its pages, slot and segments."""
        held = self._legs.pop(seq.id, None) or self._decodes.pop(seq.id, None)
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
        self._crowded = self._full = False

    def cancel(self, seq: Sequence) -> None:
        """Give back all that a sequence holds. Call it between steps."""
        if seq.phase is Phase.DONE:
            return
        if seq.id in self.running:
            self._let_go(seq)
        elif isinstance(seq, Request):
            self.waiting.remove(seq)
            seq.release_segments()
            self.tiers.forget(seq.id)
            self._full = False
        if isinstance(seq, Request):
            self.shares.leave(seq.namespace)
        seq.phase = Phase.DONE
        seq.ended()

    def give_up(self, seq: Sequence, error: Exception) -> None:
        """End a sequence that cannot be served, and note why in `failures`. Call it between steps, or in planning."""
        self.cancel(seq)
        self.failures.append((seq, error))

    def _alone(self, plan: Callable[[AnySequence], bool | None], seq: AnySequence) -> bool:
        """Plan for one sequence. An unforeseen error ends this sequence alone."""
        try:
            return bool(plan(seq))
        except Exception as error:
            self.give_up(seq, error)
            return True
