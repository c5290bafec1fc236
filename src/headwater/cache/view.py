"""The tree as one may look at it: its largest parts and its most used checkpoints, in integers.

Whoever looks holds the caller's lock only while `look` runs. Edges are named, not copied: they are immutable, so that
fingerprints can be taken after the lock is free.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush, nlargest

from headwater.cache.index import Index
from headwater.cache.node import Node, Root

MAX_WALKED = 10_000  # nodes: what lies beyond is told by number only

Sizes = dict[Node, int]


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node of the tree. Positions and lengths are in tokens, ages in ticks of the cache."""

    id: int  # stays the same as long as the node does
    parent: int | None  # None: a namespace's root
    start: int
    end: int
    kv_pages: int
    checkpoint: bool
    speculative: bool
    dead: bool  # no checkpoint at or below it: its KV saves no prefill
    age: int  # since its KV was last used
    pins: int
    hits: int  # requests that resumed at its end
    subtree_tokens: int  # its own included
    subtree_nodes: int
    folded_nodes: int  # of the subtree, below this node, that are not shown
    folded_tokens: int
    edge: bytes  # token ids: never to leave the process
    namespace: str  # of a root; likewise


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A prefix that requests resumed from."""

    id: int  # of the node at its end
    tokens: int
    hits: int
    age: int
    namespace: str  # never to leave the process, as are the edges
    edges: tuple[bytes, ...]  # from the root down


@dataclass(frozen=True, slots=True)
class CacheView:
    """What is shown of the tree, parents before children."""

    nodes: tuple[NodeView, ...]
    hottest: tuple[HotPrefix, ...]  # most hits first
    total_nodes: int  # of the tree, roots not counted
    shown_nodes: int  # of them, those in `nodes`
    walked_nodes: int  # less than all only in a tree of more than MAX_WALKED
    now: int  # the cache's tick


def look(index: Index, unit_tokens: int, now: int, limit: int, hottest: int) -> CacheView:
    """The `limit` nodes with the largest subtrees, and the `hottest` prefixes that requests resumed from most often."""
    walked = _walk(index)
    sizes = _sizes(walked, index)
    shown = _largest(index, sizes[0], limit)
    hot = nlargest(hottest, [node for node in walked if node.hits], key=lambda node: (node.hits, node.end))
    return CacheView(
        nodes=tuple(_view(node, sizes, shown, unit_tokens, now) for node in shown),
        hottest=tuple(_hot(index, node, unit_tokens, now) for node in hot),
        total_nodes=index.nodes,
        shown_nodes=sum(not isinstance(node, Root) for node in shown),
        walked_nodes=len(walked),
        now=now,
    )


def _walk(index: Index) -> list[Node]:
    """At most MAX_WALKED nodes, level by level, so that parents come first and what is cut off is deep."""
    walked = [child for root in index.roots.values() for child in root.children.values()]
    for node in walked:  # it grows while it is gone through
        if len(walked) >= MAX_WALKED:
            break
        walked.extend(node.children.values())
    del walked[MAX_WALKED:]
    return walked


def _sizes(walked: list[Node], index: Index) -> tuple[Sizes, Sizes]:
    """Units and nodes of each subtree."""
    units: Sizes = dict.fromkeys(index.roots.values(), 0)
    nodes: Sizes = dict(units)
    nodes.update(dict.fromkeys(walked, 1))
    for node in walked:
        units[node] = node.end - node.parent.end  # type: ignore[union-attr]  # only roots have no parent
    for node in reversed(walked):
        parent = node.parent
        units[parent] += units[node]  # type: ignore[index]
        nodes[parent] += nodes[node]  # type: ignore[index]
    return units, nodes


def _largest(index: Index, units: Sizes, limit: int) -> dict[Node, None]:
    """A child's subtree is never larger than its parent's: going by size meets parents first."""
    heap: list[tuple[int, int, Node]] = [(-units[root], root.serial, root) for root in index.roots.values()]
    heapify(heap)
    shown: dict[Node, None] = {}
    while heap and len(shown) < limit:
        node = heappop(heap)[2]
        shown[node] = None
        for child in node.children.values():
            if child in units:
                heappush(heap, (-units[child], child.serial, child))
    return shown


def _view(node: Node, sizes: tuple[Sizes, Sizes], shown: dict[Node, None], unit_tokens: int, now: int) -> NodeView:
    units, nodes = sizes
    folded = [child for child in node.children.values() if child in units and child not in shown]
    return NodeView(
        id=node.serial,
        parent=None if node.parent is None else node.parent.serial,
        start=0 if node.parent is None else node.parent.end * unit_tokens,
        end=node.end * unit_tokens,
        kv_pages=len(node.pages),
        checkpoint=node.checkpoint is not None,
        speculative=node.speculative,
        dead=not node.live,
        age=now - node.kv_time,
        pins=node.pins,
        hits=node.hits,
        subtree_tokens=units[node] * unit_tokens,
        subtree_nodes=nodes[node],
        folded_nodes=sum(nodes[child] for child in folded),
        folded_tokens=sum(units[child] for child in folded) * unit_tokens,
        edge=node.edge,
        namespace=node.namespace if isinstance(node, Root) else "",
    )


def _hot(index: Index, node: Node, unit_tokens: int, now: int) -> HotPrefix:
    edges = tuple(part.edge for part in index.path(node))
    return HotPrefix(node.serial, node.end * unit_tokens, node.hits, now - node.kv_time, index.namespace(node), edges)
