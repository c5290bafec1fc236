"""Eviction of checkpoints one by one, after leaves without checkpoint: the base of most policies."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from headwater.cache.eviction.base.lazy_heap import LazyHeap, Rank, bare_leaves, is_bare_leaf
from headwater.cache.eviction.base.policy import Eviction, Kind, Room, Victim
from headwater.cache.eviction.base.worth import Bases, changes_sharing, next_below
from headwater.cache.node import Node, is_free_leaf
from headwater.errors import ConfigError


class BareFirst(Eviction):
    """Evict leaves without checkpoint first, since they save nothing, then the checkpoint that the subclass chooses.

    A pool of only KV evicts leaves without checkpoint, then a leaf's checkpoint, whose KV can be evicted after it.
    """

    def __init__(self) -> None:
        self._bare = bare_leaves()
        self._bases = Bases()

    def changed(self, node: Node) -> None:
        if is_bare_leaf(node):
            self._bare.add(node)
        self.place(node)
        if self._bases.toggles(node) or changes_sharing(node):
            self.toggled(node)

    def touched(self, node: Node) -> None:
        self.place(node)

    def victim(self, room: Room, now: int) -> Victim | None:
        if room is not Room.STATE and (bare := self._bare.lowest()) is not None:
            return bare, Kind.TAIL
        node = self.lowest(room is Room.KV, now)
        return None if node is None else (node, Kind.CHECKPOINT)

    @abstractmethod
    def place(self, node: Node) -> None:
        """Put the node's checkpoint in its place in the order, or take it out; the node changed or was used."""

    @abstractmethod
    def lowest(self, leaves: bool, now: int) -> Node | None:
        """Return the node whose checkpoint is evicted next, of all or of the leaves."""

    def toggled(self, node: Node) -> None:
        """Note that the node got or lost its checkpoint, or `changes_sharing`: others may be worth more or less now."""


class Ranked(BareFirst):
    """The lowest rank is evicted, speculative checkpoints first. A rank changes only when a node is used.

    rank: called whenever a node changes or is used. relative: it depends on `Worth`, so on the nodes above.
    """

    def __init__(self, rank: Callable[[Node], Rank], relative: bool = False) -> None:
        super().__init__()
        self._rank, self._relative = rank, relative
        self._checkpoints = LazyHeap[Rank](lambda node: not node.holds)
        self._ends = LazyHeap[Rank](is_free_leaf)  # checkpoints of leaves

    def place(self, node: Node) -> None:
        if node.checkpoint is None:
            self._checkpoints.discard(node)
            self._ends.discard(node)
            return
        own = self._rank(node)
        if not isinstance(own, tuple):
            raise ConfigError(f"{type(self).__name__}: a rank is {own!r}, must be a tuple: ({own!r},)")
        rank = (0.0 if node.speculative else 1.0, *own)
        self._checkpoints.put(node, rank)
        if is_free_leaf(node):
            self._ends.put(node, rank)
        else:
            self._ends.discard(node)

    def lowest(self, leaves: bool, now: int) -> Node | None:
        return (self._ends if leaves else self._checkpoints).lowest()

    def toggled(self, node: Node) -> None:
        if self._relative:
            for below in next_below(node):
                self.place(below)
