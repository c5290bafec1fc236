"""Lease: all pages and pins of one request, from its first reserve to its release."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from headwater.cache.index import Index
from headwater.cache.node import Node
from headwater.cache.pool import Pool
from headwater.plan import Draft, Save


@dataclass(slots=True, eq=False)
class OpenPlan:
    """A plan that is neither committed nor abandoned, and what abandoning it goes back to."""

    draft: Draft
    pages_before: int  # length of the lease's table
    own_before: int
    deep_before: Node | None
    took_slot: bool
    saves: tuple[Save, ...] = ()


@dataclass(slots=True, eq=False)
class Lease:
    """`table[:own_from]` belongs to the index or is in `duplicates`; `table[own_from:]` is the lease's own."""

    namespace: str
    node: Node | None  # the committed end in the index, pinned; None: nothing is shared with the index
    end: int  # tokens computed and committed
    held: bool = False  # the checkpoint at `node` is protected, too
    deep: Node | None = None  # the end of the stranded KV that the table names beyond `node`, pinned
    table: array[int] = field(default_factory=lambda: array("i"))
    own_from: int = 0
    duplicates: array[int] = field(default_factory=lambda: array("i"))
    slot: array[int] = field(default_factory=lambda: array("i"))
    plan: int | None = None  # id of the open plan

    @classmethod
    def of_path(cls, namespace: str, path: list[Node], end: int) -> Lease:
        """Return a lease on cached nodes, the first below the root, and on the checkpoint at their end if there is one.

        The caller pins its node.
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

    # ---- changes; index and pool are the cache's

    def hold(self, index: Index, hold: bool = True) -> None:
        """Protect the checkpoint at the lease's node, or give the protection up."""
        if self.held != hold and self.node is not None:
            index.hold(self.node, hold)
            self.held = hold

    def publish(self, opened: OpenPlan, unit: int, index: Index, pool: Pool, now: int) -> None:
        """Add the leg's KV and checkpoints to the index; the lease ends there from now on. `unit`: tokens of a unit."""
        old, draft = self.node, opened.draft
        assert old is not None, "a lease that publishes has a node"
        end = draft.publish // unit
        positions = [save.position // unit for save in opened.saves]
        stops = positions if positions and positions[-1] == end else [*positions, end]
        base = self.deep if self.deep is not None and self.deep.end <= stops[0] else old
        nodes, joint = index.grow(base, draft.key, stops, self.table)
        new_from = end if joint is None else joint.end
        self.duplicates.extend(self.table[self.own_from : new_from * index.unit_pages])
        self.own_from = max(self.own_from, end * index.unit_pages)
        index.touch(nodes[-1], old, now)
        for save, node in zip(opened.saves, nodes, strict=False):
            _keep(save, node, draft, index, pool, now)
        index.pin(nodes[-1], draft.hold_checkpoint)
        index.unpin(old, self.held)
        self.node, self.held = nodes[-1], draft.hold_checkpoint
        if joint is not None and joint is not old:
            index.tidy(joint)
        if self.deep is not None and self.deep.end <= end:
            deep, self.deep = self.deep, None
            if deep is not opened.deep_before:
                index.unpin(deep)

    def replace(self, position: int, index: Index, pool: Pool) -> None:
        """Drop the rolling checkpoint at depth `position`, unless a request needs it or resumed there."""
        assert self.node is not None, "a lease that replaces has a node"
        node = next(node for node in self.node.climb() if node.end <= position)
        is_used = node.pins or node.hits or len(node.children) > 1
        if node.end == position and node.checkpoint is not None and not is_used:
            pool.states.give(index.drop(node, evicted=False))


def _keep(save: Save, node: Node, draft: Draft, index: Index, pool: Pool, now: int) -> None:
    """Put a saved checkpoint at a node; if there is one already, give the pages back."""
    speculative = save.position not in draft.checkpoints
    if node.checkpoint is None:
        index.save(node, save.pages, now, speculative, save.position in draft.learned)
        return
    pool.states.give(save.pages)
    if not speculative:
        index.confirm(node, now)
