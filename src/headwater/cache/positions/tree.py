"""Tree of prefixes, and the best places of k checkpoints in all of it: the exact dynamic program.

Sparse prefix caching (section 3) places checkpoints on one path, and leaves "general prefix trees with branching" open
(section 7). A checkpoint here is a recurrent state at a node. KV is not counted: as in the paper, all of it is kept.

With s(v) the weight of all requests whose overlap ends in v's subtree, and p(v) the nearest checkpoint above v (the
root if there is none), a set of checkpoints saves the sum over its members v of s(v)·(depth(v) − depth(p(v))). So

    F_v(a, j) = max(C_v(a, j), C_v(v, j−1) + s(v)·(depth(v) − depth(a))),

the most that j checkpoints in v's subtree save if `a` is the nearest one above v, with C_v(a, ·) the (max, +)
convolution of F_c(a, ·) over v's children c. The F_v of j ≤ min(k, size of the subtree) are computed from the leaves
up, for all ancestors `a` at once. That takes O(P·k) time and memory, P being the sum of all nodes' levels (Vigneron et
al., "An algorithm for finding a k-median in a directed tree", 2000, with O(P·k²)). Savings are not concave in j, so
the convolutions are general ones. Before the program runs, bounds rule out most nodes (`pricing.py`).

Proofs and measurements: docs/decisions/055-placement-over-a-tree.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from headwater.cache.positions.pricing import Candidates, eliminate
from headwater.cache.positions.program import Column, Lines, Numbers, Recomputation, solve


@dataclass(frozen=True, slots=True)
class TreeSchedule:
    nodes: tuple[int, ...]  # ascending, without the root
    cost: float  # tokens that a request recomputes on average


class Tree:
    """Rooted tree of n prefixes, numbered so that a parent comes before its children; node 0 is the root.

    parents: [n] numbers of the nodes above, that of the root being 0. depths: [n] tokens, 0 at the root, and more at
    each node than at its parent. weights: [n] how likely requests are to overlap exactly to a node, in any unit, not
    negative. Raises ValueError for anything else.
    """

    __slots__ = ("depths", "parents", "weights")

    def __init__(self, parents: Sequence[int] | Column, depths: Numbers, weights: Numbers) -> None:
        self.parents: Column = np.asarray(parents, dtype=np.intp)
        self.depths: Column = np.asarray(depths, dtype=np.int64)
        self.weights: Column = np.asarray(weights, dtype=float)
        n = len(self.parents)
        if not n or len(self.depths) != n or len(self.weights) != n:
            raise ValueError(
                f"{n} parents, {len(self.depths)} depths and {len(self.weights)} weights; a tree has one each"
            )
        if self.parents[0] or self.depths[0]:
            raise ValueError(f"node 0 has parent {self.parents[0]} and depth {self.depths[0]}; a root has 0 and 0")
        late = np.flatnonzero((self.parents[1:] > np.arange(n - 1)) | (self.parents[1:] < 0))
        if len(late):
            raise ValueError(
                f"node {late[0] + 1} has parent {self.parents[late[0] + 1]}, which does not come before it"
            )
        flat = np.flatnonzero(~(self.depths[1:] > self.depths[self.parents[1:]]))
        if len(flat):
            above = self.depths[self.parents[flat[0] + 1]]
            raise ValueError(f"node {flat[0] + 1} is {self.depths[flat[0] + 1]} deep, its parent {above}")
        wrong = self.weights[~((self.weights >= 0) & np.isfinite(self.weights))]
        if len(wrong):
            raise ValueError(f"a weight of {wrong[0]:g}; it must be 0 or more, and finite")

    def __len__(self) -> int:
        return len(self.parents)

    def recomputation(self, nodes: Iterable[int]) -> Recomputation:
        """Return the expected recomputation with checkpoints at `nodes`."""
        total = float(self.weights.sum())
        if not total:
            return Recomputation(0.0, 0.0)
        chosen = set(nodes)
        depths = self.depths.tolist()
        resumed = [0.0] * len(depths)
        for node, parent in enumerate(self.parents.tolist()):
            resumed[node] = depths[node] if node in chosen else resumed[parent]
        cost = float(self.weights @ (self.depths - resumed)) / total
        return Recomputation(cost, float(self.weights @ self.depths) / total)


def solve_tree(tree: Tree, k: int) -> TreeSchedule:
    """Return at most k nodes with the least expected recomputation. Exact, within rounding (1e-11 of the savings).

    A node is returned only if an overlap ends at it or branches below it: of other nodes, the next such node serves the
    same requests from deeper. Ties are always resolved in the same way. Raises ValueError if k is negative.
    """
    if k < 0:
        raise ValueError(f"{k} checkpoints cannot be placed; 0 is the least")
    candidates = Candidates.of(tree.parents, tree.depths, tree.weights)
    if len(candidates) - 1 <= k:
        chosen: Sequence[int] | Column = np.arange(1, len(candidates))
    elif not k:
        chosen = []
    else:
        candidates, proven = eliminate(candidates, k)
        chosen = best(candidates, k) if proven is None else proven
    nodes = tuple(sorted(candidates.node[list(chosen)].tolist()))
    return TreeSchedule(nodes, tree.recomputation(nodes).cost)


def _on_path(candidates: Candidates, k: int) -> list[int]:
    """Return the candidates that the program of a single path chooses (theorem 2). A branch left out is weight."""
    own = candidates.served - np.append(candidates.served[1:], 0.0)
    positions = solve(candidates.depth, own, k).positions
    found: list[int] = np.searchsorted(candidates.depth, positions).tolist()
    return found


def best(candidates: Candidates, k: int) -> list[int]:
    """Return the k candidates that save most, by the program over all of them."""
    return _on_path(candidates, k) if candidates.chains == 1 else _Program(candidates, k).chosen()


class _Chain:
    """Candidates one below the other, none of which branches but the last: F_v of the first, for one budget at a time.

    With lines s(c)·(depth(c) − x) + F(c, j−1) of all members c, the table at x and j is the highest of the lines, or
    C_v of the last member. Lines of members at or above x need not be ruled out: they have no more than F(x, j−1).

    rows_A: depths of the first member's ancestors and of the members. members: their indices.
    """

    def __init__(self, members: list[int], above: Column, candidates: Candidates) -> None:
        self.members = members
        self._depth, self._served = candidates.depth[members], candidates.served[members]
        self.rows_A = np.concatenate((above, self._depth))
        self.table_AJ: Column = np.zeros((0, 1))

    def fill(self, below_AJ: Column, k: int) -> None:
        """Compute the table. below_AJ: C_v of the last member."""
        width, first = below_AJ.shape[1], len(self.rows_A) - len(self.members)
        self.table_AJ = table_AJ = np.empty((len(self.rows_A), min(width + len(self.members), k + 1)))
        table_AJ[:, :width] = below_AJ
        table_AJ[:, width:] = below_AJ[:, -1:]
        if len(self.members) == 1:
            gain_A = self._served * (self._depth - self.rows_A)
            taken_AJ = gain_A[:, None] + below_AJ[first, : table_AJ.shape[1] - 1]
            np.maximum(table_AJ[:, 1:], taken_AJ, out=table_AJ[:, 1:])
            return
        useful = np.append(self._served[1:] < self._served[:-1], True)  # of members that serve the same: the deepest
        depth, served = self._depth[useful], self._served[useful]
        lines = Lines.of(-served, self.rows_A)
        for j in range(1, table_AJ.shape[1]):
            height = served * depth + table_AJ[first:, j - 1][useful]
            best = lines.lowest(height.max() - height)
            np.maximum(table_AJ[:, j], height[best] - served[best] * self.rows_A, out=table_AJ[:, j])

    def next(self, level: int, budget: int) -> int | None:
        """Return the position of the first member that gets a checkpoint below that level's; None at the last."""
        first = max(0, level + 1 - (len(self.rows_A) - len(self.members)))
        if first == len(self.members):
            return None
        rows = self.table_AJ[-len(self.members) :, budget - 1][first:]
        return first + int((self._served[first:] * (self._depth[first:] - self.rows_A[level]) + rows).argmax())


class _Program:
    """Tables F_v of all candidates, in letters of their shapes: A ancestors from the root down, J budgets 0..|J|−1.

    A budget is what may be spent, so a table does not fall along J, and its last column is that of all larger budgets.
    """

    def __init__(self, candidates: Candidates, k: int) -> None:
        self._k = k
        parent = candidates.parent.tolist()
        count = np.bincount(candidates.parent[1:], minlength=len(candidates)).tolist()
        self._chains: dict[int, _Chain] = {}  # by the first member
        self._children: dict[int, list[int]] = {0: []}  # first members of chains, by the last member above
        rows: dict[int, Column] = {0: np.zeros(1)}  # by the last member
        for v in range(1, len(candidates)):
            if parent[v] and count[parent[v]] == 1:
                continue
            members = [v]
            while count[members[-1]] == 1:
                members.append(members[-1] + 1)
            chain = self._chains[v] = _Chain(members, rows[parent[v]], candidates)
            rows[members[-1]] = chain.rows_A
            self._children[parent[v]].append(v)
            self._children[members[-1]] = []
        below: dict[int, Column] = {}
        for v, chain in reversed(self._chains.items()):
            chain.fill(below.pop(chain.members[-1], np.zeros((len(chain.rows_A), 1))), k)
            table_AJ = chain.table_AJ[: -len(chain.members)]
            above = parent[v]
            below[above] = convolve(below[above], table_AJ, k) if above in below else table_AJ

    def chosen(self) -> list[int]:
        """Follow the tables from the root down."""
        found: list[int] = []
        waiting = [
            (0, 0, self._k)
        ]  # the last of a chain, the level of the checkpoint nearest to its children, and budget
        while waiting:
            for v, part in self._shares(*waiting.pop()):
                chain = self._chains[v]
                level, budget = part
                spent = self._merged(chain.members[-1], level)[-1]
                while chain.table_AJ[level, budget] > spent[min(budget, len(spent) - 1)]:
                    at = chain.next(level, budget)
                    if at is None:
                        break
                    found.append(chain.members[at])
                    level, budget = len(chain.rows_A) - len(chain.members) + at, budget - 1
                    spent = self._merged(chain.members[-1], level)[-1]
                waiting.append((chain.members[-1], level, budget))
        return found

    def _merged(self, v: int, level: int) -> list[Column]:
        """Return one row of C_v, after each child from the last to the first; the first is that of no child."""
        rows = [np.zeros(1)]
        for child in reversed(self._children[v]):
            rows.append(convolve(rows[-1][None], self._chains[child].table_AJ[level][None], self._k)[0])
        return rows

    def _shares(self, v: int, level: int, budget: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """Divide a budget among the children of a node; those without a share are left out."""
        rows = self._merged(v, level)
        for turn, child in enumerate(self._children[v], 1):  # rows[-turn] has this child and all later ones
            others, own = rows[-turn - 1], self._chains[child].table_AJ[level]
            budget = min(budget, len(rows[-turn]) - 1)
            part = np.arange(max(0, budget - len(others) + 1), min(budget, len(own) - 1) + 1)
            share = int(part[(own[part] + others[budget - part]).argmax()])
            budget -= share
            if share:
                yield child, (level, share)


def convolve(one_AJ: Column, other_AJ: Column, k: int) -> Column:
    """Return the (max, +) convolution of each row, up to budget k."""
    if one_AJ.shape[1] < other_AJ.shape[1]:
        one_AJ, other_AJ = other_AJ, one_AJ
    width = one_AJ.shape[1]
    last = min(width + other_AJ.shape[1] - 2, k)
    out_AJ = np.full((len(one_AJ), last + 1), -np.inf)
    for j in range(min(other_AJ.shape[1], last + 1)):
        part = out_AJ[:, j : j + width]
        np.maximum(part, one_AJ[:, : part.shape[1]] + other_AJ[:, j : j + 1], out=part)
    return out_AJ
