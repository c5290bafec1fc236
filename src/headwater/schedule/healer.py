"""Healing: the exact states of what was answered from composed ones are computed behind the session's back.

HYPIC leaves a session approximate for good. Here its prefix is prefilled once more when there is time, without segments
and under its exact key; then the composed one, which only this session can use, is given up.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from headwater.cache.branch import Place
from headwater.plan import CacheLayout, Draft, Plan
from headwater.request import Generation, Healing, SamplingParams
from headwater.schedule.planner import Cache
from headwater.schedule.sequence import Sequence, key_of

QUEUED = 64  # prefixes that are or wait to be healed; where there are more, the one that waits longest is given up


@dataclass(slots=True, eq=False)
class Approximate:
    """A prefix of whole units that is cached under marks."""

    namespace: str
    key: bytes
    marked: bytes
    marked_from: int
    rolling: int | None = None  # where its exact prefill saved its state to go on from, and nobody else's checkpoint is


class Healer:
    """What is to be healed, in the order of its requests' ends, and the one prefix at a time that is.

    Each leg ends in a checkpoint, which takes the place of the leg's before: so it may be parked after any of them.
    """

    def __init__(self, cache: Cache, layout: CacheLayout, when: Healing) -> None:
        self.when = when
        self.queue: deque[Approximate] = deque()
        self.seq: Sequence | None = None  # what is being healed
        self.healed = 0  # prefixes that are cached exactly now
        self.superseded = 0  # their sessions went on: the longer prefix is healed
        self.given_up = 0  # no memory for them, or their own was wanted for others
        self.tokens = 0  # computed
        self._cache, self._layout = cache, layout
        self._healed: Approximate | None = None  # as `seq`

    def remember(self, ended: Sequence) -> None:
        """A request was answered: if it is cached under marks, it is to be healed."""
        unit = self._layout.unit_tokens
        end = ended.known_tokens // unit * unit
        if self.when is Healing.OFF or ended.marked_from is None or end <= ended.marked_from:
            return
        marked = ended.key_until(end)
        for other in tuple(self.queue):
            if other.namespace == ended.namespace and marked.startswith(other.marked):
                self.queue.remove(other)
                self.superseded += 1
        if self.queue and len(self.queue) + (self.seq is not None) >= QUEUED:
            self.queue.popleft()
            self.given_up += 1
        self.queue.append(Approximate(ended.namespace, key_of(ended.tokens[:end]), marked, ended.marked_from))

    def stop(self) -> None:
        """Nothing more is healed."""
        self.when = Healing.OFF
        self.given_up += len(self.queue)
        self.queue.clear()

    # -- one at a time

    def current(self, new_id: Callable[[], int]) -> Sequence | None:
        """What is being healed, or the next in the queue; None where nothing is left. Asks the cache nothing."""
        if self.seq is None and self.queue:
            one = self._healed = self.queue.popleft()
            generation = Generation(tuple(array("i", one.key)), SamplingParams(), one.namespace)
            self.seq = Sequence(new_id(), generation, samples=False)
        return self.seq

    def next_leg(self, seq: Sequence, tokens: int) -> Plan | None:
        """At most so many tokens, up to the next place for a checkpoint.

        None where there is no memory for it; or where nothing is left to do, and `seq` is not what is healed any more.
        """
        one = self._healed
        assert one is not None, "a prefix that is healed is known"
        there = self._positions(one)
        if not there or (seq.checkpoints and seq.n_prompt not in there):
            self.ended(seq)
            return None
        if not seq.checkpoints and not self._begin(seq, one, there):
            self.completed(seq)
            return None
        draft = self._draft(seq, one, tokens)
        if not self._make_room(seq, one, draft):
            return None
        plan = self._cache.reserve(draft)
        seq.planned = draft.end
        one.rolling = None if draft.end in seq.checkpoints else draft.end
        return plan

    def _positions(self, one: Approximate) -> tuple[int, ...]:
        """Of its checkpoints, those of approximate states."""
        there = self._cache.branches.checkpoints(one.marked, one.namespace)
        return tuple(at for at in there if at > one.marked_from)

    def _begin(self, seq: Sequence, one: Approximate, there: tuple[int, ...]) -> bool:
        """Up to the last checkpoint under marks, where the next turn would resume. False: that is exact already."""
        seq.cut(there[-1])
        seq.checkpoints = there
        seq.computed = self._cache.match(one.key, seq.n_prompt + 1, one.namespace).checkpoint_tokens
        return seq.computed < seq.n_prompt

    def _draft(self, seq: Sequence, one: Approximate, tokens: int) -> Draft:
        end = min(at for at in (*seq.checkpoints, seq.computed + tokens) if at > seq.computed)
        end = end // self._layout.unit_tokens * self._layout.unit_tokens
        return Draft(
            request=seq.id,
            namespace=seq.namespace,
            key=seq.key,
            start=seq.computed,
            end=end,
            checkpoints=(end,),
            slot=True,
            publish=end,
            replaces=one.rolling if one.rolling == seq.computed else None,
            counts=False,
            hold_checkpoint=False,
        )

    def _make_room(self, seq: Sequence, one: Approximate, draft: Draft) -> bool:
        """Not with its own marked prefix: once that would go next, all that is left ranks above it."""
        layout = self._layout
        kv = -(-(draft.end - draft.start) // layout.page_size) * layout.kv_pages_per_unit
        states = layout.checkpoint_pages + (layout.slot_pages if seq.slot is None else 0)
        marked = Place(one.namespace, one.marked, one.marked_from)
        resume = Place(one.namespace, seq.key, draft.start)
        return self._cache.branches.make_room_below(kv, states, marked, resume)

    # -- its ends

    def completed(self, seq: Sequence) -> None:
        """All of it is cached; nothing happens where `seq` is not what is being healed."""
        if seq is self.seq and self._healed is not None:
            self._replaced(self._healed)
            self.seq = self._healed = None

    def _replaced(self, one: Approximate) -> None:
        self._cache.branches.drop(one.marked, one.marked_from, one.namespace)
        self.healed += 1

    def park(self) -> Sequence | None:
        """It is to go on later, and first. Returns what was being healed."""
        seq, one = self.seq, self._healed
        if one is not None and self.when is Healing.OFF:
            self.given_up += 1
        elif one is not None:
            self.queue.appendleft(one)
        self.seq = self._healed = None
        return seq

    def ended(self, seq: Sequence) -> None:
        """It was cancelled, or cannot be healed; nothing happens where `seq` is not what is being healed."""
        if seq is self.seq:
            self.seq = self._healed = None
            self.given_up += 1
