"""The program over a tree against brute force, against that of a single path, and on trees that decompose."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.cache.positions import pricing, program
from headwater.cache.positions.pricing import Candidates, Greedy, Relaxed, eliminate, improved
from headwater.cache.positions.program import solve
from headwater.cache.positions.tree import Tree, best, convolve, solve_tree
from tests.support import examples


def drawn(rng: random.Random, n: int) -> Tree:
    """Draw a tree of n nodes, from a star to a path, with many zero weights or none, and many ties or few."""
    deep, zeros, most, step = rng.random(), rng.choice((0, 0.3, 0.7)), rng.choice((1, 2, 50)), rng.choice((1, 3, 90))
    parents, depths = [0], [0]
    for node in range(1, n):
        parents.append(node - 1 if rng.random() < deep else rng.randrange(node))
        depths.append(depths[parents[-1]] + rng.randint(1, step))
    return Tree(parents, depths, [0 if rng.random() < zeros else rng.randint(1, most) for _ in range(n)])


def least(tree: Tree) -> list[float]:
    """Return the least cost of any set of at most k nodes, by k: 0 to all nodes. Tokens of all requests."""
    n = len(tree)
    members = (np.arange(2 ** (n - 1))[:, None] >> np.arange(n - 1)) & 1  # of node i + 1, in each set
    resumed = np.zeros((len(members), n))
    for node in range(1, n):
        resumed[:, node] = np.where(members[:, node - 1], tree.depths[node], resumed[:, tree.parents[node]])
    cost = (tree.depths - resumed) @ tree.weights
    sizes = members.sum(axis=1)
    by_size = [float(cost[sizes == size].min()) for size in range(n)]
    return [min(by_size[: k + 1]) for k in range(n)]


def cost_of(tree: Tree, nodes: tuple[int, ...] | list[int]) -> float:
    """Return what all requests recompute, each by its own walk to the root."""
    total = 0.0
    for node, weight in enumerate(tree.weights.tolist()):
        at = node
        while at and at not in nodes:
            at = int(tree.parents[at])
        total += weight * int(tree.depths[node] - tree.depths[at])
    return total


@pytest.mark.parametrize("seed", range(150))
def test_no_set_of_k_nodes_costs_less(seed: int) -> None:
    tree = drawn(random.Random(seed), 1 + seed % 14)
    total = max(1.0, float(tree.weights.sum()))
    for k, cost in enumerate([*least(tree), 0.0]):
        schedule = solve_tree(tree, k)
        assert len(set(schedule.nodes)) == len(schedule.nodes) <= k
        assert 0 not in schedule.nodes
        assert cost_of(tree, schedule.nodes) == pytest.approx(cost, abs=1e-9)
        assert schedule.cost == pytest.approx(cost / total)
        assert schedule == solve_tree(tree, k)


@pytest.mark.parametrize("dense", [0, 10_000], ids=["hull", "all pairs"])
@pytest.mark.parametrize("seed", range(120))
def test_the_program_without_bounds_costs_as_little(seed: int, dense: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "DENSE", dense)
    tree = drawn(random.Random(1000 + seed), 2 + seed % 13)
    candidates = Candidates.of(tree.parents, tree.depths, tree.weights)
    for k, cost in enumerate(least(tree)):
        nodes = candidates.node[best(candidates, k)].tolist() if k else []
        assert len(nodes) <= k
        assert cost_of(tree, nodes) == pytest.approx(cost, abs=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_bounds_leave_a_best_set_among_the_candidates(seed: int) -> None:
    tree = drawn(random.Random(2000 + seed), 300)
    candidates = Candidates.of(tree.parents, tree.depths, tree.weights)
    for k in (1, 3, 10):
        if k + 1 < len(candidates):
            fewer, proven = eliminate(candidates, k)
            without = candidates.node[best(candidates, k)].tolist()
            within = fewer.node[best(fewer, k)].tolist()
            assert cost_of(tree, within) == pytest.approx(cost_of(tree, without), abs=1e-6)
            if proven is not None:
                assert cost_of(tree, fewer.node[proven].tolist()) == pytest.approx(cost_of(tree, without), abs=1e-6)


@pytest.mark.parametrize("seed", range(30))
def test_a_price_bounds_what_any_set_saves(seed: int) -> None:
    tree = drawn(random.Random(3000 + seed), 9)
    candidates = Candidates.of(tree.parents, tree.depths, tree.weights)
    m = len(candidates)
    if m < 2:
        return
    for price in (0.0, 0.5, 7.0, 300.0):
        values = {
            chosen: candidates.savings(chosen)[0] - price * len(chosen)
            for size in range(m)
            for chosen in combinations(range(1, m), size)
        }
        relaxed = Relaxed(candidates, price)
        assert relaxed.value == pytest.approx(max(values.values()))
        assert values[tuple(relaxed.chosen.tolist())] == pytest.approx(relaxed.value)
        for node in range(1, m):
            most = max(value for chosen, value in values.items() if node in chosen)
            assert relaxed.with_node[node] == pytest.approx(most)


@pytest.mark.parametrize("seed", range(40))
def test_the_known_set_grows_by_what_gains_most(seed: int) -> None:
    rng = random.Random(5000 + seed)
    tree = drawn(rng, 40)
    candidates = Candidates.of(tree.parents, tree.depths, tree.weights)
    nodes = range(1, len(candidates))
    chosen = rng.sample(nodes, min(len(nodes), rng.randint(0, 6)))
    for size in range(len(chosen) + 1, len(nodes) + 1):
        most = max(candidates.savings([*chosen, v])[0] for v in nodes if v not in chosen)
        greedy = Greedy(candidates, chosen)
        greedy.fill(size)
        chosen = greedy.chosen
        saved, losses = candidates.savings(chosen)
        assert saved == most
        assert losses == [saved - candidates.savings([u for u in chosen if u != v])[0] for v in chosen]


@settings(max_examples=examples(60), deadline=None)
@given(law=st.dictionaries(st.integers(1, 60), st.integers(0, 6), min_size=1, max_size=30), k=st.integers(0, 8))
def test_a_path_costs_what_the_program_of_a_single_path_says(law: dict[int, int], k: int) -> None:
    depths = [0, *sorted(law)]
    weights = [0, *(law[depth] for depth in sorted(law))]
    tree = Tree([0, *range(len(law))], depths, weights)
    schedule = solve_tree(tree, k)
    assert schedule.cost == pytest.approx(solve(depths, weights, k).cost)


@pytest.mark.parametrize("seed", range(20))
def test_more_checkpoints_never_cost_more(seed: int) -> None:
    tree = drawn(random.Random(4000 + seed), 120)
    costs = [solve_tree(tree, k).cost for k in range(0, 130, 7)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] == pytest.approx(tree.recomputation(()).baseline)
    assert costs[-1] == 0


def test_savings_are_not_concave_in_the_number_of_checkpoints() -> None:
    """Three branches below one node: one checkpoint above all, two anywhere, three below. So prices do not suffice."""
    tree = Tree([0, 0, 1, 1, 1], [0, 1, 2, 2, 2], [0, 0, 1, 1, 1])
    saved = [3 * (tree.recomputation(()).cost - solve_tree(tree, k).cost) for k in range(4)]
    assert saved == pytest.approx([0, 3, 4, 6])


def edges(rng: random.Random, count: int, length: int) -> list[dict[int, int]]:
    """Draw an overlap distribution along each of some edges, by the distance from their beginning."""
    return [{at: rng.randint(1, 9) for at in rng.sample(range(1, 40), length)} for _ in range(count)]


@pytest.mark.parametrize("seed", range(12))
def test_a_star_decomposes_into_its_edges(seed: int) -> None:
    """Section 3: each edge is a single-path problem; the budget goes where it saves most."""
    laws = edges(random.Random(seed), 4, 5)
    parents, depths, weights = [0], [0], [0]
    for law in laws:
        for i, at in enumerate(sorted(law)):
            parents.append(len(parents) - 1 if i else 0)
            depths.append(at)
            weights.append(law[at])
    tree = Tree(parents, depths, weights)
    for k in (1, 3, 6):
        alone = [
            [solve(list(law), list(law.values()), j).cost * sum(law.values()) for j in range(k + 1)] for law in laws
        ]
        divided = min(
            sum(costs[j] for costs, j in zip(alone, parts, strict=True))
            for parts in np.ndindex(*(k + 1,) * 4)
            if sum(parts) == k
        )
        assert solve_tree(tree, k).cost * sum(weights) == pytest.approx(divided)


@pytest.mark.parametrize("seed", range(8))
def test_a_comb_decomposes_once_its_document_ends_have_checkpoints(seed: int) -> None:
    """Section 3: a comb is a shared document with suffixes. Its heavy end gets a checkpoint, then edges remain."""
    rng = random.Random(seed)
    laws = edges(rng, 3, 4)
    parents, depths, weights = [0, 0], [0, 1000], [0, 10_000]
    for law in laws:
        for i, at in enumerate(sorted(law)):
            parents.append(len(parents) - 1 if i else 1)
            depths.append(1000 + at)
            weights.append(law[at])
    tree = Tree(parents, depths, weights)
    for k in (1, 2, 5):
        alone = [[solve(list(law), list(law.values()), j).cost * sum(law.values()) for j in range(k)] for law in laws]
        divided = min(
            sum(costs[j] for costs, j in zip(alone, parts, strict=True))
            for parts in np.ndindex(*(k,) * 3)
            if sum(parts) == k - 1
        )
        schedule = solve_tree(tree, k)
        assert 1 in schedule.nodes
        assert schedule.cost * sum(weights) == pytest.approx(divided)


def test_weights_of_zero_get_no_checkpoint() -> None:
    tree = Tree([0, 0, 1, 1, 3], [0, 5, 9, 7, 8], [0, 0, 0, 0, 2])
    assert solve_tree(tree, 5).nodes == (4,)
    assert solve_tree(Tree([0, 0, 1], [0, 1, 2], [3, 0, 0]), 2).nodes == ()
    nothing = solve_tree(Tree([0, 0], [0, 4], [0, 0]), 1)
    assert (nothing.nodes, nothing.cost) == ((), 0.0)


def test_with_as_many_checkpoints_as_nodes_nothing_is_recomputed() -> None:
    tree = drawn(random.Random(5), 40)
    assert solve_tree(tree, 39).cost == solve_tree(tree, 1000).cost == 0


@pytest.mark.parametrize("seed", range(4))
def test_long_paths_with_branches_cost_the_same_by_hulls_and_by_pairs(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths of 80 nodes, two below the first: longer than any tree that all sets can be tried on."""
    rng = random.Random(seed)
    parents = [0, *range(80), 80, *range(81, 160), 80, *range(161, 240)]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + rng.randint(1, 3))
    tree = Tree(parents, depths, [rng.randint(0, 3) if seed % 2 else 1 for _ in parents])
    candidates = Candidates.of(tree.parents, tree.depths, tree.weights)
    for k in (1, 5, 17):
        costs = []
        for dense in (0, 10_000):
            monkeypatch.setattr(program, "DENSE", dense)
            costs.append(cost_of(tree, candidates.node[best(candidates, k)].tolist()))
        assert costs[0] == costs[1] <= cost_of(tree, candidates.node[improved(candidates, [], k)].tolist())


@pytest.mark.parametrize("most", [0, 10**9], ids=["no bounds", "bounds"])
def test_large_trees_cost_the_same_with_and_without_bounds(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = drawn(random.Random(6), 1500)
    expected = [solve_tree(tree, k).cost for k in (5, 40)]
    monkeypatch.setattr(pricing, "MOST", most)
    assert [solve_tree(tree, k).cost for k in (5, 40)] == pytest.approx(expected)


def test_convolution_is_that_of_all_pairs() -> None:
    rng = np.random.default_rng(0)
    for a, b, k in ((1, 1, 3), (4, 2, 9), (2, 5, 4), (6, 6, 3), (3, 3, 0)):
        one, other = rng.integers(0, 99, (3, a)).astype(float), rng.integers(0, 99, (3, b)).astype(float)
        pairs = [
            [[x[i] + y[j - i] for i in range(a) if 0 <= j - i < b] for j in range(a + b - 1)]
            for x, y in zip(one, other, strict=True)
        ]
        assert convolve(one, other, k).tolist() == [[max(of) for of in row[: k + 1]] for row in pairs]


@pytest.mark.parametrize(
    ("parents", "depths", "weights", "says"),
    [
        ([], [], [], "0 parents, 0 depths"),
        ([0, 0], [0], [1, 1], "2 parents, 1 depths"),
        ([0], [3], [1], "node 0 has parent 0 and depth 3"),
        ([0, 1], [0, 4], [1, 1], "node 1 has parent 1, which does not come before it"),
        ([0, 0, -1], [0, 4, 5], [1, 1, 1], "node 2 has parent -1"),
        ([0, 0, 1], [0, 4, 4], [1, 1, 1], "node 2 is 4 deep, its parent 4"),
        ([0, 0], [0, 4], [1, -2], "a weight of -2"),
    ],
)
def test_what_is_no_tree_is_refused(parents: list[int], depths: list[int], weights: list[int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Tree(parents, depths, weights)


def test_a_negative_number_of_checkpoints_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 checkpoints"):
        solve_tree(Tree([0], [0], [1]), -1)
