"""The worth of a checkpoint: the FLOPs that it saves over the nearest checkpoint above it, per page."""

from __future__ import annotations

from collections.abc import Iterator

from headwater.cache.node import Node
from headwater.plan import CacheLayout


class Worth:
    """FLOPs saved over the nearest ancestor with a checkpoint, divided by the pages that go with the checkpoint.

    These are its own pages, and for a leaf the pages of KV that serve no other prefix: back to the last node with a
    checkpoint or with another child.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self._flops, self._unit, self._checkpoint_pages = layout.flops, layout.unit_tokens, layout.checkpoint_pages
        self._unit_pages = layout.unit_pages

    def of(self, node: Node) -> float:
        """Return FLOPs per page."""
        unit, pages = self._unit, self._checkpoint_pages
        if not node.children:
            top = node.parent
            while top is not None and top.checkpoint is None and len(top.children) == 1 and top.parent is not None:
                top = top.parent
            pages += (node.end - (0 if top is None else top.end)) * self._unit_pages
        return self._flops.between(base(node) * unit, node.end * unit) / (pages or 1)


class Bases:
    """All nodes with a checkpoint: the worth of checkpoints below a node depends on whether it is one of them."""

    def __init__(self) -> None:
        self._nodes: set[Node] = set()

    def toggles(self, node: Node) -> bool:
        """Return whether the node has got or lost its checkpoint since the last call with it."""
        if (node.checkpoint is not None) == (node in self._nodes):
            return False
        self._nodes ^= {node}
        return True


def base(node: Node) -> int:
    """Return the depth of the nearest ancestor with a checkpoint; 0 if there is none."""
    above = node.parent
    while above is not None and above.checkpoint is None:
        above = above.parent
    return 0 if above is None else above.end


def measured_from(node: Node) -> Iterator[Node]:
    """Yield the nodes whose nearest ancestor with a checkpoint is `node`, if it has one.

    They are the nearest nodes with a checkpoint below it, and all nodes in between. A node that left the tree still
    leads to the nodes that were below it.
    """
    stack = list(node.children.values())
    while stack:
        below = stack.pop()
        yield below
        if below.checkpoint is None:
            stack.extend(below.children.values())


def changes_sharing(node: Node) -> bool:
    """Return whether the KV of a changed node may serve a single leaf now, or no longer: its worth depends on that."""
    return node.checkpoint is None and len(node.children) in (1, 2)


def next_below(node: Node) -> list[Node]:
    """Return the nearest nodes with a checkpoint below `node`."""
    found, stack = [], list(node.children.values())
    while stack:
        below = stack.pop()
        if below.checkpoint is not None:
            found.append(below)
        else:
            stack.extend(below.children.values())
    return found
