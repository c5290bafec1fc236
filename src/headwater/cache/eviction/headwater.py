"""Headwater's own policy: chance of reuse, learned from the traffic, times the FLOPs that a checkpoint saves a page."""

from __future__ import annotations

import numpy as np

from headwater.cache.node import Node
from headwater.cache.order import is_free_leaf
from headwater.cache.order.candidates import MOST_USES, Candidates
from headwater.cache.order.heap import is_bare_leaf
from headwater.cache.order.ranked import BareFirst
from headwater.cache.order.rates import MIDDLES, ReuseRates
from headwater.cache.order.rows import WORD
from headwater.cache.order.worth import Worth, base_node, next_below
from headwater.plan import CacheLayout

BRANCHES, DEPTHS = 3, 7  # classes: none, 1, more; below 256 tokens, 1,024 and so on
USES = np.array([1, 2, 2, 3, 3, 3])  # 1 + uses in the prior, by class: none, answered, 1, 2-3, 4-7, more
RENEWED = 64, 16  # the rates are computed when so many checkpoints, and 1/16 of all, were taken and used


class Headwater(BareFirst):
    """Lowest worth x index of reuse goes; KV without a checkpoint before all, then speculative checkpoints.

    Worth is FLOPs saved over the nearest ancestor with a checkpoint, a page (`Worth`). The index is the highest rate of
    reuse, over all ages until which a checkpoint of its class could be kept (`ReuseRates`). Classes: branches with a
    checkpoint below, uses, and depth. A use is a request that resumed there. The prefill of a finished answer, which
    resumes at the end of its own prompt, is none: a checkpoint where nothing else did is of a class between no and one
    use. Before anything is known the rate is (1 + uses) x place / (8 x age), with uses at most 2. Place: a session
    resumes at its deepest checkpoint, so one with another below it counts 1/`superseded`, one with several branches
    `branch`. Without checkpoints, where work can resume at every page, it is LRU of leaves.

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
        prior = np.outer([1.0, 1 / superseded, branch], USES).reshape(-1, 1) / (8 * MIDDLES)
        self._rates = ReuseRates(prior, group=DEPTHS)
        self._kept = Candidates(self._rates)
        self._most_retained, self._checkpoint_pages = int(retained * layout.n_pages), layout.checkpoint_pages
        self._now = self._noted = 0  # noted: checkpoints taken and used since the rates were computed

    def toggled(self, node: Node) -> None:
        for below in next_below(node):
            self._place(below, self._kept.row[below], ranked=False)  # its worth depends on this node
        if (above := base_node(node)) is not None:
            self.place(above)

    def lowest(self, leaves: bool, now: int) -> Node | None:
        return self._kept.lowest(now, leaves, self.clock())

    def retain(self, node: Node, seconds: float) -> None:
        if self._pages([node]) > self._most_retained:
            return
        now, kept = self.clock(), self._kept
        kept.retain(node, now + seconds)
        retained = kept.retained(node, now)
        while self._pages(retained) > self._most_retained:
            kept.release(kept.row[retained.pop(0)])

    def _pages(self, nodes: list[Node]) -> int:
        """Return the pages that these checkpoints keep in memory: their own, and the KV before them."""
        path = {part for node in nodes for part in node.climb()}
        return len(nodes) * self._checkpoint_pages + sum(len(part.pages) for part in path)

    def changed(self, node: Node) -> None:
        if is_bare_leaf(node):
            self._bare.add(node)
        row = self._kept.row[node]
        self._place(node, row)
        if (row >= 0) != (node.checkpoint is not None):
            self.toggled(node)

    def place(self, node: Node) -> None:
        self._place(node, self._kept.row[node])

    def _place(self, node: Node, row: int, ranked: bool = True) -> None:
        """Put a node in its place. row: its row, -1 if it has none. ranked: its rank holds if the node is the same."""
        kept = self._kept
        if self._now < node.kv_time or self._now < node.checkpoint_time:
            self._now = max(node.kv_time, node.checkpoint_time)
        if node.checkpoint is not None:
            traits = _traits(node)
            known = ranked and row >= 0 and kept.traits[row] == traits and kept.time[row] == node.checkpoint_time
            if not known:
                self._keep(node, row, traits)
        elif row >= 0:
            kept.remove(node, row, self._now)

    def _keep(self, node: Node, row: int, traits: int) -> None:
        kept = self._kept
        if row < 0:
            uses = node.hits and 1 + node.hits  # of a snapshot
            row = kept.take(node, self._kind(node, uses), node.checkpoint_time, uses)
            self._noted += 1
        elif kept.time[row] != node.checkpoint_time:
            self._used(node, row)
        elif kept.kind[row] != (kind := self._kind(node, kept.uses[row])):
            kept.change(row, kind, self._now)
        if node.speculative:
            kept.release(row)  # what is not expected to be used again is not retained
        worth = np.inf if node.holds else 0.0 if node.speculative else self._worth.of(node)
        kept.rank(row, worth, traits, self._now)
        least, part = RENEWED
        if self._noted >= max(least, len(kept) // part):
            self._noted = 0
            kept.renew(self._now)

    def _used(self, node: Node, row: int) -> None:
        """Note that work resumed at the checkpoint: a request's, or that of the prefill of a finished answer."""
        kept, time = self._kept, node.checkpoint_time
        uses = kept.uses[row]
        if max(1, uses) <= node.hits or uses == MOST_USES:
            uses = max(2, uses + 1)
            kept.use(row, self._kind(node, uses), uses, time)
            self._noted += 1
        else:
            uses = max(1, uses)
            kept.change(row, self._kind(node, uses), time)
            kept.uses[row], kept.time[row] = uses, time

    def _kind(self, node: Node, uses: int) -> int:
        """Return the class of a checkpoint."""
        branches = min(node.live, BRANCHES) - 1
        pages = (node.end * self._unit) >> 6
        depth = min(DEPTHS - 1, max(0, pages.bit_length() - 1) // 2)
        used = uses if uses < 2 else min(len(USES) - 1, 1 + (uses - 1).bit_length())
        return (branches * len(USES) + used) * DEPTHS + depth


def _traits(node: Node) -> int:
    """Return, as one number, what class and worth are computed from beside times; odd for a leaf whose KV may go."""
    return (node.live << 3 | (node.holds > 0) << 2 | node.speculative << 1 | is_free_leaf(node)) & WORD
