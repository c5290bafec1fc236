"""Snapshots of a cache, and its views."""

import pickle
import random
from dataclasses import fields, replace
from typing import Any

import pytest

from headwater.cache import PrefixCache
from headwater.cache import view as view_module
from headwater.cache.eviction.base.policy import Room
from headwater.cache.node import Node
from headwater.cache.view import Fingerprints, NodeView
from tests.cache.toy import LAYOUT, PAGE, Toy, evict, floor, key_of, words

SMALL = replace(LAYOUT, n_pages=80, slot_pages=0)
policies = pytest.mark.parametrize("policy", ["lru", "seglen", "flop_aware(0.5)", "marconi"])


def filled(policy: str, state_fraction: float | None = None) -> Toy:
    toy, rng = Toy(replace(SMALL, state_fraction=state_fraction), policy), random.Random(1)
    for number in range(60):
        prefix = words(rng.randint(1, 4), 4 * rng.randint(1, 5))
        toy.serve(prefix + words(100 + number, rng.randint(1, 12)), checkpoints=(floor(len(prefix)),))
    return toy


def copied(toy: Toy) -> PrefixCache:
    """By way of bytes, as another process gets it."""
    copy = PrefixCache(toy.layout, toy.eviction, pickle.loads(pickle.dumps(toy.cache.snapshot())))
    copy.check()
    return copy


def shape(cache: PrefixCache) -> Any:
    """All of a tree but its page ids."""

    def rows(node: Node) -> Any:
        kept = node.checkpoint is not None, node.speculative, node.kv_time, node.checkpoint_time, node.hits, node.lost
        return (
            node.edge,
            node.serial,
            len(node.pages),
            kept,
            [rows(child) for _, child in sorted(node.children.items())],
        )

    return {name: rows(root)[-1] for name, root in cache.index.roots.items()}, cache.now


def victims(cache: PrefixCache) -> list[Any]:
    """Everything in the order in which it would go."""
    order = []
    while (victim := cache.policy.victim(Room.ANY, cache.now)) is not None:
        order.append((victim[0].serial, victim[1]))
        evict(cache, Room.ANY)
    return order


@policies
@pytest.mark.parametrize("fraction", [None, 0.4])
def test_restored_cache_has_equal_content(policy: str, fraction: float | None) -> None:
    toy = filled(policy, fraction)
    copy = copied(toy)
    assert shape(copy) == shape(toy.cache)
    figures = ("pages_kv", "pages_checkpoint", "pages_free", "dead_kv_tokens", "checkpoints", "nodes")
    assert [getattr(copy.stats(), name) for name in figures] == [getattr(toy.cache.stats(), name) for name in figures]


@policies
def test_restored_cache_evicts_in_the_same_order(policy: str) -> None:
    toy = filled(policy)
    assert victims(copied(toy)) == victims(toy.cache)


def test_branch_points_in_edges_without_pages_are_still_found() -> None:
    toy = filled("marconi")
    gone = [words(first, 20) + words(500, 8) for first in range(1, 5)]
    victims(toy.cache)
    found = [toy.match(prompt).branch_tokens for prompt in gone]
    assert max(found) > 0
    copy = copied(toy)
    assert [copy.match(key_of(prompt), len(prompt)).branch_tokens for prompt in gone] == found


def test_snapshot_excludes_pages_of_running_requests() -> None:
    toy = filled("flop_aware(0.5)")
    draft = toy.draft(words(50, 12), 0)  # published without a checkpoint, and 2 pages of its own
    toy.commit(toy.reserve(draft), draft)
    more = replace(draft, key=key_of(words(50, 20)), start=12, end=20, publish=12)
    toy.reserve(more)
    copy = copied(toy)
    assert copy.stats().leases == 0
    assert copy.stats().pages_private == 0
    assert copy.match(key_of(words(50, 20)), 20).kv_tokens == 12


def test_snapshot_of_a_deep_chain_needs_no_recursion() -> None:
    toy = Toy(replace(LAYOUT, n_pages=20_000, checkpoint_pages=0, slot_pages=0))
    key, cache = key_of(words(1, 3000 * PAGE)), toy.cache
    draft = toy.draft(words(1, 3000 * PAGE), 0, checkpoints=tuple(range(PAGE, 3000 * PAGE + 1, PAGE)))
    cache.commit(cache.reserve(draft))
    cache.release(draft.request)
    assert cache.stats().nodes == 3000
    assert copied(toy).match(key, 3000 * PAGE + 1).checkpoint_tokens == 3000 * PAGE


def test_serials_of_roots_and_nodes_differ() -> None:
    toy = filled("lru")
    toy.serve(words(1, 8), namespace="another")
    copy = copied(toy)
    serials = [node.serial for node in (*copy.index, *copy.index.roots.values())]
    assert len(set(serials)) == len(serials)
    assert copy.index.serial == max(serials)


def tree() -> Toy:
    """16 shared tokens, then 24 of one prompt and 8 of another; a second namespace with 4."""
    toy = Toy()
    toy.serve(words(1, 16) + words(2, 24), checkpoints=(16, 40))
    toy.serve(words(1, 16) + words(3, 8))
    toy.serve(words(4, 4), namespace="b")
    return toy


def test_view_of_a_node_has_its_place_and_subtree() -> None:
    nodes = {(node.namespace, node.start, node.end): node for node in tree().cache.view().nodes}
    root, shared, long = nodes["", 0, 0], nodes["", 0, 16], nodes["", 16, 40]
    assert (root.parent, root.subtree_tokens, root.subtree_nodes) == (None, 48, 3)
    assert (shared.parent, shared.kv_pages, shared.checkpoint, shared.hits) == (root.id, 4, True, 1)
    assert (shared.subtree_tokens, shared.subtree_nodes, shared.folded_nodes) == (48, 3, 0)
    assert (long.parent, long.subtree_tokens, long.dead) == (shared.id, 24, False)
    assert long.age > shared.age
    assert nodes["b", 0, 0].subtree_tokens == 4


def test_largest_subtrees_are_shown_and_others_folded() -> None:
    view = tree().cache.view(limit=3)
    assert [node.subtree_tokens for node in view.nodes] == [48, 48, 24]
    shared = view.nodes[1]
    assert (shared.folded_nodes, shared.folded_tokens) == (1, 8)
    assert (view.total_nodes, view.shown_nodes, view.walked_nodes) == (4, 2, 4)


@pytest.mark.parametrize("limit", [1, 2, 5, 17, 100])
def test_shown_and_folded_nodes_add_up_to_the_subtree(limit: int) -> None:
    toy = Toy(replace(LAYOUT, n_pages=3000))
    for first in range(20):
        toy.serve(words(first % 4, 8) + words(first % 7 + 10, 8) + words(first + 100, 4 * first % 24 + 4))
    view = toy.cache.view(limit)
    assert len(view.nodes) <= limit
    for node in view.nodes:
        children = [child for child in view.nodes if child.parent == node.id]
        own = node.end - node.start
        assert node.subtree_tokens == own + node.folded_tokens + sum(child.subtree_tokens for child in children)
        below = node.folded_nodes + sum(child.subtree_nodes for child in children)
        assert node.subtree_nodes == below + (node.parent is not None)


def test_view_walks_a_bounded_number_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_module, "MAX_WALKED", 2)
    view = tree().cache.view()
    assert (view.walked_nodes, view.total_nodes) == (2, 4)
    assert {node.end for node in view.nodes} == {0, 16, 4}


def test_the_hottest_prefixes_are_those_resumed_from_most_often() -> None:
    toy = tree()
    for first in range(5, 8):
        toy.serve(words(1, 16) + words(first, 4))
    toy.serve(words(1, 16) + words(2, 24) + words(9, 4))
    assert [(hot.tokens, hot.hits) for hot in toy.cache.view(hottest=2).hottest] == [(16, 4), (40, 1)]


def test_checkpoint_stored_again_has_no_hits() -> None:
    toy = tree()
    index = toy.cache.index
    shared = next(node for node in index if node.hits)
    toy.cache.pool.states.give(index.drop(shared))
    toy.serve(words(1, 16) + words(5, 4), checkpoints=(16,))
    assert [hot.hits for hot in toy.cache.view().hottest] == []


def test_view_changes_nothing_and_is_empty_for_an_empty_cache() -> None:
    assert Toy().cache.view().nodes == ()
    toy = tree()
    assert toy.cache.view() == toy.cache.view()
    toy.cache.check()


def test_fingerprint_depends_on_the_prefix_not_its_edges() -> None:
    toy, prints = Toy(), Fingerprints()
    toy.serve(words(1, 24))
    before = {node.end: prints.of_nodes(toy.cache.view())[node.id] for node in toy.cache.view().nodes}
    toy.serve(words(1, 8) + words(2, 8))  # splits at 8
    view = toy.cache.view()
    after = {node.end: prints.of_nodes(view)[node.id] for node in view.nodes if node.end != 16}
    assert {0, 8, 24} == set(after)
    assert before[24] == after[24]
    key = key_of(words(1, 24))
    assert after[24] == prints.prefix("", [key[:52], key[52:]])


def test_fingerprints_depend_on_the_key_and_namespace() -> None:
    toy = tree()
    ours, theirs = Fingerprints().of_nodes(toy.cache.view()), Fingerprints().of_nodes(toy.cache.view())
    assert not set(ours.values()) & set(theirs.values())
    prints = Fingerprints()
    assert prints.prefix("a", [b"x"]) != prints.prefix("b", [b"x"])
    assert prints.prefix("a", [b"bx"]) != prints.prefix("ab", [b"x"])
    assert prints.namespace("a") == prints.prefix("a", [])


def test_view_has_only_integers_besides_input_of_fingerprints() -> None:
    kinds = {field.name: field.type for field in fields(NodeView)}
    del kinds["edge"], kinds["namespace"]
    assert set(kinds.values()) == {"int", "int | None", "bool"}
