"""Exact placement of sparse checkpoints, on a chain and over a tree."""

import math
import random
from dataclasses import replace
from itertools import combinations, product

import pytest

from headwater.cache.placement.optimal.program import Recomputation, recomputation, solve
from headwater.traces.request import Request
from papers import FIGURES, figures_named
from papers.sparse.overlaps import PAGE, Overlap, overlaps
from papers.sparse.placements import Measured, Times, fit, frontier, proportional
from papers.sparse.savings import BUDGETS, FIXED, UNBUDGETED, Score, gains, optimal, resumptions, score
from papers.sparse.tree import NOTHING, solve_tree


def request(*runs, namespace="", session="s"):
    """A prompt of runs of tokens: (token, how many)."""
    text = b"".join(token.to_bytes(4, "little") * count for token, count in runs)
    return Request(session, text, len(text) // 4, 0, len(text) // 4, namespace=namespace)


def test_request_overlaps_the_entry_with_the_longest_common_prefix():
    first, second = request((1, 200), (2, 100)), request((1, 200), (3, 100))
    later = request((1, 200), (3, 50), (4, 100))
    found = overlaps([first, second, later], retained=2)
    assert found == [Overlap(300), Overlap(300, 200, 0), Overlap(350, 250, 1)]


def test_request_overlaps_the_newest_of_equal_entries():
    found = overlaps([request((1, 200), (n, 100)) for n in (2, 3, 4)], retained=3)
    assert [one.entry for one in found] == [-1, 0, 1]


def test_dropped_entry_is_not_overlapped():
    prompts = [request((n, 100), (9, 100)) for n in (1, 2, 3, 1)]
    assert [one.depth for one in overlaps(prompts, retained=3)] == [0, 0, 0, 199]
    assert [one.depth for one in overlaps(prompts, retained=2)] == [0, 0, 0, 0]


def test_continuation_of_an_entry_replaces_it():
    prompts = [request((1, 100)), request((2, 100)), request((2, 200)), request((1, 150))]
    assert [one.depth for one in overlaps(prompts, retained=2)] == [0, 0, 100, 100]


def test_overlap_needs_a_page_and_the_same_namespace():
    short = [request((1, PAGE - 1), (2, 100)), request((1, PAGE - 1), (3, 100))]
    assert overlaps(short, retained=2)[1].depth == 0
    long = [request((1, PAGE), (2, 100)), request((1, PAGE), (3, 100))]
    assert overlaps(long, retained=2)[1].depth == PAGE
    assert overlaps([long[0], replace(long[1], namespace="other")], retained=2)[1].depth == 0


def test_placement_is_scored_by_the_formula():
    seen = [Overlap(1000), *(Overlap(1000, depth, 0) for depth in (100, 500, 501, 999))]
    found = score("balanced(1,end=False)", seen)
    [position] = [448]  # half of it, floored to a page
    assert found.recomputation == recomputation([position], [100, 500, 501, 999])
    assert found.checkpoints == 1
    assert resumptions("balanced(1,end=False)", seen).at == (0, 0, 448, 448, 448)


def test_every_block_leaves_less_than_a_block():
    seen = [Overlap(1000), *(Overlap(1000, depth, 0) for depth in range(64, 1000))]
    at = resumptions("every_block(1)", seen).at[1:]
    assert at == tuple(min(depth, 999) // 64 * 64 for depth in range(64, 1000))
    assert score("none", seen).recomputation.savings == 0


def test_optimal_learns_only_from_earlier_requests():
    """Overlaps are 640 deep; it hears of them ten requests later than the first."""
    seen = [Overlap(1000), *(Overlap(1000, 640, number) for number in range(30))]
    at = resumptions("optimal(1,every=10,end=False)", seen).at
    assert set(at[1:10]) == {448}  # balanced, as long as nothing is known
    assert set(at[-10:]) == {640}


def scored(**by_spelling):
    return {name: Score(Recomputation(1 - savings, 1.0), 1.0) for name, savings in by_spelling.items()}


def test_gain_is_over_the_better_of_the_fixed_ones():
    found = scored(**{UNBUDGETED["every block"]: 0.99})
    for k in BUDGETS:
        found |= scored(
            **{optimal(k): 0.9, FIXED["balanced"].format(k=k): 0.5 + k / 1000, FIXED["logarithmic"].format(k=k): 0.5}
        )
    assert gains(found) == pytest.approx([0.4 - k / 1000 for k in BUDGETS])


def test_fit_recovers_a_line_and_its_r2():
    line = fit([0, 100, 300], [2.0, 3.0, 5.0])
    assert (line.slope, line.intercept, line.r2) == pytest.approx((0.01, 2.0, 1.0))
    assert fit([0, 1, 2], [0.0, 3.0, 0.1]).r2 < 0.1


def test_intercept_is_the_sum_of_its_parts():
    times = Times(2048, {64: 0.011, 256: 0.014, 1024: 0.026}, state=0.004, kv=0.001)
    lines = {line.label.removeprefix("prompt of 2,048: "): line.ours for line in proportional([times], 0.1, True).lines}
    parts = [
        lines[f"of it {what}"] for what in ("loading the state", "loading the KV", "the rest: a step's fixed work")
    ]
    assert math.isclose(sum(parts), lines["intercept"])


def measured(seconds, checkpoints):
    return Measured((seconds, 2 * seconds), checkpoints)


def by_label(optimal_seconds):
    fixed = {f"{label}, k = {k}": measured(1.0, k) for label in FIXED for k in (1, 4, 16)}
    best = {f"optimal, k = {k}": measured(optimal_seconds, k) for k in (1, 4, 16)}
    return {"KV only": measured(9.0, 0), "every block": measured(0.2, 100), "sqrt": measured(0.3, 50)} | fixed | best


def test_claims_of_the_frontier_follow_from_times():
    assert [shape.holds for shape in frontier({"a": by_label(0.21)}).shapes] == [True, True]
    assert [shape.holds for shape in frontier({"a": by_label(0.5)}).shapes] == [True, False]
    assert [shape.holds for shape in frontier({"a": by_label(1.0)}).shapes] == [False, False]


def test_all_four_figures_exist_and_engine_measures_two():
    figures = figures_named(["sparse"])
    assert {"sparse-1", "sparse-2", "sparse-3", "sparse-4"} <= {figure.name for figure in figures}
    assert [figure.name for figure in figures if figure.run is None] == ["sparse-3", "sparse-4"]
    assert all(FIGURES[figure.name] is figure for figure in figures)


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
