"""FLOP-aware: the FLOPs that a checkpoint saves for the memory that it takes, weighed against its recency."""

from __future__ import annotations

from headwater.cache.eviction.base.lazy_heap import Leaves
from headwater.cache.eviction.base.policy import Kind, Room, Victim
from headwater.cache.eviction.base.scored import RECENCIES, Scored
from headwater.cache.eviction.base.worth import base
from headwater.cache.node import Node
from headwater.plan import CacheLayout


class FlopAware(Scored):
    """Lowest S = minmax(recency) + alpha · minmax(efficiency) goes (Marconi, section 4.2).

    Efficiency = (FLOPs that the node saves - FLOPs that its parent saves) / memory of its checkpoint and its KV.
    Candidates have at most one child. A leaf loses checkpoint and KV; another node loses its checkpoint, and its child
    absorbs its KV. In split pools this is for checkpoints, and KV goes leaf to root by its own time.
    A node without checkpoint saves nothing, unless work can resume at every page.

    over: take the ranges of `candidates` or of `all` nodes. recency: `inverse_age`, or `linear` in time. memory: KV of
    the node's `edge`, or of its whole `prefix`. parent: the nearest ancestor with a `checkpoint`, or the `immediate`
    one.
    """

    leaf_loses = Kind.NODE

    def __init__(
        self,
        layout: CacheLayout,
        alpha: float = 1.0,
        over: str = "candidates",
        recency: str = "inverse_age",
        memory: str = "edge",
        parent: str = "checkpoint",
    ) -> None:
        _require("over", over, ("candidates", "all"))
        _require("recency", recency, tuple(RECENCIES))
        _require("memory", memory, ("edge", "prefix"))
        _require("parent", parent, ("checkpoint", "immediate"))
        super().__init__(alpha, recency=RECENCIES[recency], over_all=over == "all")
        self._layout = layout
        self._every_page, self._unit_pages = layout.every_page, layout.unit_pages
        self._whole_prefix = memory == "prefix"
        self._immediate = parent == "immediate" or self._every_page
        self._leaves = None if layout.state_fraction is None else Leaves()  # KV that has a pool of its own

    @property
    def alpha(self) -> float:
        return self.weight

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        self.weight = alpha

    def value(self, node: Node) -> float:
        """Return FLOPs per page."""
        parent = node.parent
        if parent is None or (node.checkpoint is None and not self._every_page):
            return 0.0
        start, unit = (parent.end if self._immediate else base(node)), self._layout.unit_tokens
        pages = node.end * self._unit_pages if self._whole_prefix else len(node.pages)
        saved = self._layout.flops.between(start * unit, node.end * unit)
        return saved / (pages + len(node.checkpoint or ()))

    def victim(self, room: Room, now: int) -> Victim | None:
        if room is not Room.KV or self._leaves is None:
            return super().victim(room, now)
        self.settle()
        return self._leaves.oldest()

    def _place(self, node: Node) -> None:
        super()._place(node)
        if self._leaves is not None:
            self._leaves.changed(node)


def _require(option: str, chosen: str, allowed: tuple[str, ...]) -> None:
    if chosen not in allowed:
        raise ValueError(f"{option} is {chosen!r}; there are {', '.join(allowed)}")
