"""The prefix tree of a trace: pages, overlaps, and their growth request by request."""

from __future__ import annotations

import numpy as np

from headwater.cache.positions.online import OnlineTree
from headwater.lab.page_tree import Growth, PageTree, Passage
from headwater.traces.request import Request, Trace


def request(tokens: list[int], prompt: int | None = None, namespace: str = "") -> Request:
    text = np.array(tokens, dtype=np.int32).tobytes()
    prompt = len(tokens) if prompt is None else prompt
    return Request("s", text, prompt, len(tokens) - prompt, len(tokens), namespace=namespace)


def pages_of(*requests: Request) -> PageTree:
    return PageTree(Trace("t", requests), requests, 2)


def test_overlaps_end_at_the_last_common_page() -> None:
    pages = pages_of(request([1, 2, 3, 4, 5]), request([1, 2, 3, 9, 5]), request([1, 2, 3, 4, 5, 6, 7]))
    assert pages.depths == [0, 2, 4, 4, 6]
    assert pages.parents == [0, 0, 1, 1, 2]
    assert pages.passages == [Passage(0, 2), Passage(1, 3), Passage(2, 4)]


def test_one_token_is_left_to_compute_and_answers_are_kept() -> None:
    pages = pages_of(request([1, 2, 3, 4, 5, 6], prompt=4), request([1, 2, 3, 4, 5, 6]))
    assert pages.passages == [Passage(0, 1), Passage(2, 2)]
    assert len(pages.parents) == 4


def test_namespaces_share_nothing() -> None:
    pages = pages_of(request([1, 2, 3], namespace="a"), request([1, 2, 3], namespace="b"))
    assert [passage.overlap for passage in pages.passages] == [0, 0]


def test_nodes_are_the_ends_of_overlaps_and_prompts_so_far() -> None:
    pages = pages_of(request([*range(1, 10)]), request([1, 2, 3, 4, 50, 60, 70]), request([1, 2, 9, 9, 9]))
    growth = Growth(pages, OnlineTree(2))
    found = [growth.request(passage) for passage in pages.passages]
    assert [one.recomputed for one in found] == [0, 4, 2]
    tree = growth.rule.tree()
    assert tree.depths.tolist() == [0, 2, 4, 4, 6, 8]
    assert tree.parents.tolist() == [0, 0, 1, 1, 2, 2]
    assert tree.weights.tolist() == [1, 1, 1, 0, 0, 0]


def test_a_page_beside_a_later_node_becomes_a_leaf() -> None:
    """The third request ends in the first one's answer, next to where the second one ended."""
    pages = pages_of(request([1, 2, 3, 4, 5, 6], prompt=3), request([1, 2, 9, 9, 9]), request([1, 2, 3, 4, 7]))
    growth = Growth(pages, OnlineTree(1))
    assert [growth.request(passage).recomputed for passage in pages.passages] == [0, 2, 2]
    assert growth.rule.tree().parents.tolist() == [0, 0, 1, 1]
