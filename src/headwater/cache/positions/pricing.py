"""Candidates for checkpoints in a tree, and the bounds that rule most of them out.

If each checkpoint has a price, the best set of any size is found without budgets, in O(P) for P the sum of all nodes'
levels: Lagrangian relaxation. What it saves, less its price, plus the price of k checkpoints, is at least what any k
checkpoints save. The same bound for the sets that contain a given node tells whether that node can be in a set that
saves more than the best one known; if not, it is no candidate any more. Letters of shapes: N nodes of one level, A
ancestors by level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headwater.cache.positions.program import Column

ROUNDS = 12  # prices that are tried
FEW = 1.5  # times k: with fewer chains of candidates the program is faster than another bound
ROUNDING = 1e-11  # of the savings
MOST = 32_000_000  # pairs of a node and an ancestor, of 8 bytes each, for which bounds are computed


@dataclass(frozen=True, slots=True)
class Candidates:
    """Nodes that may get a checkpoint, in preorder; the first is the root. [m] each, m = len().

    A node that is left out remains in `served` of those above it.
    """

    node: Column  # its number in the tree
    parent: Column  # index of the nearest candidate above; 0 for the root
    end: Column  # index after its last descendant
    depth: Column  # tokens
    served: Column  # weight of the requests whose overlap ends in its subtree

    @classmethod
    def of(cls, parents: Column, depths: Column, weights: Column) -> Candidates:
        """Return the nodes at which some overlap ends, or below which overlaps branch.

        Any other node serves no request, or those of its only child with requests, which serves them from deeper.
        """
        above, n = parents.tolist(), len(parents)
        served, size, live = weights.tolist(), [1] * n, [0] * n
        for v in range(n - 1, 0, -1):
            if served[v]:
                live[above[v]] += 1
                served[above[v]] += served[v]
            size[above[v]] += size[v]
        at, free = [0] * n, [1] * n  # preorder index, and the next one free for a child
        for v in range(1, n):
            place = at[v] = free[above[v]]
            free[v] = place + 1
            free[above[v]] = place + size[v]
        place_of = np.array(at)
        order = np.empty(n, dtype=np.intp)
        order[place_of] = np.arange(n)
        everything = cls(
            order,
            place_of[parents][order],
            np.arange(n) + np.array(size)[order],
            depths[order],
            np.array(served)[order],
        )
        useful = (np.array(served) > 0) & ((weights > 0) | (np.array(live) > 1))
        return everything.only(useful[order])

    def __len__(self) -> int:
        return len(self.node)

    @property
    def chains(self) -> int:
        """Number of paths without a branch that the tree consists of; 1: it is a path from the root."""
        children = np.bincount(self.parent[1:], minlength=len(self))
        children[0] = 2
        return int((children[self.parent[1:]] > 1).sum())

    def only(self, keep: Column) -> Candidates:
        """Return those to keep, and the root."""
        keep = keep.copy()
        keep[0] = True
        kept = np.where(keep, np.arange(len(self)), self.parent)
        while not keep[kept].all():
            kept = kept[kept]
        index = np.concatenate(([0], np.cumsum(keep)))
        return Candidates(
            self.node[keep],
            index[kept[self.parent]][keep],
            index[self.end][keep],
            self.depth[keep],
            self.served[keep],
        )

    def savings(self, chosen: Sequence[int]) -> tuple[float, list[float]]:
        """Return what a set saves, and what each of its members would lose: weight times tokens."""
        order = sorted(chosen)
        resuming, above = [float(self.served[v]) for v in order], [-1] * len(order)
        stack: list[int] = []
        for i, v in enumerate(order):
            while stack and self.end[order[stack[-1]]] <= v:
                stack.pop()
            if stack:
                above[i] = stack[-1]
                resuming[stack[-1]] -= float(self.served[v])
            stack.append(i)
        gaps = [
            float(self.depth[v] - (self.depth[order[a]] if a >= 0 else 0.0)) for v, a in zip(order, above, strict=True)
        ]
        total = sum(float(self.served[v]) * gap for v, gap in zip(order, gaps, strict=True))
        lost = {v: own * gap for v, own, gap in zip(order, resuming, gaps, strict=True)}
        return total, [lost[v] for v in chosen]


def eliminate(candidates: Candidates, k: int) -> tuple[Candidates, list[int] | None]:
    """Return the candidates that may be in a better set than the best known, with all of this one, and a proven best.

    The second is a set of at most k that saves as much as the bound; None if no such set was found.
    """
    pairs = sum(i * len(level) for i, level in enumerate(_levels(candidates)))
    if candidates.chains <= FEW * k or pairs > MOST:
        return candidates, None
    known = improved(candidates, [], k)
    most, losses = candidates.savings(known)
    low, high, price = 0.0, float((candidates.served * candidates.depth).max()), min(losses)
    for _ in range(ROUNDS):
        relaxed = Relaxed(candidates, price)
        bound = relaxed.value + price * k
        if len(relaxed.chosen) <= 2 * k:
            found = improved(candidates, relaxed.chosen.tolist(), k)
            saved, losses = candidates.savings(found)
            if saved > most:
                known, most = found, saved
        slack = ROUNDING * bound
        if bound - most <= slack:
            return candidates, known
        keep = relaxed.with_node + price * k >= most - slack
        keep[[0, *known]] = True
        candidates = candidates.only(keep)
        known = (np.cumsum(keep) - 1)[known].tolist()
        if candidates.chains <= FEW * k:
            break
        if len(relaxed.chosen) > k:
            low = price
        else:
            high = price
        price = _between(low, high, price, len(relaxed.chosen), k)
    return candidates, None


def _between(low: float, high: float, price: float, count: int, k: int) -> float:
    """Return the next price to try, from the number of checkpoints at this one; halfway if that is not between.

    Along a path with equal weights the k-th checkpoint saves in proportion to 1 / k² (theorem 1).
    """
    scaled = price * (count / k) ** 2 if count else 0.0
    return scaled if low < scaled < high and scaled != price else (low + high) / 2


class Relaxed:
    """Best set of any size if each checkpoint costs `price`.

    value: what it saves, less its price. with_node: [m] the same for the best set that contains each candidate.
    chosen: its members, ascending.
    """

    def __init__(self, of: Candidates, price: float) -> None:
        self._of, self._price = of, price
        self._levels = _levels(of)
        row = np.zeros(len(of), dtype=np.intp)  # of a node among those of its level
        for level in self._levels:
            row[level] = np.arange(len(level))
        self._up = [row[of.parent[level]] for level in self._levels]  # [N] rows of the parents, a level above
        self._above_NA = [np.zeros((1, 0))]  # depths of the ancestors
        for upper, up in zip(self._levels, self._up[1:], strict=False):
            self._above_NA.append(np.concatenate((self._above_NA[-1], of.depth[upper][:, None]), axis=1)[up])
        none, last = np.zeros((1, 0)), len(self._levels)
        self._best_NA, self._takes_NA = [none] * last, [none.astype(bool)] * last  # F_v, and whether v has a checkpoint
        self._below_NA = [np.zeros((len(level), i + 1)) for i, level in enumerate(self._levels)]  # C_v; v comes last
        self._climb()
        self.value = float(self._below_NA[0][0, 0])
        self.with_node = np.full(len(of), self.value)
        self.chosen = self._descend()

    def _climb(self) -> None:
        """Compute the best of each subtree, by the level of the nearest checkpoint above."""
        for i in range(len(self._levels) - 1, 0, -1):
            level, below_NA, up = self._levels[i], self._below_NA[i], self._up[i]
            served = self._of.served[level]
            own_N = below_NA[:, i] + served * self._of.depth[level] - self._price
            taken_NA = own_N[:, None] - served[:, None] * self._above_NA[i]
            self._takes_NA[i] = taken_NA > below_NA[:, :i]
            self._best_NA[i] = np.maximum(taken_NA, below_NA[:, :i])
            first = np.flatnonzero(np.concatenate(([True], up[1:] != up[:-1])))
            self._below_NA[i - 1][up[first]] = np.add.reduceat(self._best_NA[i], first, axis=0)

    def _descend(self) -> Column:
        """Compute the best set with each node, from what is outside its subtree; return the best set of all."""
        outside_NA, taken_N = np.zeros((1, 0)), np.zeros(1)  # taken: the same if v has a checkpoint
        nearest_N, chosen = np.zeros(1, dtype=np.intp), []
        for i, level in enumerate(self._levels[1:], 1):
            up, served = self._up[i], self._of.served[level]
            through_NA = np.concatenate((outside_NA, taken_N[:, None]), axis=1) + self._below_NA[i - 1]
            outside_NA = through_NA[up] - self._best_NA[i]
            gain_NA = served[:, None] * (self._of.depth[level][:, None] - self._above_NA[i])
            taken_N = (outside_NA + gain_NA).max(axis=1) - self._price
            self.with_node[level] = taken_N + self._below_NA[i][:, i]
            takes_N = self._takes_NA[i][np.arange(len(level)), nearest_N[up]]
            nearest_N = np.where(takes_N, i, nearest_N[up])
            chosen.append(level[takes_N])
        return np.sort(np.concatenate(chosen))


def _levels(of: Candidates) -> list[Column]:
    """Return the nodes of each level from the root down, in preorder: children of one node are neighbours."""
    level, up = np.zeros(len(of), dtype=np.intp), of.parent.copy()
    level[1:] = 1
    while up.any():
        level, up = level + level[up], up[up]
    order = np.argsort(level, kind="stable")
    return np.split(order, np.cumsum(np.bincount(level))[:-1])


def improved(of: Candidates, chosen: Sequence[int], k: int) -> list[int]:
    """Return a set of at most k: `chosen` without what loses least, filled with what gains most, and exchanged."""
    chosen = list(chosen)
    while len(chosen) > k:
        _, losses = of.savings(chosen)
        del chosen[int(np.argmin(losses))]
    greedy = Greedy(of, chosen)
    greedy.fill(k)
    saved, losses = of.savings(greedy.chosen)
    while True:
        rest = [v for v, loss in zip(greedy.chosen, losses, strict=True) if loss > min(losses)][: k - 1]
        other = Greedy(of, rest)
        other.fill(k)
        more, losses = of.savings(other.chosen)
        if more <= saved * (1 + ROUNDING):
            return greedy.chosen
        greedy, saved = other, more


class Greedy:
    """Set of checkpoints, and what each further one would gain: the weight that it would serve, times the distance."""

    def __init__(self, of: Candidates, chosen: Sequence[int]) -> None:
        self._of = of
        self.chosen: list[int] = []
        self._resumed = np.zeros(len(of))  # depth of the nearest checkpoint at or above each
        self._served = of.served.copy()  # without the requests that resume below
        self._served[0] = 0
        self._taken = np.zeros(len(of), dtype=bool)
        for v in sorted(chosen):
            self._take(v)

    def fill(self, k: int) -> None:
        """Take what gains most, one by one, up to k checkpoints or until nothing gains."""
        while len(self.chosen) < k:
            gain = self._served * (self._of.depth - self._resumed)  # 0 for those that are taken
            best = int(gain.argmax())
            if not gain[best]:
                return
            self._take(best)

    def _take(self, v: int) -> None:
        of = self._of
        below = self._resumed[v : of.end[v]]
        np.maximum(below, of.depth[v], out=below)
        self._taken[v] = True
        self.chosen.append(v)
        up, served = int(of.parent[v]), self._served[v]
        while up:
            self._served[up] -= served
            if self._taken[up]:
                break
            up = int(of.parent[up])
