"""Every invariant that spans index, pool and leases."""

from __future__ import annotations

from collections import Counter

from headwater.cache.index import Index
from headwater.cache.lease import Lease, OpenPlan
from headwater.cache.node import Node
from headwater.cache.pool import Pool
from headwater.cache.segments.store import SegmentStore


def audit(
    index: Index, pool: Pool, segments: SegmentStore, leases: list[Lease], plans: list[tuple[Lease, OpenPlan]]
) -> None:
    """Raise AssertionError at the first thing that does not hold."""
    index.check()
    segments.check()
    nodes: list[Node] = list(index)
    kv, states = _owned_pages(nodes, leases, [opened for _, opened in plans])
    for stored in segments:
        kv.extend(stored.kv)
        states.extend((*stored.state, *stored.transition, *stored.lent))
    pool.check(kv, states)
    pins = Counter(node for lease in leases for node in (lease.node, lease.deep) if node is not None)
    for lease, opened in plans:
        if opened.deep_before is not None and opened.deep_before is not lease.deep:
            pins[opened.deep_before] += 1
    holds = Counter(lease.node for lease in leases if lease.held)
    for node in [*nodes, *index.roots.values()]:
        assert node.pins == pins.pop(node, 0), f"{node} is pinned {node.pins} times, not as often as leases end there"
        assert node.holds == holds.pop(node, 0), f"{node} has {node.holds} holds, not as many as leases hold it"
    assert not pins, f"leases pin nodes that are not in the tree: {list(pins)}"
    assert not holds, f"leases hold nodes that are not in the tree: {list(holds)}"
    assert sum(lease.plan is not None for lease in leases) == len(plans), f"{len(plans)} open plans, not of the leases"
    for lease in leases:
        _check_table(index, lease)


def _owned_pages(nodes: list[Node], leases: list[Lease], plans: list[OpenPlan]) -> tuple[list[int], list[int]]:
    """Pages of KV, and pages of checkpoints and slots."""
    kv: list[int] = []
    states: list[int] = []
    for node in nodes:
        kv.extend(node.pages)
        states.extend(node.checkpoint or ())
    for lease in leases:
        kv.extend(lease.private_pages())
        states.extend(lease.slot)
    for plan in plans:
        for save in plan.saves:
            states.extend(save.pages)
    return kv, states


def _check_table(index: Index, lease: Lease) -> None:
    """Check that each page of a lease is its own, or is at the same position on its pinned path."""
    own = set(lease.private_pages())
    path: dict[int, int] = {}
    node = lease.deep or lease.node
    while node is not None and node.parent is not None:
        first = node.parent.end * index.unit_pages
        path.update(zip(range(first, first + len(node.pages)), node.pages, strict=True))
        node = node.parent
    for at, page in enumerate(lease.table):
        assert page in own or path.get(at) == page, f"page {page} at {at} of a table is neither its own nor pinned"
