"""Checkpoints over a whole tree of prefixes: time of the exact program, and gap of the online rule to it.

    python -m benchmarks.tree_placement [--data FOLDER] [--repeats 5] [--small] [--out FILE]

Time: `solve_tree` on drawn trees of 10,000 nodes with 64 checkpoints. Steps between nodes are 1 to 39 pages of 64
tokens and weights 0 to 19, drawn; "equal" trees have steps of one page and weights of 1. Times are CPU time of the one
thread that solves, which on an idle core is wall-clock time.

Gap: each request of a trace goes by `OnlineTree`, in order. At ten moments, evenly spaced, the rule's checkpoints and
those of the exact program for the same tree and the same counts are compared: tokens to recompute from the checkpoints
to where overlaps ended, in percent of all overlapped tokens. All KV is kept. "While serving" is what the requests
recomputed as they came, with the checkpoints of that moment: no hindsight.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from benchmarks import measure
from benchmarks.measure import Row
from headwater.cache.positions.online import OnlineTree
from headwater.cache.positions.tree import Tree, solve_tree
from headwater.lab.page_tree import Growth, PageTree
from headwater.traces.arrivals import in_order
from headwater.traces.loads import make_arrivals
from headwater.traces.read import make_trace

DATA = measure.HERE.parents[1] / "shared" / "data"
PAGE = 64  # tokens
NODES, K = 10_000, 64
KS = (8, 32, 128)
MOMENTS = 10
RECORDED = ("mini_swe_agent", "mtbench101", "mooncake/conversation", "prompts_claude_code/families")
DRAWN = tuple(f"generated({seed})" for seed in range(4))


def trees(n: int, seed: int) -> Iterator[tuple[str, Tree]]:
    """Draw trees of n nodes by the name of their shape."""
    rng = np.random.default_rng(seed)
    steps, weights = PAGE * rng.integers(1, 40, n), rng.integers(0, 20, n)
    shapes = {
        "each below any earlier one": [0, *(int(rng.integers(i)) for i in range(1, n))],
        "each below one of the 30 before": [0, *(max(0, i - int(rng.integers(1, 31))) for i in range(1, n))],
        "binary": [0, *((i - 1) // 2 for i in range(1, n))],
        "chats": _chats(n, rng),
        "star of paths of 50": [0, *(0 if i % 50 == 1 else i - 1 for i in range(1, n))],
        "comb": [0, *(max(0, i - 2 + i % 2) for i in range(1, n))],
        "path": [0, *range(n - 1)],
    }
    for name, parents in shapes.items():
        yield name, Tree(parents, _depths(parents, steps), weights)
    for name in ("each below any earlier one", "binary"):
        yield f"{name}, equal", Tree(shapes[name], _depths(shapes[name], np.full(n, PAGE)), np.ones(n))


def _chats(n: int, rng: np.random.Generator) -> list[int]:
    """Return parents: paths of up to 60 nodes, a tenth of which begin at the root, the others anywhere."""
    parents = [0]
    while len(parents) < n:
        at = int(rng.integers(len(parents))) if rng.random() > 0.1 else 0
        for _ in range(min(int(rng.integers(1, 60)), n - len(parents))):
            parents.append(at)
            at = len(parents) - 1
    return parents


def _depths(parents: Sequence[int], steps: Sequence[int] | np.ndarray) -> list[int]:
    depths = [0]
    for node in range(1, len(parents)):
        depths.append(depths[parents[node]] + int(steps[node]))
    return depths


def times(given) -> list[Row]:
    """Milliseconds of the exact program by the shape of the tree."""

    def seconds(tree: Tree) -> float:
        start = time.thread_time()
        solve_tree(tree, k)
        return time.thread_time() - start

    n, k = (500, 8) if given.small else (NODES, K)
    drawn = dict(trees(n, given.seed))
    work = {name: partial(seconds, tree) for name, tree in drawn.items()}
    return [
        Row(f"solve, {n:,} nodes, k = {k}: {name}", "ms", [1000 * one for one in found], "<= 50")
        for name, found in measure.in_turns(work, given.repeats).items()
    ]


def gaps(name: str, given) -> list[Row]:
    """Tokens that the rule and the exact program recompute on one trace."""
    trace = make_trace(name, given.data, limit=40 if given.small else None, seed=given.seed)
    order = [request for _, request in in_order(make_arrivals(trace, seed=given.seed))]
    pages = PageTree(trace, order, PAGE)
    rows = []
    for k in KS[:1] if given.small else KS:
        growth = Growth(pages, OnlineTree(k))
        moments = {len(order) * part // MOMENTS for part in range(1, MOMENTS + 1)}
        exact, online, recomputed = [], [], 0
        for number, passage in enumerate(pages.passages, 1):
            recomputed += growth.request(passage).recomputed
            if number in moments:
                tree, nodes = growth.rule.tree(), growth.rule.order()
                kept = growth.rule.kept
                found = tree.recomputation(i for i, node in enumerate(nodes) if node in kept)
                exact.append(100 * solve_tree(tree, k).cost / max(1.0, found.baseline))
                online.append(100 * found.cost / max(1.0, found.baseline))
        label = f"{name}, k = {k}, {len(tree):,} nodes"
        apart = [rule - best for rule, best in zip(online, exact, strict=True)]
        overlapped = sum(pages.depths[passage.overlap] for passage in pages.passages)
        rows += [
            Row(f"{label}: recomputed, exact", "%", exact[-1:]),
            Row(f"{label}: gap of the online rule", "points", apart[-1:], "<= 1"),
            Row(f"{label}: gap, worst of {MOMENTS} moments", "points", [max(apart)], "<= 1"),
            Row(f"{label}: recomputed while serving", "%", [100 * recomputed / max(1, overlapped)]),
        ]
    return rows


def main() -> None:
    given = measure.options(__doc__, "tree_placement", 5, data=DATA)
    traces = DRAWN[:1] if given.small else RECORDED + DRAWN
    rows = times(given) + [row for name in traces for row in gaps(name, given)]
    measure.report(given, rows, page=PAGE)


if __name__ == "__main__":
    main()
