"""SegLen: replay distance and recency; the article's example, and the bookkeeping of distances."""

from dataclasses import replace

import pytest

from headwater.cache.eviction import make_eviction
from headwater.cache.eviction.base.policy import Kind, Room
from headwater.cache.eviction.seglen import SegLen
from headwater.cache.index import Index
from headwater.cache.node import Node
from tests.cache.test_index import add
from tests.cache.toy import LAYOUT, Toy, evict, words


def length(policy: SegLen, node: Node) -> float:
    policy.settle()
    return float(policy._kept.value[policy._kept.row_of[node]])


def article_tree(policy: str) -> tuple[Index, dict[str, Node]]:
    """The article's example: E (used last) and C hang below D, which lost its state; then B, and A (used first).

    Distances to the nearest ancestor with a state: E 3, although its own segment is 1 long, C 3, A 3, B 2.
    """
    index = Index(1, 1, make_eviction(policy, LAYOUT))
    root = index.root("")
    index.pin(root)
    nodes = {}
    for now, (name, key) in enumerate({"A": b"aaa", "B": b"bb", "C": b"ddc", "E": b"dde"}.items(), 1):
        (nodes[name],) = add(index, root, key)
        nodes[name].checkpoint_time = now
        index._observer.touched(nodes[name])
    return index, nodes


@pytest.mark.parametrize(("policy", "first"), [("lru", "A"), ("seglen", "B")])
def test_the_articles_example(policy: str, first: str) -> None:
    index, nodes = article_tree(policy)
    assert index._observer.victim(Room.STATE, 5) == (nodes[first], Kind.CHECKPOINT)  # type: ignore[attr-defined]


def test_the_articles_whole_ranking() -> None:
    index, nodes = article_tree("seglen")
    order = []
    while index.checkpoints:
        node, _ = index._observer.victim(Room.STATE, 5)  # type: ignore[attr-defined]
        order.append(next(name for name, other in nodes.items() if other is node))
        index.drop(node)
    assert order == ["B", "A", "C", "E"]


def test_with_w_0_it_is_lru() -> None:
    index, nodes = article_tree("seglen(w=0)")
    assert index._observer.victim(Room.STATE, 5) == (nodes["A"], Kind.CHECKPOINT)  # type: ignore[attr-defined]


def test_evicted_checkpoint_lengthens_the_nearest_below() -> None:
    policy = SegLen(LAYOUT)
    index = Index(1, 1, policy)
    root = index.root("")
    index.pin(root)
    top, middle, leaf = add(index, root, b"abcdefgh", (2, 5))
    lengths = [length(policy, node) for node in (top, middle, leaf)]
    assert lengths == [2, 3, 3]
    index.drop(middle)
    assert length(policy, leaf) == 6
    index.drop(top)
    assert length(policy, leaf) == 8


def test_gaining_one_shortens_it_again() -> None:
    policy = SegLen(LAYOUT)
    index = Index(1, 1, policy)
    root = index.root("")
    index.pin(root)
    (leaf,) = add(index, root, b"abcdefgh")
    add(index, root, b"abc")
    assert length(policy, leaf) == 5


def test_nodes_with_several_children_keep_their_state_unless_asked() -> None:
    toys = [Toy(replace(LAYOUT, n_pages=40), f"seglen(w=2, single_child={flag})") for flag in (True, False)]
    survivors = []
    for toy in toys:
        toy.serve(words(1, 4))
        for branch in (2, 3):
            toy.serve(words(1, 4) + words(branch, 12))
        evict(toy.cache, Room.STATE)
        toy.cache.check()
        survivors.append(toy.match((*words(1, 4), 7)).checkpoint_tokens)
    assert survivors == [4, 0]


def test_states_of_wide_nodes_are_evicted_when_none_else_is_left() -> None:
    toy = Toy(replace(LAYOUT, n_pages=12), "seglen")
    toy.serve(words(1, 4))
    drafts = [toy.draft(words(1, 4) + words(branch, 4), 4, hold_checkpoint=False) for branch in (2, 3)]
    for draft in drafts:
        toy.commit(toy.reserve(draft), draft)
    toy.reserve(toy.draft(words(5, 36), 0))
    assert toy.cache.stats().checkpoints == 0


def test_a_leaf_without_checkpoint_is_scored_by_its_kv() -> None:
    toy = Toy(replace(LAYOUT, n_pages=20), "seglen")
    toy.serve(words(1, 8), checkpoints=())
    toy.serve(words(2, 40))
    toy.reserve(toy.draft(words(3, 28), 0))
    assert toy.match(words(1, 9)).kv_tokens == 4
    assert toy.match(words(2, 41)).checkpoint_tokens == 40


@pytest.mark.parametrize("times", [(1, 1, 1), (5, 4, 5)])
def test_ages_are_at_least_1_and_ties_go_to_the_older_node(times: tuple[int, int, int]) -> None:
    index, nodes = article_tree("seglen")
    index.drop(nodes.pop("B"))
    for node, time in zip(nodes.values(), times, strict=True):
        node.checkpoint_time = time
        index._observer.touched(node)
    assert index._observer.victim(Room.STATE, 5) == (nodes["A"], Kind.CHECKPOINT)  # type: ignore[attr-defined]
