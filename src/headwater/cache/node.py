"""Nodes of the radix tree, and the tails after their ends. Lengths and positions of nodes are in units."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from headwater.plan import Tail

MAX_LOGGED_EDGES = 4096  # evicted edges that are remembered


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """An edge with the KV of its units, and at most one checkpoint, at its end."""

    parent: Node | None  # None: a root, or no longer in the tree
    edge: bytes
    pages: array[int]
    end: int  # depth of the node's end
    serial: int  # in order of creation: ties of age go to the older node
    unit: bytes = b""  # the edge's first unit: the key under which the parent has it
    origins: tuple[int, ...] = ()  # serials of the nodes that this one was the upper part of, the latest first
    children: dict[bytes, Node] = field(default_factory=dict)  # by the first unit of their edge
    fast_child: Node | None = None  # the first of the children: a walk tries it before it hashes a unit
    ordered: list[bytes] | None = None  # first units of the children, ascending, once `neighbours` has asked for them
    tails: tuple[StoredTail, ...] = ()  # of tokens after its end that are less than a unit, by their ids
    checkpoint: Sequence[int] | None = None  # its pages
    speculative: bool = False
    learned: bool = False  # the checkpoint is at a learned position
    live: int = 0  # its own checkpoint, and children with one at or below them, counted; 0: the KV is dead
    hits: int = 0  # requests that resumed at its end, since the checkpoint was taken
    kv_time: int = 0
    checkpoint_time: int = 0
    pins: int = 0  # leases whose path ends here
    holds: int = 0  # those of them that need the checkpoint as well
    lost: tuple[int, ...] = ()  # positions on this edge of evicted checkpoints
    gap_end: int = 0  # pages of the edge that end before this depth lack states, if states are in pages
    mark: int = 0  # the eviction policy's note of the checkpoint; numbers below 256 take no memory

    def climb(self) -> Iterator[Node]:
        """Yield the node and its ancestors, up to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def adopt(self, unit: bytes, child: Node) -> None:
        """Set the child whose edge begins with `unit`."""
        if self.fast_child is None or self.fast_child.unit is unit:
            self.fast_child = child
        if self.ordered is not None and unit not in self.children:
            insort(self.ordered, unit)
        self.children[unit] = child
        child.unit, child.parent = unit, self

    def disown(self, child: Node) -> None:
        """Remove the child."""
        del self.children[child.unit]
        if self.ordered is not None:
            del self.ordered[bisect_left(self.ordered, child.unit)]
        child.parent = None
        if self.fast_child is child:
            self.fast_child = next(iter(self.children.values()), None)

    def neighbours(self, ids: bytes) -> list[Node]:
        """Return the children next to where `ids` would stand among them: one shares the longest beginning of all."""
        if self.ordered is None:
            self.ordered = sorted(self.children)
        at = bisect_left(self.ordered, ids)
        return [self.children[unit] for unit in self.ordered[max(0, at - 1) : at + 1]]

    def __repr__(self) -> str:
        marks = ("*" if self.checkpoint is not None else "") + f" pins={self.pins}" * bool(self.pins)
        return f"<Node #{self.serial} end={self.end}{marks} children={len(self.children)}>"


@dataclass(slots=True, eq=False)
class StoredTail:
    """One tail, of a node whose end has a checkpoint, or of any node if work can resume at every page."""

    node: Node
    ids: bytes = field(repr=False)  # its token ids
    tokens: int
    kv: Sequence[int]  # the page with their KV; none for models without attention
    rows: Sequence[int]  # pages with its hidden row, then the inputs of recurrences and windows
    has_hidden: bool  # it is the end of a prompt or an answer
    worth: float  # FLOPs a page that it saves
    used: int = 0  # tick of its last use; 0 once its session continued after it
    pins: int = 0  # open plans and copies that read it
    hits: int = 0  # requests that resumed after some of its tokens

    @property
    def pages(self) -> int:
        return len(self.kv) + len(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class MidPage:
    """Tokens after a node's end that a request need not compute: those of a tail, or the first of a cached page."""

    tokens: int
    node: Node  # of the tail, or the one whose edge has the page
    tail: StoredTail | None = None
    page: Sequence[int] = ()  # the cached page
    is_whole: bool = False  # the request needs no row: all its tokens are there, and the hidden row after the last

    def as_plan(self, start: int) -> Tail:
        """Return it as a plan names it, after a checkpoint at position `start`."""
        if self.tail is None:
            return Tail(start, start + self.tokens, self.page, ())
        is_all = self.tail.tokens == self.tokens
        return Tail(start, start + self.tokens, self.tail.kv, self.tail.rows, self.tail.has_hidden and is_all)


class Root(Node):
    """Root of a namespace."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str, serial: int) -> None:
        super().__init__(None, b"", array("i"), 0, serial)
        self.namespace = namespace


def is_free_leaf(node: Node) -> bool:
    """Return whether KV of the node can be evicted once it has no checkpoint."""
    return not node.children and not node.pins and node.parent is not None


class Observer:
    """Observer of the changes of an index's nodes. This one does nothing; an eviction policy is one that does."""

    def changed(self, node: Node) -> None:
        """Note that the node's checkpoint, holds, children or edge changed, or a leaf's pins, or that it left the tree.

        A node that has neither a checkpoint nor an end of its own to trim may leave without notice, absorbed by its
        child.
        """

    def touched(self, node: Node) -> None:
        """Note that one of the node's two times was refreshed; if the KV's, then also those of all nodes above it."""


class EvictionLog:
    """Recently evicted edges: the first unit of each, with its namespace and position. The oldest are forgotten.

    It distinguishes misses whose reason is `evicted` from those that are `cold` or `diverged`.
    """

    def __init__(self, capacity: int = MAX_LOGGED_EDGES) -> None:
        self._capacity = capacity
        self._entries: dict[tuple[str, int, bytes], None] = {}

    def add(self, namespace: str, position: int, unit: bytes) -> None:
        """Log an edge of `namespace` that began at unit `position` with the bytes `unit`."""
        self._entries.pop((namespace, position, unit), None)
        self._entries[namespace, position, unit] = None
        if len(self._entries) > self._capacity:
            del self._entries[next(iter(self._entries))]

    def __contains__(self, entry: tuple[str, int, bytes]) -> bool:
        return entry in self._entries

    def __len__(self) -> int:
        return len(self._entries)
