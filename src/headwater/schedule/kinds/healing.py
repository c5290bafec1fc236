"""Healing: exact recomputation, in idle time, of prefixes that were answered from composed states.

HYPIC leaves such a session approximate for good. Here its prefix is prefilled again without segments, under its exact
key. Then the approximate prefix, which no other session can use, is given up.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from headwater.cache.prefix_cache import PrefixCache
from headwater.plan import Draft, Place, Plan, Saving, Sharing
from headwater.request import Generation, Healing, SamplingParams
from headwater.schedule.kinds.request import Request
from headwater.schedule.limits import Budget
from headwater.schedule.sequence import Legs, Phase, Purpose, Sequence, key_of

MAX_QUEUED = 64  # prefixes that are healed or wait for it; the one that has waited longest is given up for another


@dataclass(slots=True, eq=False)
class Approximate:
    """A prefix of whole units that is cached under marks."""

    namespace: str
    key: bytes
    marked: bytes
    marked_from: int
    rolling: int | None = None  # position of the checkpoint of the last leg, if it is of no use to later requests


class Recomputation(Sequence):
    """The exact prefill of one approximate prefix. Its tokens are charged to no namespace.

    Each leg ends in a checkpoint, which replaces that of the leg before: so it may be parked after any leg.
    """

    purpose = Purpose.HEALING

    def __init__(self, id: int, prefix: Approximate, healer: Healer, cache: PrefixCache) -> None:
        super().__init__(id, Generation(tuple(array("i", prefix.key)), SamplingParams(), prefix.namespace))
        self.prefix, self.healer = prefix, healer
        self.settled = False  # healed, or parked
        self._cache = cache

    @property
    def charged_to(self) -> None:
        return None

    def next_leg(self, legs: Legs, budget: Budget) -> Plan | None:
        """Reserve a leg up to the next checkpoint position. None: nothing is left to do. Raises OutOfPages."""
        positions = self._positions()
        if not positions or (self.checkpoints and self.n_prompt not in positions):
            return None
        if not self.checkpoints and not self._begin(positions):
            self.healer.completed(self)
            return None
        draft = self._draft(budget.tokens)
        plan = self._cache.reserve(draft)
        self.planned = draft.end
        self.prefix.rolling = None if draft.end in self.checkpoints else draft.end
        return plan

    def _positions(self) -> tuple[int, ...]:
        """Return the positions of the prefix's approximate checkpoints."""
        cached = self._cache.branches.checkpoints(self.prefix.marked, self.namespace)
        return tuple(at for at in cached if at > self.prefix.marked_from)

    def _begin(self, positions: tuple[int, ...]) -> bool:
        """Cut the prefix at its last checkpoint, where the next turn resumes. False: that is cached exactly."""
        self.generation = replace(self.generation, prompt=self.generation.prompt[: positions[-1]])
        self.__post_init__()
        self.checkpoints = positions
        self.computed = self._cache.match(self.prefix.key, self.n_prompt + 1, self.namespace).checkpoint_tokens
        return self.computed < self.n_prompt

    def _draft(self, tokens: int) -> Draft:
        unit, prefix = self._cache.layout.unit_tokens, self.prefix
        end = min(at for at in (*self.checkpoints, self.computed + tokens) if at > self.computed) // unit * unit
        return Draft(
            request=self.id,
            namespace=self.namespace,
            key=self.key,
            start=self.computed,
            end=end,
            publish=end,
            saving=Saving((end,), replaces=prefix.rolling if prefix.rolling == self.computed else None),
            slot=True,
            sharing=Sharing(counts=False, hold_checkpoint=False),
            spares=Place(self.namespace, prefix.marked, prefix.marked_from),
        )

    def prefill_ended(self) -> Phase:
        self.healer.completed(self)
        return Phase.DONE

    def ended(self) -> None:
        self.healer.ended(self)


class Healer:
    """Prefixes to heal, in the order of their requests' ends. One at a time is recomputed."""

    def __init__(self, cache: PrefixCache, healing: Healing) -> None:
        self.healing = healing
        self.queue: deque[Approximate] = deque()
        self.seq: Recomputation | None = None  # the one that is being healed
        self.healed = 0  # prefixes that are cached exactly now
        self.superseded = 0  # prefixes of sessions that continued: the longer prefix is healed
        self.given_up = 0  # for want of memory, because healing stopped, or the approximate prefix was evicted
        self._cache = cache

    def may_run(self, computing: int, requests: int) -> bool:
        """Return whether to heal beside `computing` other sequences, of which `requests` are requests."""
        if self.healing is Healing.ALWAYS:
            return computing == requests
        return self.healing is Healing.IDLE and not computing

    def stop(self) -> None:
        """Heal no more prefixes: those in the queue are given up, as is the current one once it is parked."""
        self.healing = Healing.OFF
        self.given_up += len(self.queue)
        self.queue.clear()

    def remember(self, ended: Request) -> None:
        """Queue an answered request's prefix, if it is cached under marks."""
        unit = self._cache.layout.unit_tokens
        end = ended.known_tokens // unit * unit
        if self.healing is Healing.OFF or ended.marked_from is None or end <= ended.marked_from:
            return
        marked = ended.key_until(end)
        for other in tuple(self.queue):
            if other.namespace == ended.namespace and marked.startswith(other.marked):
                self.queue.remove(other)
                self.superseded += 1
        if self.queue and len(self.queue) + (self.seq is not None) >= MAX_QUEUED:
            self.queue.popleft()
            self.given_up += 1
        self.queue.append(Approximate(ended.namespace, key_of(ended.tokens[:end]), marked, ended.marked_from))

    def current(self, new_id: Callable[[], int]) -> Recomputation | None:
        """Return the prefix that is being healed, or the next in the queue; None if there is none. Reads no cache."""
        if self.seq is None and self.queue:
            self.seq = Recomputation(new_id(), self.queue.popleft(), self, self._cache)
        return self.seq

    def completed(self, seq: Recomputation) -> None:
        """Give up the approximate copy of a prefix that is cached exactly now."""
        prefix = self._settle(seq)
        self._cache.branches.drop(prefix.marked, prefix.marked_from, prefix.namespace)
        self.healed += 1

    def park(self) -> Recomputation | None:
        """Return the prefix that is being healed, which is the first of the queue again, or given up."""
        seq = self.seq
        if seq is not None:
            prefix = self._settle(seq)
            if self.healing is Healing.OFF:
                self.given_up += 1
            else:
                self.queue.appendleft(prefix)
        return seq

    def ended(self, seq: Recomputation) -> None:
        """Note that `seq` left. Unless it was healed or parked, its prefix is given up."""
        if not seq.settled:
            self._settle(seq)
            self.given_up += 1

    def _settle(self, seq: Recomputation) -> Approximate:
        seq.settled, self.seq = True, None
        return seq.prefix
