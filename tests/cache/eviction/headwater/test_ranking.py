"""The ranking against a search of all scores."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from headwater.cache.eviction.headwater.order import Ranking
from headwater.cache.node import Node

NODES = [Node(None, b"", array("i"), 0, serial) for serial in range(8)]
SCORES = st.integers(0, 9).map(float)
STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "put", "discard", "lowest"]), st.integers(0, 7), SCORES), max_size=100
)


@given(st.lists(SCORES, min_size=8, max_size=8), st.integers(1, 8), STEPS)
def test_lowest_is_that_of_all_scores_until_ranked_are_used_up(
    scores: list[float], number: int, steps: list[tuple[str, int, float]]
) -> None:
    of = dict(zip(NODES, scores, strict=True))
    ranked = sorted((score, node.serial, node) for node, score in of.items())[:number]
    ranking = Ranking(ranked[-1][0])
    for score, _, node in ranked:
        ranking.put(node, score, is_ranked=True)
    unchanged = {node for *_, node in ranked}
    for step, at, score in steps:
        node = NODES[at]
        if step == "put":
            ranking.put(node, score)
            of[node] = score
            unchanged.discard(node)
        elif step == "discard":
            ranking.discard(node)
            of.pop(node, None)
            unchanged.discard(node)
        lowest = min(((score, node.serial, node) for node, score in of.items()), default=None)
        assert ranking.lowest() is (lowest[2] if lowest is not None and unchanged else None)


def test_empty_ranking_has_no_lowest() -> None:
    ranking = Ranking()
    assert ranking.lowest() is None
    ranking.put(NODES[0], 0.0)
    assert ranking.lowest() is None
