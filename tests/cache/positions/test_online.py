"""The online rule: what it keeps and counts, against a naive model and the exact program."""

from __future__ import annotations

import random

import pytest

from headwater.cache.positions.online import OnlineTree
from headwater.cache.positions.tree import solve_tree


def check(rule: OnlineTree, counts: dict[int, int], k: int) -> None:
    """Hold the rule's counters to those counted from the tree."""
    assert len(rule.kept) <= k
    resuming = dict.fromkeys(range(len(rule._parent)), 0)
    for node, count in counts.items():
        at = node
        while True:
            resuming[at] += count
            if at == 0 or at in rule.kept:
                break
            at = rule._parent[at]
    assert rule._resuming == [resuming[v] for v in range(len(rule._parent))]
    for node, above in rule._kept.items():
        assert above == rule._above(node)
        assert node in rule._under[above]
    assert sum(map(len, rule._under.values())) == len(rule.kept)


@pytest.mark.parametrize("seed", range(25))
def test_its_counters_are_those_of_the_tree(seed: int) -> None:
    rng = random.Random(seed)
    k = rng.randint(0, 5)
    rule, counts = OnlineTree(k), {}
    for _ in range(80):
        node = rng.randrange(len(rule._parent))
        if node and rule._depth[node] - rule._depth[rule._parent[node]] > 1 and rng.random() < 0.5:
            node = rule.split(node, rng.randrange(rule._depth[rule._parent[node]] + 1, rule._depth[node]))
        end = rule.add(node, rule._depth[node] + rng.randint(1, 20))
        counts[node] = counts.get(node, 0) + 1
        before = rule.kept
        exchange = rule.request(node, end)
        assert rule.kept == (before - set(exchange.dropped)) | set(exchange.taken)
        assert not set(exchange.taken) & before
        check(rule, counts, k)


@pytest.mark.parametrize("seed", range(10))
def test_it_is_close_to_the_exact_program(seed: int) -> None:
    rng = random.Random(seed)
    rule = OnlineTree(6)
    leaves = [0]
    for _ in range(60):
        parent = rng.choice(leaves)
        leaves.append(rule.add(parent, rule._depth[parent] + rng.randint(1, 20)))
    for _ in range(600):
        rule.request(leaves[min(60, int(rng.paretovariate(0.4)))])
    tree, order = rule.tree(), rule.order()
    found = tree.recomputation(i for i, node in enumerate(order) if node in rule.kept)
    assert solve_tree(tree, 6).cost <= found.cost + 1e-9
    assert found.cost - solve_tree(tree, 6).cost <= 0.02 * found.baseline


def test_a_checkpoint_is_exchanged_for_one_that_gains_more() -> None:
    rule = OnlineTree(1)
    few, many = rule.add(0, 10), rule.add(0, 30)
    first = rule.request(few)
    assert (first.resumed, first.recomputed, first.taken, first.dropped) == (0, 10, (few,), ())
    assert rule.request(few).resumed == few
    assert rule.request(many).taken == (many,)  # 1 · 30 against 2 · 10
    assert rule.kept == {many}


def test_equal_gains_exchange_nothing() -> None:
    rule = OnlineTree(1)
    one, other = rule.add(0, 10), rule.add(0, 10)
    rule.request(one)
    assert rule.request(other).taken == ()
    assert rule.kept == {one}


def test_an_exchange_counts_what_the_new_checkpoint_takes_from_the_one_above() -> None:
    """Before, the upper one serves both requests (loss 20); with the lower one it serves a single request (10)."""
    rule = OnlineTree(1)
    upper = rule.add(0, 10)
    lower = rule.add(upper, 25)
    rule.request(upper)
    assert rule.request(lower).taken == (lower,)  # gains 15; the upper one loses 10 then
    assert rule.kept == {lower}


def test_nodes_below_the_overlap_are_taken_only_with_requests() -> None:
    rule = OnlineTree(4)
    shared = rule.add(0, 10)
    assert rule.request(shared, rule.add(shared, 50)).taken == (shared,)


def test_wrong_depths_and_budgets_are_refused() -> None:
    rule = OnlineTree(0)
    node = rule.add(0, 8)
    assert rule.request(node).taken == ()
    with pytest.raises(ValueError, match="a node 8 deep cannot be below node 1"):
        rule.add(node, 8)
    with pytest.raises(ValueError, match="depth 8 is not on the edge of node 1, which runs from 0 to 8"):
        rule.split(node, 8)
    with pytest.raises(ValueError, match="-1 checkpoints"):
        OnlineTree(-1)


def test_an_exchange_counts_how_near_the_new_checkpoint_is_to_those_below() -> None:
    """Alone, the lower one saves 2 · 30; the upper one serves four requests, 4 · 20."""
    rule = OnlineTree(1)
    upper = rule.add(0, 20)
    lower = rule.add(upper, 30)
    for _ in range(2):
        rule.request(lower)
    assert rule.kept == {lower}
    rule.request(upper)
    assert rule.kept == {lower}  # 20 gained, 2 · 10 lost
    exchange = rule.request(upper)
    assert (exchange.taken, exchange.dropped) == ((upper,), (lower,))
