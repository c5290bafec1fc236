"""A cache that starts from a snapshot continues as the original one."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from typing import Any

import pytest

from headwater.cache import PrefixCache
from headwater.cache.eviction.base.policy import Room
from headwater.cache.node import Node
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
