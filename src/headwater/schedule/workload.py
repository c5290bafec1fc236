"""Workload of a scheduler: the queue of requests, fair shares, sequences that run, and the step planned for them.

A tenant is an API key of several, or a namespace. Its requests begin in order of arrival. Between tenants, a virtual
counter is raised by the tokens that are computed for each, divided by its share; the tenant with the lowest is next, so
that a flood of requests of one does not starve another. A tenant that was idle starts no lower than the lowest active
one, or, if none is active, than the one that left last: idle time earns no credit (virtual token counter: Sheng et al.,
"Fairness in Serving Large Language Models", OSDI 2024, algorithm 2).
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import suppress
from heapq import heapify, heappop, heappush
from typing import TypeVar

from headwater.cache.prefix_cache import PrefixCache
from headwater.errors import PlanClosed
from headwater.plan import Plan
from headwater.schedule.kinds.healing import Recomputation
from headwater.schedule.kinds.request import Request
from headwater.schedule.limits import EXTRA_SLOTS, Budget, Limits
from headwater.schedule.sequence import Phase, Purpose, Sequence
from headwater.schedule.step import Decode, Leg, SlotIds, Step
from headwater.schedule.tiers import Tiers

AnySequence = TypeVar("AnySequence", bound=Sequence)
MAX_IDLE_TENANTS = 1024  # whose counters are remembered


class Queue(list[Request]):
    """Waiting requests in order of arrival (ids grow with arrival); a preempted one returns to its old place."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[str, list[Request]] = {}  # the same, by tenant

    def push(self, seq: Request) -> None:
        """Queue a request."""
        for line in (self, self._lines.setdefault(seq.tenant, [])):
            insort(line, seq, key=lambda s: s.id)

    def remove(self, seq: Request) -> None:
        """Take a request out. KeyError or ValueError if it does not wait."""
        line = self._lines[seq.tenant]
        super().remove(seq)
        line.remove(seq)
        if not line:
            del self._lines[seq.tenant]

    def fronts(self, count: int, without: Container[str] = ()) -> list[Request]:
        """Return the first `count` requests of each tenant that is not in `without`."""
        return [seq for name, line in self._lines.items() if name not in without for seq in line[:count]]

    def displaced_by(self, tenant: str) -> Request | None:
        """Return the request that leaves a full queue for a new one of `tenant`.

        It is the last one of the tenant with most waiting requests. None if that is `tenant`, or would be with the new
        request, or if the answers of all its requests have begun.
        """
        counts = Counter({name: len(line) for name, line in self._lines.items()})
        longest = max(counts, key=lambda name: counts[name], default=tenant)
        if counts[longest] <= counts[tenant] + 1:
            return None
        waiting = (seq for seq in reversed(self) if seq.tenant == longest)
        return next((seq for seq in waiting if not (seq.preemptions or seq.handover.begun)), None)


class Shares:
    """Tokens computed by tenant, divided by its share."""

    def __init__(self) -> None:
        self._served: OrderedDict[str, float] = OrderedDict()  # the most recently active last
        self._open: dict[str, int] = {}  # requests that wait or run
        self._level = 0.0  # counter of the tenant that left last, when no other was active

    def __len__(self) -> int:
        return len(self._served)

    def join(self, tenant: str) -> None:
        """Note that a request of `tenant` arrived."""
        if tenant not in self._open:
            least = min((self._served[name] for name in self._open), default=self._level)
            self._served[tenant] = max(self._served.get(tenant, 0), least)
        self._open[tenant] = self._open.get(tenant, 0) + 1
        self._served.move_to_end(tenant)

    def leave(self, tenant: str) -> None:
        """Note that a request of `tenant` ended."""
        self._open[tenant] -= 1
        if not self._open[tenant]:
            del self._open[tenant]
        if not self._open:
            self._level = self._served[tenant]
        if len(self._served) > MAX_IDLE_TENANTS + len(self._open):
            del self._served[next(name for name in self._served if name not in self._open)]

    def charge(self, tenant: str | None, tokens: float) -> None:
        """Raise a tenant's counter by `tokens` divided by its share. None, or one forgotten, has no counter."""
        if tenant is not None and tenant in self._served:
            self._served[tenant] += tokens

    def order(self, seqs: Iterable[AnySequence]) -> Iterator[AnySequence]:
        """Yield the next sequence of the tenant with the lowest counter; within one, in order of arrival.

        Each sequence that was yielded counts with the tokens that it may still compute.
        """
        lines: dict[str, list[AnySequence]] = {}
        for seq in sorted(seqs, key=lambda s: s.id, reverse=True):
            lines.setdefault(seq.tenant, []).append(seq)
        heap = [(self._served.get(name, 0), line[-1].id, line) for name, line in lines.items()]
        heapify(heap)
        while heap:
            served, _, line = heappop(heap)
            seq = line.pop()
            if line:
                heappush(heap, (served + (len(seq.tokens) - seq.computed) / seq.generation.share, line[-1].id, line))
            yield seq


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
        """Return the tenant of each running request."""
        return [seq.tenant for seq in self.running.values() if isinstance(seq, Request)]

    def in_phase(self, phase: Phase) -> list[Sequence]:
        """Return the running sequences in a phase."""
        return [seq for seq in self.running.values() if seq.phase is phase]

    def count(self, seq: Sequence, purpose: Purpose, tokens: int) -> None:
        """Count computed tokens, and charge them to the sequence's tenant."""
        self.computed[purpose] += tokens
        self.shares.charge(seq.charged_to, tokens / seq.generation.share)

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
            self.shares.leave(seq.tenant)
        seq.phase = Phase.DONE
        seq.ended()

    def replace(self, seq: Request, rest: Sequence) -> None:
        """End a running request, and let `rest`, which has its id, continue with all that it holds."""
        self.running[seq.id] = rest
        seq.slot = None
        self.shares.leave(seq.tenant)
        seq.phase = Phase.DONE
        seq.ended()

    def give_up(self, seq: Sequence, error: Exception) -> None:
        """End a sequence that cannot be served, with an entry in `failures`. Call it between steps, or in planning."""
        self.cancel(seq)
        self.failures.append((seq, error))
