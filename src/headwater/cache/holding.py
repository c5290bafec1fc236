"""Holding of cached prefixes while they are copied."""

from __future__ import annotations

from headwater.cache.index import Index
from headwater.cache.lease import Lease
from headwater.cache.tails import Tails
from headwater.plan import CacheLayout, Held


def hold(
    layout: CacheLayout, index: Index, tails: Tails, namespace: str, key: bytes, at: int, with_state: bool
) -> tuple[Lease, Held] | None:
    """Pin a prefix; see `PrefixCache.hold`."""
    end = at // layout.unit_tokens
    path, depth = index.find(namespace, key, end)
    if not end and namespace in index.roots:
        path = [index.roots[namespace]]
    if not path or depth < end:
        return None
    if not with_state:
        lease = Lease.of_path(namespace, path, path[-1].end * layout.unit_tokens)
        index.pin(path[-1], lease.held)
        return lease, Held(lease.table[: end * layout.unit_pages], (), 0)
    if layout.every_page:
        path[-1] = index.boundary(path[-1], end)
    node, ids = path[-1], key[end * layout.unit_bytes :][: layout.unit_bytes]
    if node.end != end or not (tails.may_begin_at(node) and (end or tails.longest(node, ids, False))):
        return None
    lease = Lease.of_path(namespace, path, at)
    index.pin(node, lease.held)
    lease.copied = tails.hold(node, ids)
    above = index.deepest_checkpoint(node.parent, end)
    after = 0 if above is None else above.end * layout.unit_tokens
    return lease, Held(lease.table, node.checkpoint or (), after, [tails.as_plan(tail, ids) for tail in lease.copied])
