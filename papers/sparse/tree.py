"""Exact placement of k checkpoints over a whole tree of prefixes, which the paper leaves open (section 7).

A request that overlaps the tree up to node v resumes at the deepest checkpoint at or above v. All KV is kept, as in the
paper. With s(v) the weight of all requests whose overlap ends in v's subtree, and p(v) the nearest checkpoint above v
(the root if there is none), a set of checkpoints saves the sum over its members v of s(v)·(depth(v) − depth(p(v))). So

    F_v(a, j) = max(C_v(a, j), C_v(v, j − 1) + s(v)·(depth(v) − depth(a)))

is the most that j checkpoints in v's subtree save if `a` is the nearest checkpoint above v. C_v(a, ·) is the (max, +)
convolution of F_c(a, ·) over v's children c: subtrees share only the budget. Savings are not concave in j, so a price
for each checkpoint does not replace the budget. Measurements: decision 013.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Saved(NamedTuple):
    """Savings of a set of checkpoints: tokens, times the weight of the requests that do not recompute them."""

    tokens: float
    nodes: tuple[int, ...]


NOTHING = Saved(0.0, ())


def solve_tree(parents: Sequence[int], depths: Sequence[int], weights: Sequence[float], k: int) -> Saved:
    """Return at most k nodes that save most. Takes O(n · depth · k²).

    A parent comes before its children; node 0 is the root, with depth 0. weights: of overlaps that end at each node.
    """
    served = list(weights)
    for v in range(len(parents) - 1, 0, -1):
        served[parents[v]] += served[v]
    none = [NOTHING] * (k + 1)
    below: dict[tuple[int, int], list[Saved]] = {}  # C_v(a, ·) by (v, a), so far
    for v in range(len(parents) - 1, 0, -1):
        own, a = below.pop((v, v), none), v
        while a:
            a = parents[a]
            gain = served[v] * (depths[v] - depths[a])
            chosen = [Saved(tokens + gain, (*nodes, v)) for tokens, nodes in own[:k]]
            best = [NOTHING, *map(_better, below.pop((v, a), none)[1:], chosen)]
            above = below.get((parents[v], a), none)
            below[parents[v], a] = [_merged(above, best, budget) for budget in range(k + 1)]
    return below.get((0, 0), none)[k]


def _merged(one: list[Saved], other: list[Saved], budget: int) -> Saved:
    """Return the best division of a budget between two parts of a tree."""
    divided = ((one[budget - share], other[share]) for share in range(budget + 1))
    return max((Saved(a.tokens + b.tokens, a.nodes + b.nodes) for a, b in divided), key=lambda saved: saved.tokens)


def _better(one: Saved, other: Saved) -> Saved:
    return other if other.tokens > one.tokens else one
