"""Evictor: decides whether room can be made, and carries out what the eviction policy chooses.

Three operations of the cache evict. `reserve` makes room, for legs, segments and healing alike. `commit` gives up what
the policy's own cap excludes now that a path was committed (`path_cap`, `last_n`). `lend` gives pages to another cache
of the process. Anywhere else eviction raises.

`keep` are nodes that stay as they are: eviction stops before the first of them is chosen, and returns False.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from headwater.cache.eviction.base.policy import Eviction, Kind, Room, Victim
from headwater.cache.eviction.base.worth import Worth
from headwater.cache.history import History
from headwater.cache.index import Index
from headwater.cache.lease import Lease
from headwater.cache.node import Node, StoredTail
from headwater.cache.pool import Pool
from headwater.cache.segments.store import SegmentStore
from headwater.cache.survey import Survey
from headwater.cache.tails import Tails
from headwater.errors import OutOfPages

Nodes = AbstractSet[Node]
NONE: Nodes = frozenset()


class Evictor:
    """Moves pages of the index and of stored segments to the pool."""

    def __init__(
        self,
        index: Index,
        pool: Pool,
        policy: Eviction,
        segments: SegmentStore,
        tails: Tails,
        leases: Mapping[int, Lease],
        history: History | None = None,
    ) -> None:
        self._index, self._pool, self._policy, self._history = index, pool, policy, history
        self._segments, self._tails, self._leases = segments, tails, leases
        self._layout, self._worth = segments.layout, Worth(segments.layout)
        self.checkpoints = 0  # evicted so far
        self.speculative = 0  # of them
        self.kv_pages = 0
        self._price = 0.0  # see `_note_price`
        self.reuse: Counter[int] = Counter()  # evicted checkpoints by the number of requests that resumed there
        self.reserving = False  # whether room may be made: only `reserve` permits it, while it runs

    # ---- whether there is room

    def require_room(self, survey: Survey, letting_go: Lease | None = None) -> None:
        """Raise OutOfPages unless eviction could make room. `letting_go` is a lease that gives up its checkpoint."""
        kv, states, shortage = survey.kv, survey.states, self._pool.shortage
        if shortage(kv, states) is None or shortage(kv, states, self._surely_evictable(survey)) is None:
            return
        lacking = shortage(kv, states, self.evictable(survey, letting_go))
        if lacking is not None:
            raise OutOfPages(*lacking)

    def _surely_evictable(self, survey: Survey) -> tuple[int, int]:
        """Return a fast lower bound of `evictable`: as if no two leases had a page in common."""
        named = max(survey.end, 0 if survey.mid_page is None else survey.mid_page.node.end)
        for lease in self._leases.values():
            end = lease.deep or lease.node
            named += 0 if end is None else end.end
        checkpoints = self._index.checkpoints - len(self._leases) - 1
        kv = max(0, self._index.kv_pages - named * self._index.unit_pages)
        return self._with_segments(kv, max(0, checkpoints), survey)

    def evictable(self, survey: Survey, letting_go: Lease | None, keep: Nodes = NONE) -> tuple[int, int]:
        """Return the pages of KV, and of checkpoints, that can be evicted while this leg and all leases keep theirs.

        letting_go: a lease that gives up its checkpoint. keep: nodes that stay with their checkpoints, and the KV
        before them. Unpinned segments are included.
        """
        guarded: set[Node] = set()
        held = set(keep)
        for node in held:
            guarded.update(node.climb())
        for other in self._leases.values():
            for end in (other.node, other.deep):
                _guard(end, guarded)
            if other.held and other.node is not None and other is not letting_go:
                held.add(other.node)
        if survey.resume is not None:
            held.add(survey.resume)
        kept = 0
        if survey.path:
            last = survey.path[-1]
            if last.end > survey.end and last not in guarded:
                assert last.parent is not None, f"{last} is a root"
                kept = (survey.end - last.parent.end) * self._index.unit_pages
                last = last.parent
            _guard(last, guarded)
        if survey.mid_page is not None:
            _guard(survey.mid_page.node, guarded)
        kv = self._index.kv_pages - kept - sum(len(node.pages) for node in guarded)
        checkpoints = self._index.checkpoints - sum(node.checkpoint is not None for node in held)
        return self._with_segments(kv, checkpoints, survey)

    def _with_segments(self, kv: int, checkpoints: int, survey: Survey) -> tuple[int, int]:
        """Add what tails and segments give, except the tail that the leg reads."""
        of_segments = self._segments.evictable if self._segments.pages else (0, 0)
        states = checkpoints * self._layout.checkpoint_pages + self._tails.evictable_beside(survey.mid_page)
        return kv + of_segments[0], states + of_segments[1]

    # ---- eviction

    def make_room(self, room: Room, pages: int, now: int, keep: Nodes = NONE) -> bool:
        """Evict until `pages` are free. The caller has checked that as many can be freed, unless some are kept."""
        region = self._pool.states if room is Room.STATE else self._pool.kv
        while region.free < pages:
            if self._segments.pages and self._segments.is_evicted_first:
                self._segments.evict()
            elif not self.evict(room, pages - region.free, now, keep):
                return False
        return True

    def lend(self, pages: int, now: int) -> array[int]:
        """Take pages out of the pool, evicting what ranks lowest, and return their ids. Raises OutOfPages."""
        self.require_room(Survey([], 0, None, (), (), pages, 0))
        self.reserving = True
        try:
            self.make_rooms(pages, 0, now)
        finally:
            self.reserving = False
        return self._pool.lend(pages)

    def make_rooms(self, kv: int, states: int, now: int, keep: Nodes = NONE) -> bool:
        """Evict until `kv` pages are free for KV and `states` for checkpoints and slots, both at once."""
        pool = self._pool
        if not pool.split:
            return self.make_room(Room.ANY, kv + states, now, keep)
        if pool.step:
            return self._make_elastic(kv, states, now, keep)
        return self.make_room(Room.KV, kv, now, keep) and self.make_room(Room.STATE, states, now, keep)

    def _make_elastic(self, kv: int, states: int, now: int, keep: Nodes) -> bool:
        """Take free pages of the other region, then evict in the own region, then in the other one.

        A segment has pages in both regions: after each eviction free pages are counted again.
        """
        pool = self._pool
        pool.trade(kv, states)
        sides = (Room.KV, pool.kv, kv), (Room.STATE, pool.states, states)
        for (room, region, wanted), (other, lender, kept) in (sides, sides[::-1]):
            while region.free < wanted:
                if self._segments.pages and self._segments.is_evicted_first:
                    self._segments.evict()
                elif self._policy.victim(room, now) is not None:
                    if not self.evict(room, wanted - region.free, now, keep):
                        return False
                else:
                    pool.trade(kv, states)
                    steps = -((region.free - wanted) // pool.step)
                    short = kept + steps * pool.step - lender.free
                    if steps > 0 and not (self._segments.evict() or self.evict(other, short, now, keep)):
                        return False
        return True

    def evict(self, room: Room, pages: int, now: int, keep: Nodes = NONE) -> bool:
        """Evict one checkpoint, or up to `pages` of one leaf's tail; if no prefix can be evicted, a segment."""
        if not self.reserving:
            raise RuntimeError("eviction for room outside of reserve")
        victim = self._policy.victim(room, now)
        score = 0.0 if victim is None or not self._layout.tail_pages else self._score(victim, now)
        tail = self._tails.first()
        if tail is not None and (victim is None or self._is_worth_less(tail, victim[0], score, now)):
            self._tails.evict(tail)
            return True
        if victim is None and self._segments.evict():
            return True
        if keep and (victim is None or victim[0] in keep):
            return False
        assert victim is not None, f"the policy finds nothing to evict for {room}, {pages} pages short"
        node, kind = victim
        free = self._pool.free
        if kind is Kind.TAIL:
            self._trim(node, pages)
        else:
            self._give_up(node, kind)
        if score or self._layout.states_in_pages:
            self._note_price(score, self._pool.free - free)
        return True

    def make_room_for_tail(self, pages: int, worth: float, start: int, is_passed: bool, now: int) -> bool:
        """Evict what saves less than a new tail until its pages are free. False: it is not worth them.

        worth: FLOPs a page that the tail saves. start: position at which it begins. is_passed: its session continues,
        with a leg that reads the tail and needs pages itself: nothing is evicted, and a checkpoint must fit, too.
        """
        if is_passed:
            return self._pool.states.free >= pages + self._layout.checkpoint_pages + self._layout.unit_pages
        score = worth * self._policy.tail_rate(start, uses=0, age=0)
        while self._pool.states.free < pages:
            victim, tail = self._policy.victim(Room.ANY, now), self._tails.first()
            of_tail = math.inf if tail is None else self._score_of_tail(tail, now)
            of_victim = math.inf if victim is None else max(self._price, self._score(victim, now))
            if min(of_tail, of_victim) > score:
                return False
            if tail is not None and of_tail <= of_victim:
                self._tails.evict(tail)
            else:
                self.evict(Room.ANY, pages - self._pool.states.free, now)
        return True

    def _is_worth_less(self, tail: StoredTail, node: Node, score: float, now: int) -> bool:
        """Return whether a tail is evicted before a victim with this score. It is evicted before its own checkpoint."""
        return node is tail.node or self._score_of_tail(tail, now) < max(score, self._price)

    def _note_price(self, score: float, pages: int) -> None:
        """Raise the price of a page to the score of a victim; it falls by the share of the memory that is evicted.

        The score of the next victim would be too low: a page that a tail takes from it is lacking soon after, for the
        next prompt, and content of a higher score is evicted for that.
        """
        self._price = max(score, self._price * (1 - pages / self._layout.n_pages))

    def _score_of_tail(self, tail: StoredTail, now: int) -> float:
        """Return the FLOPs a page and tick that a tail is expected to save."""
        if not tail.used:
            return 0.0
        start = tail.node.end * self._layout.unit_tokens
        return tail.worth * self._policy.tail_rate(start, tail.hits, now - tail.used)

    def _score(self, victim: Victim, now: int) -> float:
        """Return the same of a victim; 0 for KV that no checkpoint can use, and for a checkpoint that frees no page."""
        node, kind = victim
        is_unused = kind is Kind.TAIL and not self._layout.is_stateless
        if is_unused or (kind is Kind.CHECKPOINT and node.children and not self._layout.checkpoint_pages):
            return 0.0
        return self._worth.of(node) * self._policy.reuse_rate(node, now)

    def give_up_surplus(self, node: Node, now: int) -> None:
        """Evict what the policy's cap excludes, after the commit of a path to `node`. Only `commit` calls this."""
        while (victim := self._policy.surplus(node, now)) is not None:
            self._give_up(*victim)

    def _give_up(self, node: Node, kind: Kind) -> None:
        """Evict one checkpoint, or with kind NODE the checkpoint and KV of a leaf."""
        pages = len(node.pages)
        self._tails.drop(node)
        if node.checkpoint is not None:
            self.checkpoints += 1
            self.speculative += node.speculative
            self.reuse[node.hits] += 1
            self._pool.states.give(self._index.drop(node))
        if kind is Kind.NODE and pages:
            self._trim(node, pages)

    def _trim(self, node: Node, pages: int) -> None:
        self._tails.drop(node)
        if self._history is not None:
            self._history.note(self._index.namespace(node), node)
        units = min(len(node.pages), -(-pages // self._index.unit_pages) * self._index.unit_pages)
        freed = self._index.trim(node, units // self._index.unit_pages)
        self._pool.kv.give(freed)
        self.kv_pages += len(freed)


def _guard(node: Node | None, guarded: set[Node]) -> None:
    """Add `node` and its ancestors."""
    while node is not None and node not in guarded:
        guarded.add(node)
        node = node.parent
