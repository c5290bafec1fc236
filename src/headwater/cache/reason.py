"""Why a prompt resumes where it does and not deeper."""

from __future__ import annotations

from headwater.account import Reason
from headwater.cache.index import Index
from headwater.cache.node import Node


def explain(index: Index, namespace: str, key: bytes, last: Node | None, reach: tuple[int, int, int]) -> Reason:
    """`last` and `reach` say what was found of `key`; reach is (checkpoint, KV, most that could match), in units.

    `evicted` is said where it is remembered; the rest follows from what is there now.
    """
    checkpoint, kv, cap = reach
    if not cap:
        return Reason.TOO_SHORT
    if checkpoint == cap:
        return Reason.FULL
    if _lost_between(last, checkpoint, kv) or _dropped_at(index, namespace, key, kv):
        return Reason.EVICTED
    if checkpoint < kv:
        return Reason.NO_CHECKPOINT
    if kv:
        return Reason.DIVERGED
    root = index.roots.get(namespace)
    if root is not None and root.children:
        return Reason.COLD
    return Reason.OTHER_NAMESPACE if any(other.children for other in index.roots.values()) else Reason.COLD


def _dropped_at(index: Index, namespace: str, key: bytes, position: int) -> bool:
    width = index.unit_bytes
    return (namespace, position, key[position * width : (position + 1) * width]) in index.eviction_log


def _lost_between(node: Node | None, checkpoint: int, kv: int) -> bool:
    """Whether a checkpoint was evicted on the path to `node`, beyond `checkpoint` and at `kv` or before."""
    while node is not None and node.end > checkpoint:
        if node.lost and any(checkpoint < at <= kv for at in node.lost):
            return True
        node = node.parent
    return False
