"""What a checkpoint saves whoever resumes there, for the memory that goes with it."""

from __future__ import annotations

from headwater.cache.node import Node
from headwater.cache.order.scored import base
from headwater.plan import CacheLayout


class Worth:
    """FLOPs saved over the nearest ancestor with a checkpoint, a page.

    Pages are the checkpoint's own, and those of KV that nobody else would need: of a leaf, back to the last node with
    a checkpoint or another child.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self._flops, self._unit, self._checkpoint_pages = layout.flops, layout.unit_tokens, layout.checkpoint_pages
        self._unit_pages = layout.kv_pages_per_unit * (layout.unit_tokens // layout.page_size)

    def of(self, node: Node) -> float:
        saved = self._flops.between(base(node) * self._unit, node.end * self._unit)
        return saved / max(1, self._checkpoint_pages + self._kv(node))

    def _kv(self, node: Node) -> int:
        if node.children:
            return 0
        top = node.parent
        while top is not None and top.checkpoint is None and len(top.children) == 1 and top.parent is not None:
            top = top.parent
        return (node.end - (top.end if top is not None else 0)) * self._unit_pages
