"""Placement over a tree: the program against brute force, that of a single path, and trees that decompose."""

from __future__ import annotations

import random
from itertools import combinations, product

import pytest

from headwater.cache.placement.optimal.program import solve
from papers.sparse.tree import NOTHING, solve_tree

Tree = tuple[list[int], list[int], list[int]]  # parents, depths, weights


def drawn(rng: random.Random, n: int) -> Tree:
    """Draw a tree of n nodes, from a star to a path, with many zero weights or none, and many ties or few."""
    deep, zeros, most, step = rng.random(), rng.choice((0, 0.3, 0.7)), rng.choice((1, 2, 50)), rng.choice((1, 3, 90))
    parents, depths = [0], [0]
    for node in range(1, n):
        parents.append(node - 1 if rng.random() < deep else rng.randrange(node))
        depths.append(depths[parents[-1]] + rng.randint(1, step))
    return parents, depths, [0 if rng.random() < zeros else rng.randint(1, most) for _ in range(n)]


def saved_by(tree: Tree, nodes: tuple[int, ...]) -> int:
    """Return the sum over all requests of the depth at which each resumes."""
    resumed: list[int] = []
    for node, (parent, depth) in enumerate(zip(*tree[:2], strict=True)):
        resumed.append(depth if node in nodes else resumed[parent] if node else 0)
    return sum(weight * at for weight, at in zip(tree[2], resumed, strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_tree_program_saves_as_much_as_best_of_all_sets(seed: int) -> None:
    tree = drawn(random.Random(seed), 1 + seed % 10)
    nodes = range(1, len(tree[0]))
    most = 0
    for k in range(len(tree[0]) + 1):
        most = max([most, *(saved_by(tree, chosen) for chosen in combinations(nodes, k))])
        found = solve_tree(*tree, k)
        assert found.tokens == saved_by(tree, found.nodes) == most
        assert len(set(found.nodes)) == len(found.nodes) <= k
        assert 0 not in found.nodes


@pytest.mark.parametrize("seed", range(20))
def test_tree_program_on_path_equals_path_program(seed: int) -> None:
    rng = random.Random(seed)
    depths = [0, *sorted(rng.sample(range(1, 60), 12))]
    weights = [0, *(rng.randint(0, 6) for _ in depths[1:])]
    path = [0, *range(12)], depths, weights
    for k in (0, 1, 3, 8):
        assert solve_tree(*path, k).tokens == saved_by(
            path, tuple(map(depths.index, solve(depths, weights, k).positions))
        )


def test_savings_are_not_concave_in_number_of_checkpoints() -> None:
    """Three branches below one node: one checkpoint above all, any two, or one in each."""
    tree = [0, 0, 1, 1, 1], [0, 1, 2, 2, 2], [0, 0, 1, 1, 1]
    assert [solve_tree(*tree, k).tokens for k in range(4)] == [0, 3, 4, 6]


@pytest.mark.parametrize("stem", [0, 1000], ids=["star", "comb"])
@pytest.mark.parametrize("seed", range(6))
def test_star_and_comb_decompose_into_their_edges(seed: int, stem: int) -> None:
    """Section 3: each edge is a problem of its own, once the end of a comb's shared document has a checkpoint."""
    rng = random.Random(seed)
    laws = [{at: rng.randint(1, 9) for at in sorted(rng.sample(range(1, 40), 4))} for _ in range(3)]
    parents, depths, weights = ([0, 0], [0, stem], [0, 10_000]) if stem else ([0], [0], [0])
    root = len(parents) - 1
    for law in laws:
        for i, (at, weight) in enumerate(law.items()):
            parents.append(len(parents) - 1 if i else root)
            depths.append(stem + at)
            weights.append(weight)
    of_edges = [
        [
            sum(law.values()) * (solve([*law], [*law.values()], 0).cost - solve([*law], [*law.values()], j).cost)
            for j in range(6)
        ]
        for law in laws
    ]
    for k in (1, 2, 5):
        rest = k - root
        divided = max(
            sum(saved[j] for saved, j in zip(of_edges, parts, strict=True))
            for parts in product(range(rest + 1), repeat=3)
            if sum(parts) == rest
        )
        assert solve_tree(parents, depths, weights, k).tokens == pytest.approx(stem * sum(weights) + divided)


def test_nodes_without_requests_get_no_checkpoint() -> None:
    assert solve_tree([0, 0, 1, 1, 3], [0, 5, 9, 7, 8], [0, 0, 0, 0, 2], 5).nodes == (4,)
    assert solve_tree([0, 0], [0, 4], [3, 0], 1) == NOTHING
