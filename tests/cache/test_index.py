"""The radix tree: by itself, and against a dict of prefixes."""

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headwater.cache.audit import check_index
from headwater.cache.eviction.lru import Lru
from headwater.cache.index import Index
from headwater.cache.node import EvictionLog, Node
from tests.cache.toy import LAYOUT
from tests.support import examples


def make(unit_bytes: int = 1) -> tuple[Index, Node]:
    """An index whose root stays, and the root."""
    index = Index(unit_bytes, 1, Lru(LAYOUT))
    root = index.root("")
    index.pin(root)
    return index, root


def add(index: Index, root: Node, key: bytes, stops: tuple[int, ...] = ()) -> list[Node]:
    """Insert `key` with nodes at `stops` and a checkpoint at each; page n is the n-th unit."""
    length = len(key) // index.unit_bytes
    nodes, joint = index.grow(root, key, [*stops, length], array("i", range(length)))
    for node in nodes:
        if node.checkpoint is None:
            index.save(node, (), 1)
    if joint is not None:
        index.tidy(joint)
    check_index(index)
    return nodes


def test_a_match_ends_at_a_unit_boundary() -> None:
    index, root = make(unit_bytes=4)
    add(index, root, b"aaaabbbbcccc")
    assert index.walk(root, b"aaaabbbbccXX", 3)[1] == 2
    assert index.walk(root, b"aaaabbbbcccc", 2)[1] == 2
    assert index.walk(root, b"aaXabbbbcccc", 3)[1] == 0


def test_a_match_changes_nothing() -> None:
    index, root = make()
    add(index, root, b"abcdef")
    (node,) = list(index)
    before = (node.edge, node.kv_time, node.checkpoint_time, index.nodes)
    index.walk(root, b"abcxyz", 6)
    assert (node.edge, node.kv_time, node.checkpoint_time, index.nodes) == before


def test_a_split_leaves_checkpoint_and_pin_on_the_lower_part() -> None:
    index, root = make()
    (lower,) = add(index, root, b"abcdef")
    index.pin(lower)
    upper = index.split(lower, 2)
    assert (upper.edge, tuple(upper.pages), upper.checkpoint, upper.pins) == (b"ab", (0, 1), None, 0)
    assert (lower.edge, tuple(lower.pages), lower.checkpoint, lower.pins) == (b"cdef", (2, 3, 4, 5), (), 1)
    assert lower.parent is upper


def test_dropping_a_checkpoint_merges_its_neighbours() -> None:
    index, root = make()
    inner, leaf = add(index, root, b"abcdef", (3,))
    index.drop(inner)
    check_index(index)
    assert list(index) == [leaf]
    assert (leaf.edge, tuple(leaf.pages), leaf.lost) == (b"abcdef", (0, 1, 2, 3, 4, 5), (3,))


def test_merged_kv_is_as_recent_as_its_more_recent_part() -> None:
    index, root = make()
    inner, leaf = add(index, root, b"abcdef", (3,))
    index.touch(leaf, None, 4)
    index.touch(inner, None, 7)
    index.drop(inner)
    assert leaf.kv_time == 7


def test_a_pinned_node_is_neither_merged_nor_trimmed() -> None:
    index, root = make()
    inner, leaf = add(index, root, b"abcdef", (3,))
    index.pin(inner)
    index.drop(inner)
    assert set(index) == {inner, leaf}
    index.pin(leaf)
    index.drop(leaf)
    with pytest.raises(AssertionError, match="pinned"):
        index.trim(leaf, 1)


def test_a_leaf_is_trimmed_page_by_page() -> None:
    index, root = make()
    (leaf,) = add(index, root, b"abcdef")
    index.drop(leaf)
    assert tuple(index.trim(leaf, 2)) == (4, 5)
    assert index.walk(root, b"abcdef", 6)[1] == 4
    assert tuple(index.trim(leaf, 4)) == (0, 1, 2, 3)
    assert index.nodes == index.kv_pages == 0
    check_index(index)


def test_an_empty_root_is_removed() -> None:
    index = Index(1, 1, Lru(LAYOUT))
    (leaf,) = add(index, index.root("salt"), b"abc")
    index.drop(leaf)
    index.trim(leaf, 3)
    assert not index.roots
    check_index(index)


def test_check_finds_broken_edges_wrong_counts_and_unmerged_nodes() -> None:
    index, root = make()
    inner, leaf = add(index, root, b"abcdef", (3,))
    inner.checkpoint = None
    index.checkpoints -= 1
    with pytest.raises(AssertionError, match="should have been merged"):
        check_index(index)
    inner.checkpoint = ()
    with pytest.raises(AssertionError, match="2 checkpoints, 1 counted"):
        check_index(index)
    index.checkpoints += 1
    leaf.end += 1
    with pytest.raises(AssertionError, match="does not end 3 below"):
        check_index(index)


def test_eviction_log_forgets_the_oldest_entries() -> None:
    losses = EvictionLog(capacity=2)
    for position in (1, 2, 1, 3):
        losses.add("", position, b"u")
    assert len(losses) == 2
    assert ("", 1, b"u") in losses
    assert ("", 2, b"u") not in losses


KEYS = st.text("ab", min_size=1, max_size=7).map(str.encode)


class IndexMachine(RuleBasedStateMachine):
    """The index against the sets of prefixes that have KV and checkpoints. A page is named after its prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.index, self.root = make()
        self.kv: dict[bytes, int] = {}
        self.checkpoints: set[bytes] = set()
        self.pinned: list[tuple[Node, bytes]] = []
        self.fresh = 0

    def name(self, node: Node) -> bytes:
        return b"".join(part.edge for part in Index.path(node))

    @rule(key=KEYS, cut=st.integers(1, 7))
    def grow(self, key: bytes, cut: int) -> None:
        stops = sorted({min(cut, len(key)), len(key)})
        pages = array("i", range(self.fresh, self.fresh + len(key)))
        self.fresh += len(key)
        nodes, joint = self.index.grow(self.root, key, stops, pages)
        for at, page in enumerate(pages, 1):
            self.kv.setdefault(key[:at], page)
        for stop, node in zip(stops, nodes, strict=True):
            if node.checkpoint is None:
                self.index.save(node, (), 0)
            self.checkpoints.add(key[:stop])
        if joint is not None:
            self.index.tidy(joint)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        nodes = sorted((node for node in self.index if node.checkpoint is not None), key=self.name)
        if nodes:
            node = data.draw(st.sampled_from(nodes))
            self.checkpoints.remove(self.name(node))
            self.index.drop(node)

    @rule(data=st.data(), units=st.integers(1, 3))
    def trim(self, data: st.DataObject, units: int) -> None:
        leaves = [node for node in self.index if not (node.children or node.pins or node.checkpoint is not None)]
        if leaves:
            leaf = data.draw(st.sampled_from(sorted(leaves, key=self.name)))
            name = self.name(leaf)
            units = min(units, len(leaf.edge))
            gone = [self.kv.pop(name[:at]) for at in range(len(name) - units + 1, len(name) + 1)]
            assert list(self.index.trim(leaf, units)) == gone

    @rule(key=KEYS)
    def pin(self, key: bytes) -> None:
        last, end = self.index.walk(self.root, key, len(key))
        if end:
            node = self.index.boundary(last, end)
            self.index.pin(node)
            self.pinned.append((node, key[:end]))

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        if self.pinned:
            node, name = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
            assert self.name(node) == name
            self.index.unpin(node)

    @rule(key=KEYS)
    def match(self, key: bytes) -> None:
        last, end = self.index.walk(self.root, key, len(key))
        assert end == max((at for at in range(len(key) + 1) if not at or key[:at] in self.kv), default=0)
        node = Index.deepest_checkpoint(last, end)
        found = 0 if node is None else node.end
        assert found == max((at for at in range(1, len(key) + 1) if key[:at] in self.checkpoints), default=0)

    @invariant()
    def every_page_is_where_its_prefix_is(self) -> None:
        check_index(self.index)
        held = {}
        for node in self.index:
            name = self.name(node)
            first = len(name) - len(node.edge) + 1
            held.update({name[: first + at]: page for at, page in enumerate(node.pages)})
        assert held == self.kv
        assert {self.name(node) for node in self.index if node.checkpoint is not None} == self.checkpoints


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=examples(120), stateful_step_count=30)
