"""Check of every invariant across index, pool and leases."""

from __future__ import annotations

from collections import Counter
from itertools import chain

from headwater.cache.index import Index
from headwater.cache.lease import Lease, OpenPlan
from headwater.cache.node import Node, StoredTail
from headwater.cache.pool import Pool
from headwater.cache.segments.store import SegmentStore
from headwater.cache.tails import Tails


def audit(
    index: Index,
    pool: Pool,
    segments: SegmentStore,
    tails: Tails,
    leases: list[Lease],
    plans: list[tuple[Lease, OpenPlan]],
) -> None:
    """Raise AssertionError at the first broken invariant."""
    check_index(index)
    segments.check()
    read = Counter(opened.mid_page.tail for _, opened in plans if opened.mid_page is not None)
    read.update(tail for lease in leases for tail in lease.copied)
    _check_tails(index, tails, read)
    nodes: list[Node] = list(index)
    kv = [*(node.pages for node in nodes), *(lease.private_pages() for lease in leases), *(s.kv for s in segments)]
    states = [*(node.checkpoint or () for node in nodes), *(lease.slot for lease in leases)]
    states += [save.pages for _, opened in plans for save in opened.saves]
    written = (tail for _, opened in plans for tail in opened.tails)
    states += [pages for tail in (*tails, *written) for pages in (tail.kv, tail.rows)]
    states += [pages for stored in segments for pages in (stored.state, stored.transition, stored.lent)]
    pool.check(list(chain.from_iterable(kv)), list(chain.from_iterable(states)))
    pins = Counter(node for lease in leases for node in (lease.node, lease.deep) if node is not None)
    for lease, opened in plans:
        if opened.deep_before is not None and opened.deep_before is not lease.deep:
            pins[opened.deep_before] += 1
        if opened.mid_page is not None and opened.mid_page.tail is None:
            pins[opened.mid_page.node] += 1
    holds = Counter(lease.node for lease in leases if lease.held)
    for node in [*nodes, *index.roots.values()]:
        assert node.pins == pins.pop(node, 0), f"{node} is pinned {node.pins} times, not as often as leases end there"
        assert node.holds == holds.pop(node, 0), f"{node} has {node.holds} holds, not as many as leases hold it"
    assert not pins, f"leases pin nodes that are not in the tree: {list(pins)}"
    assert not holds, f"leases hold nodes that are not in the tree: {list(holds)}"
    assert sum(lease.plan is not None for lease in leases) == len(plans), f"{len(plans)} open plans, not of the leases"
    for lease in leases:
        _check_table(index, lease)


def _check_tails(index: Index, tails: Tails, read: Counter[StoredTail | None]) -> None:
    """Check that tails are those of nodes, in order and each once, and as often pinned as they are read."""
    stored = set(tails)
    of_nodes = [tail for node in (*index, *index.roots.values()) for tail in node.tails]
    assert len(of_nodes) == len(stored), f"{len(of_nodes)} tails of nodes, {len(stored)} in the order of use"
    for tail in of_nodes:
        node = tail.node
        assert tail in stored, f"{tail} is not among those in the order of use"
        assert tail.pins == read[tail], f"{tail} is pinned {tail.pins} times, and read {read[tail]} times"
        assert tails.may_begin_at(node), f"{tail} lacks its checkpoint"
        ids = [one.ids for one in node.tails]
        assert ids == sorted(set(ids)), f"tails of {node} are not in order"
    assert tails.pages == sum(tail.pages for tail in of_nodes), f"{tails.pages} pages of tails are counted"
    pinned = sum(tail.pages for tail in of_nodes if tail.pins)
    assert tails.evictable_beside(None) == tails.pages - pinned, f"{pinned} pages of tails are pinned"


def _check_table(index: Index, lease: Lease) -> None:
    """Check that each page of a lease is its own, or is at the same position on its pinned path."""
    own = set(lease.private_pages())
    path: dict[int, int] = {}
    last = lease.deep or lease.node
    for node in () if last is None else index.path(last):
        first = node.end * index.unit_pages - len(node.pages)
        path.update(enumerate(node.pages, first))
    for at, page in enumerate(lease.table):
        assert page in own or path.get(at) == page, f"page {page} at {at} of a table is neither its own nor pinned"


def check_index(index: Index) -> None:
    """Raise AssertionError unless edges, depths, pages and counters agree, and no node is superfluous."""
    for namespace, root in index.roots.items():
        assert root.namespace == namespace, f"root of {namespace!r} is named {root.namespace!r}"
        assert root.children or root.pins or root.tails, f"the root of {namespace!r} is empty"
        assert root.checkpoint is None, f"{root} has a checkpoint"
        assert root.parent is None, f"{root} has a parent"
        assert root.end == 0, f"{root} is a root"
    nodes = list(index)
    for node in nodes:
        _check_node(index, node)
    kv_pages = sum(len(node.pages) for node in nodes)
    checkpoints = sum(node.checkpoint is not None for node in nodes)
    dead_pages = sum(len(node.pages) for node in nodes if not node.live)
    assert len(nodes) == index.nodes, f"{len(nodes)} nodes, {index.nodes} counted"
    assert kv_pages == index.kv_pages, f"{kv_pages} KV pages, {index.kv_pages} counted"
    assert checkpoints == index.checkpoints, f"{checkpoints} checkpoints, {index.checkpoints} counted"
    assert dead_pages == index.dead_pages, f"{dead_pages} dead KV pages, {index.dead_pages} counted"


def _check_node(index: Index, node: Node) -> None:
    parent = node.parent
    assert parent is not None, f"{node} has no parent"
    assert node.unit == node.edge[: index.unit_bytes], f"{node} is filed under another unit than its first"
    assert parent.children.get(node.unit) is node, f"{node} is not its parent's child"
    assert node.fast_child in (node.children.values() or (None,)), (
        f"the fast-path child of {node} is {node.fast_child}, not a child"
    )
    units, rest = divmod(len(node.edge), index.unit_bytes)
    assert units > 0, f"{node} has an edge of {len(node.edge)} bytes"
    assert rest == 0, f"{node} has an edge of {len(node.edge)} bytes"
    assert node.end == parent.end + units, f"{node} does not end {units} below {parent}"
    assert len(node.pages) == units * index.unit_pages, f"{node}: {len(node.pages)} pages for {units} units"
    assert 0 <= node.holds <= node.pins, f"{node}: {node.holds} holds, {node.pins} pins"
    assert all(parent.end < at <= node.end for at in node.lost), f"{node} remembers {node.lost}"
    bare = node.checkpoint is None and not node.pins and not node.tails
    alike = [child for child in node.children.values() if child.gap_end == node.gap_end]
    assert not (bare and len(node.children) == len(alike) == 1), f"{node} should have been merged"
    assert not (bare and not node.children and not node.pages), f"{node} keeps nothing"
    live = (node.checkpoint is not None) + sum(child.live > 0 for child in node.children.values())
    assert node.live == live, f"{node} is kept alive {node.live} times, not {live}"
