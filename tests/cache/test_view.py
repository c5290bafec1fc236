"""View of the tree: its largest parts, in numbers, without any text of prompts."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from headwater.cache import view as view_module
from headwater.cache.view import Fingerprints, NodeView
from tests.cache.toy import LAYOUT, Toy, key_of, words


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
