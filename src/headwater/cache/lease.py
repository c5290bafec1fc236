"""Lease: all pages and pins of one request, from its first reserve to its release."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from headwater.cache.node import Node
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

    @property
    def n_private(self) -> int:
        """KV pages that nobody else may read, in number."""
        return len(self.table) - self.own_from + len(self.duplicates)

    def private_pages(self) -> array[int]:
        """KV pages that nobody else may read."""
        return self.table[self.own_from :] + self.duplicates
