"""The heap against a sort."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from headwater.cache.eviction.base.lazy_heap import LazyHeap, Rank
from headwater.cache.node import Node

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
    heap, ranks = LazyHeap[Rank](lambda node: node not in hidden), dict[Node, Rank]()
    for step, number, rank in steps:
        node = NODES[number]
        if step == "put":
            heap.put(node, (rank,))
            ranks[node] = (rank,)
        elif step == "discard":
            heap.discard(node)
            ranks.pop(node, None)
        elif step == "hide":
            hidden.add(node)
        elif step == "show":
            hidden.discard(node)
            if node in ranks:
                heap.put(node, ranks[node])
        shown = [(rank, node.serial, node) for node, rank in ranks.items() if node not in hidden]
        assert heap.lowest() is (min(shown)[2] if shown else None)


@given(st.lists(st.tuples(st.sampled_from(["use", "use", "lowest", "hide", "show"]), st.integers(0, 5)), max_size=300))
def test_oldest_node_is_right_after_refreshes_without_notice(steps: list[tuple[str, int]]) -> None:
    hidden: set[Node] = set()
    heap = LazyHeap[int](lambda node: node not in hidden, lambda node: node.kv_time)
    for node in NODES:
        node.kv_time = 0
        heap.add(node)
    for now, (step, number) in enumerate(steps):
        node = NODES[number]
        if step == "use":
            node.kv_time = now
        elif step == "hide":
            hidden.add(node)
        elif step == "show":
            hidden.discard(node)
            heap.add(node)
        if step == "lowest":
            shown = [(node.kv_time, node.serial, node) for node in NODES if node not in hidden]
            assert heap.lowest() is (min(shown)[2] if shown else None)
