"""View of a cache for the live page: its largest subtrees, its most used prefixes, and fingerprints of prefixes.

The caller's lock is held only while `look` runs. Edges are referred to, not copied: they are immutable, so
fingerprints are taken after the lock is released.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, nlargest

from headwater.cache.index import Index
from headwater.cache.node import Node, Root

FINGERPRINT_DIGITS = 12  # hexadecimal
MAX_WALKED = 10_000  # nodes; others are only counted

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
    namespace: str  # of a root; never to leave the process, either


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
    """The nodes shown, parents before children, and the most used prefixes."""

    nodes: tuple[NodeView, ...]
    hottest: tuple[HotPrefix, ...]  # most hits first
    total_nodes: int  # of the tree, roots not counted
    shown_nodes: int  # of these nodes, the ones in `nodes`
    walked_nodes: int  # all, up to MAX_WALKED
    now: int  # the cache's tick


def look(index: Index, unit_tokens: int, now: int, limit: int, hottest: int) -> CacheView:
    """Return the `limit` nodes with the largest subtrees, and the `hottest` prefixes by requests that resumed there."""
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
    """Return at most MAX_WALKED nodes, level by level: parents come first, and the deepest are left out."""
    walked = [child for root in index.roots.values() for child in root.children.values()]
    for node in walked:  # the list grows during the loop
        if len(walked) >= MAX_WALKED:
            break
        walked.extend(node.children.values())
    del walked[MAX_WALKED:]
    return walked


def _sizes(walked: list[Node], index: Index) -> tuple[Sizes, Sizes]:
    """Return the units and the nodes of each subtree."""
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
    """Return the `limit` nodes with the largest subtrees. A child's is never larger, so parents come first."""
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


def path_of(view: CacheView, namespace: str, key: bytes, unit_bytes: int) -> list[int]:
    """Return the ids of the shown nodes that a key enters by at least a unit, from its namespace's root down."""
    path: list[int] = []
    at = 0
    for node in view.nodes:
        if node.parent is None:
            path += [node.id] if node.namespace == namespace else []
        elif path and node.parent == path[-1] and key.startswith(node.edge[:unit_bytes], at):
            path.append(node.id)
            if not key.startswith(node.edge, at):
                break
            at += len(node.edge)
    return path


class Fingerprints:
    """Names of prefixes that reveal nothing of their content: equal only if the prefixes are, within one process.

    HMAC-SHA-256 under a random key that never leaves the process.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def namespace(self, name: str) -> str:
        return _shown(self._begin(name))

    def prefix(self, namespace: str, edges: Iterable[bytes]) -> str:
        """Return the fingerprint of the joined edges, wherever they are cut."""
        mac = self._begin(namespace)
        for edge in edges:
            mac.update(edge)
        return _shown(mac)

    def of_nodes(self, view: CacheView) -> dict[int, str]:
        """Return, by node id, the fingerprint of the prefix that ends there. Every edge is read once."""
        macs: dict[int, hmac.HMAC] = {}
        for node in view.nodes:
            mac = self._begin(node.namespace) if node.parent is None else macs[node.parent].copy()
            mac.update(node.edge)
            macs[node.id] = mac
        return {node: _shown(mac) for node, mac in macs.items()}

    def _begin(self, namespace: str) -> hmac.HMAC:
        name = namespace.encode(errors="surrogatepass")
        return hmac.new(self._key, len(name).to_bytes(8, "big") + name, "sha256")


def _shown(mac: hmac.HMAC) -> str:
    return mac.hexdigest()[:FINGERPRINT_DIGITS]
