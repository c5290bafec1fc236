"""Healing: the exact states of what was answered from composed ones are computed behind the session's back.

HYPIC leaves a session approximate for good. Here its prefix is prefilled once more when there is time, without segments
and under its exact key; then the composed one, which only this session can use, is given up.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from headwater.errors import OutOfPages
from headwater.schedule.planner import Cache
from headwater.schedule.sequence import Sequence, key_of
from headwater.types import CacheLayout, Draft, Generation, Healing, Plan, SamplingParams

QUEUED = 64  # prefixes that wait to be healed; where there are more, the one that waits longest is given up


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
        key = key_of(ended.tokens[:end])
        for other in tuple(self.queue):
            if other.namespace == ended.namespace and key.startswith(other.key):
                self.queue.remove(other)
                self.superseded += 1
        if len(self.queue) == QUEUED:
            self.queue.popleft()
            self.given_up += 1
        self.queue.append(Approximate(ended.namespace, key, ended.key_until(end), ended.marked_from))

    def stop(self) -> None:
        """Nothing more is healed."""
        self.when = Healing.OFF
        self.queue.clear()

    # -- one at a time

    def current(self, new_id: Callable[[], int]) -> Sequence | None:
        """What is being healed, or the next that can be; None where nothing is left."""
        while self.seq is None and self.queue:
            self._begin(self.queue.popleft(), new_id)
        return self.seq

    def _begin(self, one: Approximate, new_id: Callable[[], int]) -> None:
        """Up to the last checkpoint under marks, which is where the next turn would resume."""
        positions = self._positions(one)
        if not positions:
            self.given_up += 1
            return
        end = positions[-1]
        start = self._cache.match(one.key, end + 1, one.namespace).checkpoint_tokens
        if start >= end:
            self._replaced(one)
            return
        tokens = array("i", one.key)[:end]
        self.seq = Sequence(new_id(), Generation(tuple(tokens), SamplingParams(), one.namespace), samples=False)
        self.seq.computed, self.seq.checkpoints = start, positions
        self._healed = one

    def _positions(self, one: Approximate) -> tuple[int, ...]:
        """Of its checkpoints, those of approximate states."""
        there = self._cache.branches.checkpoints(one.marked, one.namespace)
        return tuple(at for at in there if at > one.marked_from)

    def next_leg(self, seq: Sequence, tokens: int) -> Plan | None:
        """At most so many tokens, up to the next place for a checkpoint; None where there is no memory for it."""
        one = self._healed
        assert one is not None, "a prefix that is healed is known"
        end = min(at for at in (*seq.checkpoints, seq.computed + tokens) if at > seq.computed)
        end = end // self._layout.unit_tokens * self._layout.unit_tokens
        draft = Draft(
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
        if not self._is_worth_it(one, seq, draft):
            return None
        try:
            plan = self._cache.reserve(draft)
        except OutOfPages:
            return None
        seq.planned = end
        one.rolling = None if end in seq.checkpoints else end
        return plan

    def _is_worth_it(self, one: Approximate, seq: Sequence, draft: Draft) -> bool:
        """Not once its own marked prefix is gone, or would go next to make room: all that is left ranks above it."""
        if seq.n_prompt not in self._positions(one):
            return False
        layout = self._layout
        kv = -(-(draft.end - draft.start) // layout.page_size) * layout.kv_pages_per_unit
        pages = kv + layout.checkpoint_pages + (layout.slot_pages if seq.slot is None else 0)
        return not self._cache.branches.would_evict(pages, one.marked, one.marked_from, one.namespace)

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
        if one is not None and self.when is not Healing.OFF:
            self.queue.appendleft(one)
        self.seq = self._healed = None
        return seq

    def ended(self, seq: Sequence) -> None:
        """It was cancelled; nothing happens where `seq` is not what is being healed."""
        if seq is self.seq:
            self.seq = self._healed = None
            self.given_up += 1
