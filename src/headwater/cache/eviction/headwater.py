"""Headwater's own policy: chance of reuse, learned from the traffic, times the FLOPs that a checkpoint saves a page."""

from __future__ import annotations

import numpy as np

from headwater.cache.node import Node
from headwater.cache.order import is_free_leaf
from headwater.cache.order.candidates import Candidates
from headwater.cache.order.ranked import BareFirst
from headwater.cache.order.rates import MIDDLES, ReuseRates
from headwater.cache.order.worth import Worth, base_node, next_below
from headwater.plan import CacheLayout

BRANCHES, USES, DEPTHS = 3, 5, 7  # classes: none, 1, more; 0, 1, 2-3, 4-7, more; below 256 tokens, 1,024 and so on
RENEWED = 64  # checkpoints taken and used between two computations of the rates


class Headwater(BareFirst):
    """Lowest worth x index of reuse goes; KV without a checkpoint before all, then speculative checkpoints.

    Worth is FLOPs saved over the nearest ancestor with a checkpoint, a page (`Worth`). The index is the highest rate of
    reuse, over all ages until which a checkpoint of its class could be kept (`ReuseRates`). Classes: branches with a
    checkpoint below, uses, and depth. A use is a request, or the prefill of a finished answer, that resumed there.
    Before anything is known the rate is (1 + uses) x place / (8 x age), with uses at most 2. Place: a session resumes
    at its deepest checkpoint, so one with another below it counts 1/`superseded`, one with several branches `branch`.
    Without checkpoints, where work can resume at every page, it is LRU of leaves.

    While a client has a checkpoint retained, the lowest other one of its namespace goes in its place: a hint takes
    nothing from other namespaces. A namespace's retentions take at most the share `retained` of all pages, KV before
    the checkpoints included; beyond that those that lapse first are dropped.
    """

    def __init__(
        self, layout: CacheLayout, superseded: float = 8.0, branch: float = 2.0, retained: float = 0.25
    ) -> None:
        if superseded <= 0 or branch <= 0:
            raise ValueError(f"superseded is {superseded} and branch {branch}; both must be above 0")
        if not 0 <= retained <= 1:
            raise ValueError(f"retained is {retained}, must be a share of the memory: 0 to 1")
        super().__init__()
        self.keeps_history = not layout.every_page
        self._worth, self._unit = Worth(layout), layout.unit_tokens
        places = np.repeat([1.0, 1 / superseded, branch], USES)
        uses = np.tile(np.minimum(1 + np.arange(USES), 3), BRANCHES)
        self._rates = ReuseRates((places * uses)[:, None] / (8 * MIDDLES), group=DEPTHS)
        self._kept = Candidates(self._rates)
        self._most_retained, self._checkpoint_pages = int(retained * layout.n_pages), layout.checkpoint_pages
        self._seen: dict[Node, tuple[int, ...]] = {}  # what class and worth were last computed from
        self._now = self._noted = 0  # noted: checkpoints taken and used since the rates were computed

    def toggled(self, node: Node) -> None:
        for below in next_below(node):
            self._seen.pop(below, None)  # its worth depends on this node
            self.place(below)
        if (above := base_node(node)) is not None:
            self.place(above)

    def lowest(self, leaves: bool, now: int) -> Node | None:
        return self._kept.lowest(now, leaves, self.clock())

    def retain(self, node: Node, seconds: float) -> None:
        if self._pages([node]) > self._most_retained:
            return
        now, kept = self.clock(), self._kept
        row = kept.row[node]
        kept.until[row] = max(kept.until[row], now + seconds)
        retained = kept.retained(node, now)
        while self._pages(retained) > self._most_retained:
            kept.until[kept.row[retained.pop(0)]] = -np.inf

    def _pages(self, nodes: list[Node]) -> int:
        """Return the pages that these checkpoints keep in memory: their own, and the KV before them."""
        path = {part for node in nodes for part in node.climb()}
        return len(nodes) * self._checkpoint_pages + sum(len(part.pages) for part in path)

    def place(self, node: Node) -> None:
        self._now = max(self._now, node.kv_time, node.checkpoint_time)
        if node.checkpoint is not None:
            leaf = is_free_leaf(node)
            seen = node.checkpoint_time, node.live, node.holds, node.speculative, leaf
            if self._seen.get(node) != seen:
                self._seen[node] = seen
                self._keep(node, leaf)
        elif node in self._seen:
            del self._seen[node]
            self._kept.remove(node, self._now)

    def _keep(self, node: Node, leaf: bool) -> None:
        kept = self._kept
        if (row := kept.row.get(node)) is None:
            row = kept.take(node, self._kind(node, node.hits), node.checkpoint_time, node.hits)
            self._noted += 1
        elif kept.time[row] != node.checkpoint_time:
            kept.use(row, self._kind(node, int(kept.uses[row]) + 1), node.checkpoint_time)
            self._noted += 1
        elif kept.kind[row] != (kind := self._kind(node, int(kept.uses[row]))):
            kept.change(row, kind, self._now)
        if node.speculative:
            kept.until[row] = -np.inf  # what is not expected to be used again is not retained
        worth = np.inf if node.holds else 0.0 if node.speculative else self._worth.of(node)
        kept.rank(row, worth, leaf, self._now)
        if self._noted >= RENEWED:
            self._noted = 0
            kept.renew(self._now)

    def _kind(self, node: Node, uses: int) -> int:
        """Return the class of a checkpoint."""
        branches = min(node.live, BRANCHES) - 1
        pages = (node.end * self._unit) >> 6
        depth = min(DEPTHS - 1, max(0, pages.bit_length() - 1) // 2)
        return (branches * USES + min(USES - 1, uses.bit_length())) * DEPTHS + depth
