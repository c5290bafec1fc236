"""Checkpoints over a growing tree of prefixes, kept up to date request by request.

The exact program (`tree.py`) knows the whole tree. This rule sees one request at a time, and takes checkpoints only at
positions that the request computes: below where it resumes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from headwater.cache.positions.tree import Tree

Victim = tuple[int | None, float]  # a checkpoint to drop, and its loss; None and 0: there is room


@dataclass(frozen=True, slots=True)
class Exchange:
    """Result of one request: nodes that get a checkpoint, and nodes that lose theirs."""

    resumed: int  # node whose checkpoint the request resumes from; 0: the root
    recomputed: int  # tokens from there to the end of its overlap
    taken: tuple[int, ...]
    dropped: tuple[int, ...]


class OnlineTree:
    """Tree of prefixes that grows, the number of requests whose overlap ended at each node, and at most k checkpoints.

    A checkpoint's loss is the number of requests that would resume there, times the distance to the checkpoint above.
    A node's gain is the number of requests that end in its subtree and would resume above it, times the distance to
    the checkpoint above. Each request exchanges checkpoints for nodes on its way, the best exchange first, as long as
    a gain is greater than the least loss that remains once the node has its checkpoint. Nodes are numbered in the order
    in which they are added; node 0 is the root. Depths are in tokens.
    """

    def __init__(self, k: int) -> None:
        if k < 0:
            raise ValueError(f"{k} checkpoints cannot be kept; 0 is the least")
        self._k = k
        self._parent, self._depth = [0], [0]
        self._ended = [0]  # requests whose overlap ended here
        self._resuming = [0]  # requests that ended in the subtree, with no checkpoint between here and their end
        self._kept: dict[int, int] = {}  # node with a checkpoint: the next such node above it, or the root
        self._under: dict[int, set[int]] = {0: set()}  # the reverse

    @property
    def kept(self) -> frozenset[int]:
        """Nodes with a checkpoint."""
        return frozenset(self._kept)

    def add(self, parent: int, depth: int) -> int:
        """Add a leaf and return its number. Raises ValueError if it is not deeper than its parent."""
        if depth <= self._depth[parent]:
            raise ValueError(f"a node {depth} deep cannot be below node {parent}, which is {self._depth[parent]} deep")
        for column, value in ((self._parent, parent), (self._depth, depth), (self._ended, 0), (self._resuming, 0)):
            column.append(value)
        return len(self._parent) - 1

    def split(self, child: int, depth: int) -> int:
        """Add a node on the edge that leads to `child`, and return its number. Raises ValueError if it is not on it."""
        if not self._depth[self._parent[child]] < depth < self._depth[child]:
            raise ValueError(
                f"depth {depth} is not on the edge of node {child}, which runs from "
                f"{self._depth[self._parent[child]]} to {self._depth[child]}"
            )
        node = self.add(self._parent[child], depth)
        self._parent[child] = node
        self._resuming[node] = 0 if child in self._kept else self._resuming[child]
        return node

    def request(self, overlap: int, end: int | None = None) -> Exchange:
        """Count a request whose overlap ends at a node, and exchange checkpoints along its prompt.

        end: node at or below `overlap` at which the prompt ends; all nodes up to there are computed, too.
        """
        self._ended[overlap] += 1
        resumed = overlap
        while resumed and resumed not in self._kept:
            self._resuming[resumed] += 1
            resumed = self._parent[resumed]
        self._resuming[resumed] += 1
        way = [*self._up(overlap if end is None else end, resumed), resumed][::-1]
        taken: dict[int, None] = {}
        dropped: dict[int, None] = {}
        while (exchange := self._best(way)) is not None:
            node, victim = exchange
            self._take(node)
            taken[node] = None
            dropped.pop(node, None)
            if victim is not None:
                self._drop(victim)
                dropped[victim] = None
                if victim in taken:
                    del taken[victim], dropped[victim]
        return Exchange(resumed, self._depth[overlap] - self._depth[resumed], tuple(taken), tuple(dropped))

    def tree(self) -> Tree:
        """Return the tree as it is, with the numbers of requests as weights, and node numbers as in `order`."""
        order = self.order()
        index = {node: i for i, node in enumerate(order)}
        return Tree(
            [index[self._parent[v]] for v in order], [self._depth[v] for v in order], [self._ended[v] for v in order]
        )

    def order(self) -> list[int]:
        """Return all nodes by depth, the root first: node numbers of `tree()`."""
        return sorted(range(len(self._depth)), key=self._depth.__getitem__)

    def _up(self, node: int, stop: int) -> Iterator[int]:
        """Yield a node and those above it, as far as `stop`, which is left out."""
        while node not in (stop, 0):
            yield node
            node = self._parent[node]

    def _above(self, node: int) -> int:
        """Return the nearest node above with a checkpoint, or the root."""
        node = self._parent[node]
        while node and node not in self._kept:
            node = self._parent[node]
        return node

    def _best(self, way: list[int]) -> tuple[int, int | None] | None:
        """Return the best node to take on the way (from the resumed one down), and the checkpoint to drop for it."""
        offers, above = [], self._above(way[0]) if way[0] and way[0] not in self._kept else way[0]
        for node in way[1:]:
            if node in self._kept:
                above = node
            elif self._resuming[node]:
                offers.append((self._resuming[node] * (self._depth[node] - self._depth[above]), node, above))
        offers.sort(reverse=True)
        least = self._least()
        best, most = None, 0.0
        for gain, node, above in offers:
            if gain <= most:
                break
            victim, loss = self._victim(node, above, least)
            if gain - loss > most:
                best, most = (node, victim), gain - loss
        return best

    def _least(self) -> Victim:
        """Return the checkpoint that loses least and its loss; None and 0 if there is room for one more."""
        if len(self._kept) < self._k:
            return None, 0
        losses = ((self._resuming[v] * (self._depth[v] - self._depth[above]), v) for v, above in self._kept.items())
        loss, victim = min(losses, default=(math.inf, 0))
        return victim, loss

    def _victim(self, node: int, above: int, least: Victim) -> Victim:
        """Return the checkpoint that loses least once `node` has one, too; `least`: without it.

        Only the checkpoint above `node` loses less then, because requests leave it, and those below, which come nearer.
        """
        victim, loss = least
        if victim is None:
            return least
        if above:
            rest = self._resuming[above] - self._resuming[node]
            loss, victim = min((loss, victim), (rest * (self._depth[above] - self._depth[self._kept[above]]), above))
        for kept in self._under[above]:
            nearer = self._resuming[kept] * (self._depth[kept] - self._depth[node])
            if nearer < loss and self._is_below(kept, node):
                victim, loss = kept, nearer
        return victim, loss

    def _is_below(self, node: int, other: int) -> bool:
        depth = self._depth[other]
        while self._depth[node] > depth:
            node = self._parent[node]
        return node == other

    def _take(self, node: int) -> None:
        above = self._above(node)
        for v in self._up(self._parent[node], above):
            self._resuming[v] -= self._resuming[node]
        self._resuming[above] -= self._resuming[node]
        under = {kept for kept in self._under[above] if self._is_below(kept, node)}
        for kept in under:
            self._kept[kept] = node
        self._under[node] = under
        self._under[above] -= under
        self._under[above].add(node)
        self._kept[node] = above

    def _drop(self, node: int) -> None:
        above = self._kept.pop(node)
        for v in self._up(self._parent[node], above):
            self._resuming[v] += self._resuming[node]
        self._resuming[above] += self._resuming[node]
        under = self._under.pop(node)
        for kept in under:
            self._kept[kept] = above
        self._under[above].discard(node)
        self._under[above] |= under
