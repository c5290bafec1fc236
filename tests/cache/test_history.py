"""Edges that outlive their pages: a branch point is found where the KV is long gone, and memory for that is bounded."""

from __future__ import annotations

from dataclasses import replace

from headwater.cache.history import History
from headwater.cache.node import Node, Root
from tests.cache.toy import LAYOUT, Toy, words


def leaf(edges: list[bytes]) -> Node:
    node: Node = Root("", 0)
    for edge in edges:
        child = Node(node, edge, node.pages, node.end + len(edge), 0)
        node.adopt(edge[:1], child)
        node = child
    return node


def test_prompt_finds_its_branch_point_on_an_evicted_path() -> None:
    history = History(1, 100)
    history.note("", leaf([b"ab", b"cd"]))
    history.note("", leaf([b"abx"]))
    assert [history.depth("", key, 9) for key in (b"abcde", b"abcx", b"abxy", b"q")] == [4, 3, 3, 0]
    assert history.depth("other", b"abcd", 9) == 0
    assert history.depth("", b"abcd", 2) == 2


def test_old_paths_are_forgotten() -> None:
    history = History(1, 10)
    history.note("", leaf([b"first"]))
    for i in range(50):
        history.note("", leaf([bytes([i]) * 4]))
    assert history.depth("", b"first", 5) == 0
    assert history.depth("", bytes([49]) * 4, 4) == 4


def test_a_shared_prefix_is_found_after_its_kv_was_evicted() -> None:
    for policy, branch in (("lru", 0), ("seglen", 40), ("headwater", 40)):
        toy = Toy(replace(LAYOUT, n_pages=24, slot_pages=0), policy)
        shared = words(1, 40)
        toy.serve(shared + words(2, 20))
        for other in range(5, 8):
            toy.serve(words(other, 60))
        match = toy.match(shared + words(3, 20))
        assert match.kv_tokens == 0
        assert match.branch_tokens == branch
