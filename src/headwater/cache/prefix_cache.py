"""Prefix cache: `match` reads, `reserve` takes pages, `commit` publishes, `abandon` and `release` give pages back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from headwater.account import Reason
from headwater.cache.audit import audit
from headwater.cache.branch import Branches
from headwater.cache.changes import IGNORED, Change, ChangeLog, Changes
from headwater.cache.eviction import make_eviction
from headwater.cache.evictor import Evictor
from headwater.cache.history import History
from headwater.cache.holding import hold
from headwater.cache.index import Index
from headwater.cache.lease import Lease, OpenPlan
from headwater.cache.node import Node
from headwater.cache.placement.base import Path
from headwater.cache.pool import Pool
from headwater.cache.segments.store import SegmentKey, SegmentStore, StoredSegment
from headwater.cache.snapshot import Snapshot, Tree
from headwater.cache.stats import CacheStats, Operations, Parts
from headwater.cache.survey import Survey, Surveyor
from headwater.cache.tails import Tails
from headwater.cache.view import CacheView, look
from headwater.errors import OutOfPages, PlanClosed
from headwater.plan import CacheLayout, Draft, Held, Match, Place, Plan, Save, Saving
from headwater.request import SegmentEviction


class PrefixCache:
    """Index, pool and leases of one cache. All changes are atomic: a method that raises has changed nothing.

    A request's legs share one lease, from its first `reserve` to its `release`; it has at most one open plan.
    """

    def __init__(
        self,
        layout: CacheLayout,
        eviction: str = "lru",
        begin: Snapshot | None = None,
        segment_share: float = 0.5,
        segment_eviction: SegmentEviction = SegmentEviction.COST,
        changes: Changes = IGNORED,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Build an empty cache, or continue from `begin`. clock: seconds, by which retentions lapse; None: never."""
        self.layout, self.changes = layout, changes
        self.policy = make_eviction(eviction, layout)
        if clock is not None:
            self.policy.clock = clock
        self.index = Index(layout.unit_bytes, layout.unit_pages, self.policy, changes)
        self.pool = Pool(layout)
        self._history = History(layout.unit_bytes, 4 * layout.n_pages) if self.policy.keeps_history else None
        self.segments = SegmentStore(layout, self.pool, segment_share, segment_eviction, changes)
        self.tails = Tails(layout, self.index, self.pool, self.policy)
        self._surveyor = Surveyor(layout, self.index, self._history, self.tails)
        self.leases: dict[int, Lease] = {}
        self._plans: dict[int, tuple[Lease, OpenPlan]] = {}
        stored = self.segments, self.tails
        self.evictor = Evictor(self.index, self.pool, self.policy, *stored, self.leases, self._history)
        self.now = 0  # logical ticks: one a reserve, one a commit
        self._has_priorities = False  # whether any request had a priority other than 0
        self.branches = Branches(layout, self.index, self.pool, self.evictor, lambda: self.now)
        self._operations = Operations()
        if begin is not None:
            self.now = begin.now
            begin.plant(self.index, self.pool)
            if self._history is not None and begin.history:
                self._history.plant(*begin.history)

    # ---- match

    @property
    def version(self) -> int:
        """Version of the index. Matches of older versions are stale."""
        return self.index.version

    def match(self, key: bytes, length: int, namespace: str = "", near: tuple[Match, int] | None = None) -> Match:
        """Return the cached part of the prompt `key` of `length` tokens, up to the last page before its last token.

        near: a match of this version in the same namespace, and the number of tokens that its key shares with `key`:
        the walk continues from there. Changes nothing.
        """
        return self._surveyor.match(namespace, key, length, near)

    def path(self, match: Match) -> Path:
        """Return the edges that the match's key enters, each with an id and the position of its end, in tokens."""
        return self._surveyor.path(match)

    # ---- reserve

    def reserve(self, draft: Draft, match: Match | None = None) -> Plan:
        """Take all pages that the leg needs, evicting if there is no room, and pin what it reads.

        match: of a first leg's prompt, so that it is not looked up again. Raises OutOfPages if the leg would not fit
        even after eviction, StaleMatch if the index has changed since the match, ValueError for a draft that does not
        follow from the request's earlier legs or names an evicted checkpoint. Then nothing is changed, except by a
        draft that spares a branch: content that ranks below this branch may be evicted.
        """
        self.evictor.reserving = True
        try:
            return self._reserve(draft, match)
        finally:
            self.evictor.reserving = False

    def _reserve(self, draft: Draft, match: Match | None) -> Plan:
        lease = self.leases.get(draft.request)
        if draft.spares is not None:
            self._make_room_beside(draft, draft.spares, lease)
        survey = self._surveyor.survey(draft, lease, match)
        self.evictor.require_room(survey, None if draft.sharing.hold_checkpoint else lease)
        self.now += 1
        self._operations.reserves += 1
        if lease is None:
            lease = self.leases[draft.request] = self._new_lease(draft, survey)
            if draft.start and draft.sharing.counts:
                self._operations.resumes += 1
                self._operations.resumed_tokens += draft.start
        return self._open(draft, lease, survey)

    def _make_room_beside(self, draft: Draft, spared: Place, lease: Lease | None) -> None:
        """Evict what ranks below `spared` until a leg that ends in a checkpoint fits; raise OutOfPages if it cannot."""
        layout = self.layout
        kv = self._surveyor.table_pages(draft.end - draft.start)
        states = layout.checkpoint_pages + (0 if lease is not None and lease.slot else layout.slot_pages)
        if not self.branches.make_room_below(kv, states, spared, Place(draft.namespace, draft.key, draft.start)):
            raise OutOfPages(kv + states, self.pool.free, 0)

    # ---- copying to tiers

    def hold(self, request: int, namespace: str, key: bytes, at: int, with_state: bool = True) -> Held | None:
        """Pin the state at position `at` of a key, the KV before it and tails after it, until `release`.

        None if the state is not cached, or if `at` is 0 and there is no tail. with_state: False for only the KV.
        """
        found = hold(self.layout, self.index, self.tails, namespace, key, at, with_state)
        if found is None:
            return None
        self.leases[request], held = found
        return held

    def checkpoints(self) -> list[tuple[str, bytes, int]]:
        """Return namespace, key and position of each checkpoint, or else of each prompt's end, the last used first."""
        is_stateless = self.layout.is_stateless
        ends = (node for node in self.index if (not node.children if is_stateless else node.checkpoint is not None))
        latest = sorted(ends, key=lambda node: node.checkpoint_time or node.kv_time, reverse=True)
        unit = self.layout.unit_tokens
        return [(self.index.namespace(node), self.index.key_of(node), node.end * unit) for node in latest]

    # ---- segments

    def reserve_segment(self, request: int, key: SegmentKey) -> StoredSegment:
        """Take the pages of a segment that `request` builds, and of the slot in which it does, evicting if need be.

        Raises OutOfPages if they would not fit even then, ValueError if the segment exists; both change nothing.
        """
        if self.segments.find(key) is not None:
            raise ValueError(f"a segment of {key.tokens:,} tokens is stored or being built already")
        self._make_way_for(key, self.layout.slot_pages)
        return self.segments.begin(request, key)

    def reserve_loaded_segment(self, request: int, key: SegmentKey) -> Plan:
        """Take the pages of a segment that is read under the id `request`; its commit publishes it, if it is the first.

        Raises OutOfPages, as `reserve_segment`.
        """
        self._make_way_for(key, 0)
        self.segments.begin_load(request, key)
        return self.segments.plan(request, 0, key.tokens - key.widths.tail)

    def _make_way_for(self, key: SegmentKey, slot_pages: int) -> None:
        kv, states = self.segments.needs(key)
        self.evictor.require_room(Survey([], 0, None, (), (), kv, states + slot_pages))
        self.segments.make_way(kv + states)
        self.now += 1
        self.evictor.reserving = True
        try:
            self.evictor.make_rooms(kv, states + slot_pages, self.now)
        finally:
            self.evictor.reserving = False

    def expect_segment(self, stored: StoredSegment) -> None:
        """Note that a request will be composed of the segment, once others are built: it counts as just used."""
        self.now += 1
        self.segments.refresh(stored, self.now)

    def use_segment(self, stored: StoredSegment) -> None:
        """Note that a request was composed of the segment."""
        self.segments.use(stored, self.now)

    # ---- opening a plan

    def _new_lease(self, draft: Draft, survey: Survey) -> Lease:
        """Return a pinned lease at the leg's start; from now on the survey's path begins there."""
        lease = Lease.begin(draft, survey.path, self.layout.unit_tokens, self.index)
        if lease.node is not None:
            survey.path = [node for node in survey.path if node.end > lease.node.end]
            lease.held = survey.resume is not None
            self.index.pin(lease.node, lease.held)
            self.policy.begun(draft, lease.node, self.now)
        return lease

    def _open(self, draft: Draft, lease: Lease, survey: Survey) -> Plan:
        opened = OpenPlan(draft, len(lease.table), lease.own_from, lease.deep, draft.slot and not lease.slot)
        self._protect(draft, lease, survey)
        self.tails.pin(survey.mid_page, opened, lease, self.now)
        self.evictor.make_rooms(survey.kv, survey.states, self.now)
        lease.table.extend(self.pool.kv.take(survey.kv))
        if opened.has_new_slot:
            lease.slot = self.pool.states.take(self.layout.slot_pages)
        self._take_saves(opened, survey)
        own_from = draft.resumes_at // self.layout.page_size * self.layout.kv_pages_per_unit
        write_from = max(own_from, lease.own_from if lease.deep is not None else 0)
        restore, saves = self._states(opened, survey, lease, write_from)
        lease.plan = self._operations.reserves
        self._plans[lease.plan] = lease, opened
        return Plan(
            id=lease.plan,
            request=draft.request,
            start=draft.start,
            end=draft.end,
            restore=restore,
            table=memoryview(lease.table.tobytes()).cast("i"),
            write_from=write_from,
            saves=saves,
            lent=lease.slot if opened.has_new_slot else (),
            kept=opened.kept,
            tails=opened.tails,
        )

    def _states(
        self, opened: OpenPlan, survey: Survey, lease: Lease, write_from: int
    ) -> tuple[Sequence[int], tuple[Save, ...]]:
        """Return the pages from which the leg restores states, and those in which it saves some."""
        if not self.layout.states_in_pages:
            restore = () if survey.resume is None else survey.resume.checkpoint
            assert restore is not None, f"{survey.resume} lost its checkpoint while it was held"
            return restore, opened.saves
        draft, unit, size, table = opened.draft, self.layout.unit_tokens, self.layout.page_size, lease.table
        first = max(draft.resumes_at // unit, write_from * size // unit) + 1
        ends = range(first * unit, draft.publish + 1, unit) if draft.start < draft.end else ()
        gap = draft.publish if draft.saving.gap is None else draft.saving.gap
        saved = (at for at in ends if at <= gap or at == draft.end)
        resumes = opened.has_new_slot and draft.resumes_at > 0
        restore = table[draft.resumes_at // size - 1 : draft.resumes_at // size] if resumes else ()
        return restore, tuple(Save(at, table[at // size - 1 : at // size]) for at in saved)

    def _protect(self, draft: Draft, lease: Lease, survey: Survey) -> None:
        """Pin, hold and refresh what the leg reads, before anything is evicted for it."""
        if survey.resume is not None:
            lease.hold(self.index)
            self.index.resume(survey.resume, self.now)
        elif not draft.sharing.hold_checkpoint:
            lease.hold(self.index, False)
        for node in survey.path:
            if node.end * self.layout.unit_tokens in draft.saving.checkpoints:
                self.index.confirm(node, self.now)
        lease.share(survey.path, survey.end, self.index)
        if lease.node is not None:
            self.index.touch(lease.deep or lease.node, None, self.now)

    def _take_saves(self, opened: OpenPlan, survey: Survey) -> None:
        """Take pages for each new checkpoint and tail, and for speculative checkpoints as long as pages are free."""
        size, states = self.layout.checkpoint_pages, self.pool.states
        saves = [Save(at, states.take(size)) for at in survey.saves]
        opened.tails = self.tails.take(survey.tails, opened.draft, self.now, self.evictor.make_room_for_tail)
        for at in survey.guesses:
            if states.free < size:
                break
            saves.append(Save(at, states.take(size)))
        opened.saves = tuple(sorted(saves, key=lambda save: save.position))

    # ---- closing a plan

    def commit(self, plan: Plan) -> None:
        """Publish the leg's KV and checkpoints, and pin its end. Raises PlanClosed if the plan was closed before.

        Pages with content that another request published meanwhile stay private until the release.
        """
        if plan.build is not None:
            stored = self.segments.close(plan)
            if plan.build.is_last:
                self.now += 1
                self.segments.publish(stored, self.now)
            return
        lease, opened = self._close(plan)
        self.now += 1
        self._operations.commits += 1
        lease.commit(opened, self.layout.unit_tokens, self.index, self.pool, self.now)
        draft = opened.draft
        self.tails.keep(opened, lease, self.now)
        if lease.node is None:
            return
        if draft.hints.retained:
            self._retain(draft, lease.node)
        if draft.hints.priority or self._has_priorities:
            self._prefer(draft.hints.priority, lease.node)
        self.evictor.give_up_surplus(lease.node, self.now)

    def _retain(self, draft: Draft, end: Node) -> None:
        """Report the retentions of checkpoints on the path to `end` to the policy."""
        by_time = sorted(draft.hints.retained, key=lambda one: one.seconds)  # the longer of two on one page counts
        seconds = {one.position // self.layout.unit_tokens: one.seconds for one in by_time}
        for node in end.climb():
            if node.checkpoint is not None and node.end in seconds:
                self.policy.retain(node, seconds[node.end])

    def _prefer(self, priority: int, end: Node) -> None:
        """Report a request's priority, and the checkpoints on the path to `end`, to the policy."""
        self._has_priorities = True
        for node in end.climb():
            if node.checkpoint is not None:
                self.policy.prefer(node, priority, is_new=node.checkpoint_time == self.now)

    def end_conversation(self, namespace: str, key: bytes, after: int = 0) -> None:
        """Mark as speculative the checkpoints of `key` beyond position `after` that no other prompt shares.

        Prompts whose KV was evicted also count, and so do continuations of the key. Nothing is evicted now; a request
        that resumes at such a checkpoint undoes its mark.
        """
        shared = max(after // self.layout.unit_tokens, self.index.shared(namespace, key))
        if self._history is not None:
            shared = max(shared, self._history.shared(namespace, key))
        path, depth = self.index.find(namespace, key)
        for node in path:
            if shared < node.end <= depth and node.checkpoint is not None:
                self.index.doubt(node)

    def abandon(self, plan: Plan) -> None:
        """Give back the pages that the leg took; committed ones stay. Raises PlanClosed if the plan is not open."""
        if plan.build is not None:
            self.segments.close(plan)
            return
        lease, opened = self._close(plan)
        self._operations.abandons += 1
        self.tails.abandon(opened)
        lease.abandon(opened, self.index, self.pool)

    def drop_tails(self, plan: Plan) -> None:
        """Give back the tails that an open plan was to write: they could not be read."""
        self.tails.abandon(self._plans[plan.id][1])

    def _close(self, plan: Plan) -> tuple[Lease, OpenPlan]:
        if plan.id not in self._plans:
            raise PlanClosed(f"plan {plan.id} of request {plan.request} is not open")
        lease, opened = self._plans.pop(plan.id)
        lease.plan = None
        self.tails.unpin(opened)
        return lease, opened

    def release(self, request: int) -> None:
        """Give back all pages and pins of a request, at its end or preemption. KeyError for an unknown request."""
        if self.segments.is_building(request):
            self.segments.release(request)
            return
        lease = self.leases[request]
        if lease.plan is not None:
            raise ValueError(f"request {request} has plan {lease.plan} open")
        del self.leases[request]
        self.tails.release(lease.copied)
        lease.release(self.index, self.pool)

    # ---- reporting

    def stats(self) -> CacheStats:
        """Return counts of cached content and of operations."""
        parts = Parts(self.layout, self.index, self.pool, self.evictor, self.segments, self.tails)
        plans = [opened for _, opened in self._plans.values()]
        return parts.count(self.leases.values(), plans, self._operations, self.now)

    def contents(self) -> list[Change]:
        """Return all KV, checkpoints and complete segments, as changes of an empty cache. Walks the tree."""
        log = ChangeLog()
        self.index.contents(log)
        self.segments.contents(log)
        return log.take()

    def snapshot(self) -> Snapshot:
        """Return the cached content, without pages that only leases hold, as the start of another such cache."""
        history = () if self._history is None else self._history.rows()
        return Snapshot(Tree.of(self.index), history, self.now)

    def reuse(self) -> dict[int, int]:
        """Count checkpoints, cached and evicted, by the number of requests that resumed there. Walks the tree."""
        kept = Counter(node.hits for node in self.index if node.checkpoint is not None)
        return dict(sorted((self.evictor.reuse + kept).items()))

    def view(self, limit: int = 300, hottest: int = 20) -> CacheView:
        """Return the `limit` largest parts of the tree and its `hottest` prefixes: a walk over at most 10,000 nodes."""
        return look(self.index, self.layout.unit_tokens, self.now, limit, hottest)

    def check(self) -> None:
        """Verify every invariant of index, pool and leases; AssertionError names the broken one. Repairs nothing."""
        audit(self.index, self.pool, self.segments, self.tails, list(self.leases.values()), list(self._plans.values()))
        stats = self.stats()
        owned = sum(pages for use, pages in stats.pages_by_use().items() if use != "free")
        assert owned + stats.pages_free == stats.pages_total, f"pages do not add up: {stats}"


class NoCache(PrefixCache):
    """Cache that is off: it matches and publishes nothing; all pages are private until the request's release."""

    def match(self, key: bytes, length: int, namespace: str = "", near: tuple[Match, int] | None = None) -> Match:
        return Match(0, 0, 0, Reason.CACHE_OFF)

    def reserve(self, draft: Draft, match: Match | None = None) -> Plan:
        return super().reserve(replace(draft, sharing=replace(draft.sharing, reuse=False), saving=Saving()))
