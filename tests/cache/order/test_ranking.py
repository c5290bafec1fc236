"""The heap against a sort."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from headwater.cache.node import Node
from headwater.cache.order.ranking import Rank, Ranking

NODES = [Node(None, b"", array("i"), 0, serial) for serial in range(6)]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "discard", "lowest", "hide", "show"]), st.integers(0, 5), st.integers(0, 3)
    ),
    max_size=300,
)


@given(STEPS)
def test_the_lowest_is_that_of_all_ranks_that_stand(steps: list[tuple[str, int, int]]) -> None:
    hidden: set[Node] = set()
    ranking, ranks = Ranking(lambda node: node not in hidden), dict[Node, Rank]()
    for step, number, rank in steps:
        node = NODES[number]
        if step == "put":
            ranking.put(node, (rank,))
            ranks[node] = (rank,)
        elif step == "discard":
            ranking.discard(node)
            ranks.pop(node, None)
        elif step == "hide":
            hidden.add(node)
        elif step == "show":
            hidden.discard(node)
            if node in ranks:
                ranking.put(node, ranks[node])
        shown = [(rank, node.serial, node) for node, rank in ranks.items() if node not in hidden]
        assert ranking.lowest() is (min(shown)[2] if shown else None)
