"""FLOP-aware eviction, and Marconi's, which tunes it."""

from dataclasses import replace

import pytest

from headwater.cache.eviction import EVICTION, make_eviction
from headwater.cache.eviction.base.policy import Kind, Room
from headwater.cache.eviction.flop_aware import FlopAware
from headwater.cache.eviction.marconi import Marconi
from headwater.cache.index import Index
from headwater.cache.node import Node
from headwater.errors import ConfigError
from headwater.plan import CacheLayout, PrefillFlops
from tests.cache.test_index import add
from tests.cache.toy import LAYOUT, Toy, evict, words

# one token a page; with these FLOPs the article's efficiencies come out to both of their digits
UNITS = CacheLayout(n_pages=1000, page_size=1, unit_tokens=1, unit_bytes=1, checkpoint_pages=7)
ARTICLE = replace(UNITS, flops=PrefillFlops(0.9, 0.9 * 0.06))
LINEAR = replace(UNITS, flops=PrefillFlops(1.0), checkpoint_pages=1)


class Tree:
    """An index under a policy; a step a tick, and checkpoints of as many pages as the layout says."""

    def __init__(self, policy: str, layout: CacheLayout = LINEAR) -> None:
        self.policy, self.layout, self.now = make_eviction(policy, layout), layout, 0
        self.index = Index(1, 1, self.policy)
        self.root = self.index.root("")
        self.index.pin(self.root)

    def add(self, key: bytes, stops: tuple[int, ...] = ()) -> list[Node]:
        """Nodes with checkpoints at `stops` and at the end."""
        self.now += 1
        nodes = add(self.index, self.root, key, stops)
        for node in nodes:
            node.checkpoint = tuple(range(self.layout.checkpoint_pages))
            self.index.resume(node, self.now)
            self.index.touch(node, None, self.now)
        return nodes

    def bare(self, key: bytes) -> Node:
        """A leaf with nothing but KV."""
        (node,) = self.add(key)
        self.index.drop(node)
        return node

    def victim(self, room: Room = Room.ANY, later: int = 1) -> tuple[Node, Kind]:
        found = self.policy.victim(room, self.now + later)
        assert found is not None
        return found

    def values(self, *nodes: Node) -> list[float]:
        assert isinstance(self.policy, FlopAware)
        return [self.policy.value(node) for node in nodes]


def article_tree(policy: str) -> tuple[Tree, dict[str, Node]]:
    """A was used first, then B, C and E.

    E hangs below D, which lost its state, so that 3 tokens would have to be replayed for it, although its own segment
    is one long. C goes on where a running request's prefix ends, which is held and no candidate.
    """
    tree = Tree(policy, ARTICLE)
    (prefix,) = tree.add(b"p")
    tree.index.pin(prefix, hold=True)
    nodes = {name: tree.add(key)[-1] for name, key in {"A": b"aaa", "B": b"bb", "C": b"pccc"}.items()}
    tree.bare(b"ddx")
    (nodes["E"],) = tree.add(b"dde")
    assert nodes["E"].parent is not None
    assert nodes["E"].parent.checkpoint is None
    return tree, nodes


@pytest.mark.parametrize(
    ("policy", "first"), [("lru", "A"), ("seglen", "B"), ("flop_aware(3.0, parent='immediate')", "E")]
)
def test_the_articles_example(policy: str, first: str) -> None:
    tree, nodes = article_tree(policy)
    assert tree.victim(Room.STATE, later=10)[0] is nodes[first]


def test_the_articles_efficiencies_and_ranking() -> None:
    tree, nodes = article_tree("flop_aware(100.0, parent='immediate')")
    values = {name: round(value, 2) for name, value in zip(nodes, tree.values(*nodes.values()), strict=True)}
    assert values == {"C": 0.35, "A": 0.32, "B": 0.22, "E": 0.15}
    order = []
    for _ in nodes:
        node, _ = tree.victim(Room.STATE)
        order.append(next(name for name in nodes if nodes[name] is node))
        tree.index.drop(node)
    assert order == ["E", "B", "A", "C"]


def test_efficiency_is_flops_over_the_parents_by_pages_of_checkpoint_and_edge() -> None:
    layout = replace(LINEAR, flops=PrefillFlops(2.0, 0.5), checkpoint_pages=3)
    tree = Tree("flop_aware", layout)
    assert tree.values(*tree.add(b"aaaabbbbbb", (4,))) == [(8 + 0.5 * 16) / 7, (12 + 0.5 * (100 - 16)) / 9]


def test_memory_of_the_prefix_counts_the_kv_above_too() -> None:
    tree = Tree("flop_aware(memory='prefix')", replace(LINEAR, checkpoint_pages=3))
    assert tree.values(*tree.add(b"aaaabbbbbb", (4,))) == [4 / 7, 6 / 13]


@pytest.mark.parametrize(("parent", "value"), [("checkpoint", 5 / 3), ("immediate", 2 / 3)])
def test_the_parent_is_the_nearest_with_a_checkpoint_or_the_immediate_one(parent: str, value: float) -> None:
    tree = Tree(f"flop_aware(parent='{parent}')")
    (upper,) = tree.add(b"aaa")
    (lower,) = tree.add(b"aaabb")
    tree.add(b"aaacc")
    tree.index.drop(upper)
    assert upper.parent is not None
    assert tree.values(lower) == [value]


def test_a_leaf_loses_all_and_another_node_its_checkpoint() -> None:
    tree = Tree("flop_aware(0.0)")
    upper, lower = tree.add(b"aaabb", (3,))
    tree.index.resume(lower, tree.now + 1)
    tree.now += 2
    assert tree.victim() == (upper, Kind.CHECKPOINT)
    tree.index.drop(upper)
    assert lower.edge == b"aaabb"
    assert tree.victim() == (lower, Kind.NODE)


def test_pinned_leaf_loses_only_its_checkpoint_and_held_leaf_nothing() -> None:
    tree = Tree("flop_aware(0.0)")
    (leaf,) = tree.add(b"aaa")
    tree.index.pin(leaf)
    assert tree.victim() == (leaf, Kind.CHECKPOINT)
    tree.index.hold(leaf)
    assert tree.policy.victim(Room.ANY, tree.now + 1) is None


def test_a_node_with_several_children_keeps_its_checkpoint_while_others_have_one() -> None:
    tree = Tree("flop_aware(0.0)")
    (upper,) = tree.add(b"aaa")
    leaves = [tree.add(key)[0] for key in (b"aaabb", b"aaacc")]
    assert tree.victim(Room.STATE)[0] is leaves[0]
    for leaf in leaves:
        tree.index.pin(leaf, hold=True)
    assert tree.victim(Room.STATE) == (upper, Kind.CHECKPOINT)


def test_alpha_0_evicts_by_time_and_large_alpha_by_efficiency() -> None:
    victims = []
    for alpha in (0.0, 10.0):
        tree = Tree(f"flop_aware({alpha})")
        long, short = tree.add(b"aaaaaaaaaaaa")[0], tree.add(b"bb")[0]
        victims.append(tree.victim()[0] is long)
        assert tree.victim()[0] in (long, short)
    assert victims == [True, False]


def test_recency_is_of_ages_or_of_times() -> None:
    """Ages 9, 5 and 1: the middle one is 0.1 from the oldest by 1/age and half way by time; it has efficiency 0.

    The oldest has efficiency 1, so that it goes before the middle one only where alpha is less than that.
    """
    for recency, low, high in (("inverse_age", 0.09, 0.11), ("linear", 0.49, 0.51)):
        for alpha, first in ((low, 0), (high, 1)):
            tree = Tree(f"flop_aware({alpha}, recency='{recency}')")
            nodes = [tree.add(key)[0] for key in (b"aaaaaaaaaaaaaaaaaaaa", b"b", b"cccccccccccccccccccc")]
            for node, age in zip(nodes, (9, 5, 1), strict=True):
                tree.index.resume(node, 10 - age)
            tree.now = 9
            assert tree.victim()[0] is nodes[first], (recency, alpha)


def test_ranges_are_of_the_candidates_or_of_all_nodes() -> None:
    """A held node that is far more efficient halves what efficiency counts among the others: then time decides."""
    for over, first in (("candidates", 1), ("all", 0)):
        tree = Tree(f"flop_aware(0.3, over='{over}', recency='linear')", replace(LINEAR, flops=PrefillFlops(0.0, 1.0)))
        nodes = [tree.add(key)[0] for key in (b"aaaa", b"bb")]
        (held,) = tree.add(b"c" * 40)
        tree.index.pin(held, hold=True)
        nodes.append(tree.add(b"dddd")[0])
        for node, time in zip(nodes, (1, 2, 9), strict=True):
            tree.index.resume(node, time)
        tree.now = 9
        assert tree.victim()[0] is nodes[first], over


def test_node_without_checkpoint_saves_nothing() -> None:
    tree = Tree("flop_aware(10.0)")
    tree.add(b"aaaa")
    bare = tree.bare(b"bbbbbbbbbbbb")
    assert tree.values(bare) == [0.0]
    assert tree.victim() == (bare, Kind.TAIL)


def test_kv_saves_flops_if_every_page_is_resumable() -> None:
    tree = Tree("flop_aware(10.0)", replace(LINEAR, resumable="every_page", flops=PrefillFlops(1.0, 1.0)))
    short, long = (tree.bare(key) for key in (b"aa", b"bbbbbb"))
    assert tree.values(short, long) == [(2 + 4) / 2, (6 + 36) / 6]
    assert tree.victim() == (short, Kind.TAIL)


def test_kv_of_a_split_pool_is_evicted_by_its_own_time() -> None:
    tree = Tree("flop_aware(10.0)", replace(LINEAR, state_fraction=0.5))
    long, short = tree.add(b"aaaaaaaaaaaa")[0], tree.add(b"bb")[0]
    assert tree.victim(Room.STATE) == (short, Kind.CHECKPOINT)
    assert tree.victim(Room.KV) == (long, Kind.CHECKPOINT)
    tree.index.drop(long)
    assert tree.victim(Room.KV) == (long, Kind.TAIL)


def test_only_the_node_that_was_hit_is_refreshed() -> None:
    toy = Toy(replace(LAYOUT, n_pages=60), "flop_aware(0.0)")
    toy.serve(words(1, 12), checkpoints=(4, 8, 12))
    toy.serve(words(2, 12))
    assert toy.serve((*words(1, 12), 5), checkpoints=()).checkpoint_tokens == 12
    evict(toy.cache, Room.STATE)
    evict(toy.cache, Room.STATE)
    assert toy.match(words(1, 12)).checkpoint_tokens == 0
    assert toy.match((*words(1, 12), 5)).checkpoint_tokens == 12


def test_splitting_and_merging_edges_keeps_efficiencies_right() -> None:
    """Whatever was done to the tree, a policy that saw it all agrees with one that sees it for the first time."""
    toy = Toy(replace(LAYOUT, n_pages=60), "flop_aware(1.0, parent='immediate')")
    for number in range(40):
        toy.serve(words(number % 5, 4 * (1 + number % 3)) + words(100 + number, 8), checkpoints=(4, 8))
        policy = toy.cache.policy
        assert isinstance(policy, FlopAware)
        policy.settle()
        kept = policy._kept
        assert dict(zip(kept.keys, kept.value, strict=False)) == {
            node: policy.value(node) for node in toy.cache.index if node in kept.row_of
        }


@pytest.mark.parametrize("option", ["over='some'", "recency='log'", "memory='none'", "parent='root'"])
def test_an_option_that_there_is_not_names_those_that_there_are(option: str) -> None:
    name = option.split("=")[0]
    with pytest.raises(ConfigError, match=f"{name} is '.*'; there are "):
        make_eviction(f"flop_aware({option})", LAYOUT)
    assert "flop_aware" in EVICTION


def made(spelling: str) -> Marconi:
    policy = make_eviction(spelling, LAYOUT)
    assert isinstance(policy, Marconi)
    return policy


def served(spelling: str) -> Toy:
    toy = Toy(LAYOUT, spelling)
    for number in range(80):
        toy.serve(words(number % 7, 4 * (1 + number % 5)) + words(100 + number, 12))
    assert toy.cache.stats().evicted_checkpoints
    return toy


def test_alpha_without_tuning_is_0() -> None:
    assert made("marconi").alpha == 0.0
    toys = [served(spelling) for spelling in ("marconi", "flop_aware(0.0)")]
    assert toys[0].cache.stats() == toys[1].cache.stats()


def test_alpha_may_be_set_while_it_runs() -> None:
    policy = made("marconi")
    policy.alpha = 0.7
    assert policy.alpha == 0.7
    assert policy.weight == 0.7


def test_replayed_policy_has_the_same_options() -> None:
    policy = made("marconi(multiplier=7, recency='linear', memory='prefix')")
    assert policy.multiplier == 7
    assert policy.static(0.3) == "flop_aware(0.3, recency='linear', memory='prefix')"
    assert make_eviction(policy.static(0.3), LAYOUT)._recency == policy._recency  # type: ignore[attr-defined]


@pytest.mark.parametrize("option", ["multiplier=0", "over='none'", "depth=3"])
def test_options_that_make_no_sense_are_config_errors(option: str) -> None:
    with pytest.raises(ConfigError, match=r"marconi.*cannot be made"):
        made(f"marconi({option})")
