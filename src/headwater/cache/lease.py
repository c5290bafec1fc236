"""Lease: all pages and pins of one request, from its first reserve to its release.

Index and pool are the cache's, and are given to each operation that changes them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from headwater.cache.index import Index
from headwater.cache.node import MidPage, Node, StoredTail
from headwater.cache.pool import Pool
from headwater.plan import Draft, Save, Tail


@dataclass(slots=True, eq=False)
class OpenPlan:
    """A plan that is neither committed nor abandoned, with the state of its lease before it."""

    draft: Draft
    pages_before: int  # length of the lease's table
    own_before: int
    deep_before: Node | None
    has_new_slot: bool
    saves: tuple[Save, ...] = ()
    mid_page: MidPage | None = None  # pinned while it is read
    kept: Tail | None = None  # the same for the executor
    tails: tuple[Tail, ...] = ()  # that the leg writes


@dataclass(slots=True, eq=False)
class Lease:
    """Table of KV pages: `table[:own_from]` is the index's or in `duplicates`, `table[own_from:]` the lease's own."""

    namespace: str
    node: Node | None  # pinned end of the committed prefix in the index; None: nothing is shared with the index
    end: int  # tokens computed and committed
    held: bool = False  # whether the checkpoint at `node` is protected, too
    deep: Node | None = None  # pinned end of the stranded KV that the table names beyond `node`
    table: array[int] = field(default_factory=lambda: array("i"))
    own_from: int = 0
    duplicates: array[int] = field(default_factory=lambda: array("i"))
    slot: array[int] = field(default_factory=lambda: array("i"))
    plan: int | None = None  # id of the open plan
    continued: StoredTail | None = None  # the tail after whose last token its first leg began
    copied: Sequence[StoredTail] = ()  # tails that are pinned while a prefix is copied

    @classmethod
    def begin(cls, draft: Draft, path: list[Node], unit: int, index: Index) -> Lease:
        """Return the lease of a first leg; its table names the cached KV on `path` up to where the leg starts.

        unit: tokens of a unit. The caller pins its node.
        """
        if not draft.sharing.reuse:
            return cls(draft.namespace, None, 0)
        lease = cls(draft.namespace, index.root(draft.namespace), draft.start)
        start = draft.resumes_at // unit
        if start:
            above = [node for node in path if node.parent is not None and node.parent.end < start]
            for node in above:
                lease.table.extend(node.pages)
            del lease.table[start * index.unit_pages :]
            lease.node = index.boundary(above[-1], start)
            lease.node.hits += draft.sharing.counts
        lease.own_from = len(lease.table)
        return lease

    @classmethod
    def of_path(cls, namespace: str, path: list[Node], end: int) -> Lease:
        """Return a lease on cached nodes and on the checkpoint at their end, if there is one; the caller pins the last.

        The path begins below the root, or is the root.
        """
        lease = cls(namespace, path[-1], end, held=path[-1].checkpoint is not None)
        for part in path:
            lease.table.extend(part.pages)
        lease.own_from = len(lease.table)
        return lease

    @property
    def n_private(self) -> int:
        """Number of KV pages that are private to the lease."""
        return len(self.table) - self.own_from + len(self.duplicates)

    def private_pages(self) -> array[int]:
        """Return the KV pages that are private to the lease."""
        return self.table[self.own_from :] + self.duplicates

    def hold(self, index: Index, hold: bool = True) -> None:
        """Protect the checkpoint at the lease's node, or end its protection."""
        if self.held != hold and self.node is not None:
            index.hold(self.node, hold)
            self.held = hold

    def share(self, path: list[Node], end: int, index: Index) -> None:
        """Name and pin the cached KV on `path` up to depth `end`, beyond the table's end: it needs no new pages."""
        node = self.node
        if node is None or not path or end <= max(node.end, self.deep.end if self.deep else 0):
            return
        del self.table[node.end * index.unit_pages :]
        for part in path:
            self.table.extend(part.pages)
        del self.table[end * index.unit_pages :]
        self.own_from = len(self.table)
        self.deep = index.boundary(path[-1], end)
        index.pin(self.deep)

    def commit(self, opened: OpenPlan, unit: int, index: Index, pool: Pool, now: int) -> None:
        """Add the leg's KV and checkpoints to the index, and move the lease to its end. unit: tokens of a unit."""
        draft = opened.draft
        self.end = draft.end
        if self.node is None:
            return
        if draft.publish // unit > self.node.end:
            self._publish(opened, unit, index, pool, now)
        if opened.deep_before is not None and opened.deep_before is not self.deep:
            index.unpin(opened.deep_before)
        if not draft.sharing.hold_checkpoint:
            self.hold(index, False)
        if draft.saving.replaces is not None:
            self._replace(draft.saving.replaces // unit, index, pool)

    def _publish(self, opened: OpenPlan, unit: int, index: Index, pool: Pool, now: int) -> None:
        old, draft = self.node, opened.draft
        assert old is not None, "a lease that publishes has a node"
        end = draft.publish // unit
        saves = {save.position // unit: save for save in opened.saves}
        gap = draft.saving.gap
        stops = sorted({*saves, end, *([gap // unit] if gap is not None and old.end < gap // unit < end else [])})
        base = self.deep if self.deep is not None and self.deep.end <= stops[0] else old
        nodes, joint = index.grow(base, draft.key, stops, self.table)
        new_from = end if joint is None else joint.end
        self.duplicates.extend(self.table[self.own_from : new_from * index.unit_pages])
        self.own_from = max(self.own_from, end * index.unit_pages)
        index.touch(nodes[-1], old, now)
        for node in nodes:
            if node.end in saves:
                _keep(saves[node.end], node, draft, index, pool, now)
        if gap is not None and gap // unit < end:
            _note_gap(nodes, new_from, range(gap // unit, -(-draft.end // unit) - 1), index)
        index.pin(nodes[-1], draft.sharing.hold_checkpoint)
        index.unpin(old, self.held)
        self.node, self.held = nodes[-1], draft.sharing.hold_checkpoint
        if joint is not None and joint is not old:
            index.tidy(joint)
        if self.deep is not None and self.deep.end <= end:
            deep, self.deep = self.deep, None
            if deep is not opened.deep_before:
                index.unpin(deep)

    def _replace(self, position: int, index: Index, pool: Pool) -> None:
        """Drop the rolling checkpoint at depth `position`, unless a request needs it or has resumed there."""
        assert self.node is not None, "a lease that replaces has a node"
        node = next(node for node in self.node.climb() if node.end <= position)
        is_used = node.pins or node.hits or node.tails or len(node.children) > 1
        if node.end == position and node.checkpoint is not None and not is_used:
            pool.states.give(index.drop(node, evicted=False))

    def abandon(self, opened: OpenPlan, index: Index, pool: Pool) -> None:
        """Give back all pages that an open plan took, and its pin."""
        pool.kv.give(self.table[max(self.own_from, opened.pages_before) :])
        del self.table[opened.pages_before :]
        self.own_from = opened.own_before
        if self.deep is not None and self.deep is not opened.deep_before:
            deep, self.deep = self.deep, opened.deep_before
            index.unpin(deep)
        for save in opened.saves:
            pool.states.give(save.pages)
        if opened.has_new_slot:
            self._give_slot(pool)
        if not opened.draft.sharing.hold_checkpoint:
            self.hold(index, False)

    def release(self, index: Index, pool: Pool) -> None:
        """Give back all pages and pins."""
        pool.kv.give(self.private_pages())
        self._give_slot(pool)
        if self.deep is not None:
            index.unpin(self.deep)
        if self.node is not None:
            index.unpin(self.node, self.held)

    def _give_slot(self, pool: Pool) -> None:
        pool.states.give(self.slot)
        self.slot = array("i")


def _note_gap(nodes: list[Node], new_from: int, gap: range, index: Index) -> None:
    """Note that pages which begin within `gap` lack states, if they are new: they begin at `new_from` or later."""
    for node in nodes:
        begin = 0 if node.parent is None else node.parent.end
        if begin >= new_from and begin in gap:
            node.gap_end = gap.stop + 1
    for node in nodes[:-1]:
        if node.end != new_from:
            index.tidy(node)


def _keep(save: Save, node: Node, draft: Draft, index: Index, pool: Pool, now: int) -> None:
    """Store a saved checkpoint at a node; if there is one already, give the pages back."""
    speculative = save.position not in draft.saving.checkpoints
    if node.checkpoint is None:
        index.save(node, save.pages, now, speculative, save.position in draft.saving.learned)
        return
    pool.states.give(save.pages)
    if not speculative:
        index.confirm(node, now)
