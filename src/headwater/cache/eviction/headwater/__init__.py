"""Headwater's own policy: chance of reuse, learned from the traffic, times the FLOPs that a checkpoint saves a page."""

from __future__ import annotations

import numpy as np

from headwater.cache.eviction.base.lazy_heap import is_bare_leaf
from headwater.cache.eviction.base.policy import is_free_leaf
from headwater.cache.eviction.base.ranked import BareFirst
from headwater.cache.eviction.base.worth import Worth, base_node, next_below, shares_anew
from headwater.cache.eviction.headwater.ages import MOST_USES
from headwater.cache.eviction.headwater.candidates import Candidates
from headwater.cache.eviction.headwater.ghosts import Ghosts, prefix_ids
from headwater.cache.eviction.headwater.rates import MIDDLES, ReuseRates
from headwater.cache.index import Index
from headwater.cache.node import Node, Root
from headwater.plan import CacheLayout, Draft

BRANCHES, DEPTHS = 3, 7  # classes: none, 1, more; below 256 tokens, 1,024 and so on
# 1 + uses in the prior, by class: none, answered, 1, 2-3, 4-7, more; none, and at a learned position
USES = np.array([1, 2, 2, 3, 3, 3, 4])
LEARNED = len(USES) - 1
OF_BRANCH = len(USES) * DEPTHS  # classes
OF_USES = [DEPTHS * (n if n < 2 else min(len(USES) - 2, 1 + (n - 1).bit_length())) for n in range(MOST_USES + 1)]
OF_BITS = [min(DEPTHS - 1, max(0, bits - 1) // 2) for bits in range(64)]  # by bits of the depth in 64 tokens
BRANCHED, PARENT, TAKEN, HELD, GUESS, LEAF = 0xE0, 16, 8, 4, 2, 1  # bits of a mark
INFINITE = float("inf")
RENEWED = 64, 16  # the rates are computed when so many checkpoints, and 1/16 of all, were taken and used
GHOSTS = 8  # evicted checkpoints that are remembered, for each in memory


class Headwater(BareFirst):
    """Lowest worth x index of reuse goes; KV without a checkpoint before all, then speculative checkpoints.

    Worth is FLOPs saved over the nearest ancestor with a checkpoint, a page (`Worth`). The index is the highest rate of
    reuse, over all ages until which a checkpoint of its class could be kept (`ReuseRates`). Classes: branches with a
    checkpoint below, uses, and depth. A use is a request that resumed there, or would have, had the checkpoint not been
    evicted (`begun`). Other work is no use, as the prefill of a finished answer, which resumes at the end of its own
    prompt: where nothing else did, the class is one between no and one use. Before anything is known the rate is n x
    place / (8 x age), with n = 1 for no use, 2 for one or other work, 3 for more, and 4 for an unused checkpoint at a
    learned position. Place: a session resumes at its deepest checkpoint, so one with another below it counts
    1/`superseded`, one with several branches `branch`. Without checkpoints, where work can resume at every page, it is
    LRU of leaves.

    While a client has a checkpoint retained, the lowest other one of its namespace goes in its place: a hint takes
    nothing from other namespaces. A namespace's retentions take at most the share `retained` of all pages, KV before
    the checkpoints included; beyond that those that lapse first are dropped. Priorities decide in the same way which
    checkpoint of a namespace goes: that with the lowest score x weight.
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
        self._worth, self._unit, self._unit_bytes = Worth(layout), layout.unit_tokens, layout.unit_bytes
        prior = np.outer([1.0, 1 / superseded, branch], USES).reshape(-1, 1) / (8 * MIDDLES)
        self._rates = ReuseRates(prior, group=DEPTHS)
        self._kept, self._ghosts = Candidates(self._rates), Ghosts(self._rates)
        self._most_retained, self._checkpoint_pages = int(retained * layout.n_pages), layout.checkpoint_pages
        # noted: checkpoints taken or used since the rates were computed; of a request all ghosts count as one
        self._now = self._noted = 0

    def toggled(self, node: Node) -> None:
        for below in next_below(node):
            self._keep(below, mark_of(below), moved=True)
        if (above := base_node(node)) is not None and (mark := mark_of(above)) != above.mark:
            self._keep(above, mark)

    def lowest(self, leaves: bool, now: int) -> Node | None:
        return self._kept.lowest(now, leaves, self.clock())

    def begun(self, draft: Draft, node: Node, now: int) -> None:
        """Count a use of each evicted checkpoint of the prompt, beyond the one where it resumes.

        If all had stayed, each above the deepest would have a checkpoint below it: one without branches moves to the
        class of one branch. One of that class is used only if it is the deepest, one of several each time.
        """
        ghosts = self._ghosts
        if not len(ghosts):
            return
        width, unit = self._unit_bytes, self._unit
        end = (max(draft.end, len(draft.key) * unit // width) - 1) // unit  # one token must be computed
        ids = prefix_ids(draft.key[node.end * width : end * width], width, self._prefix_of(node))
        rows = ghosts.rows_of(reversed(ids))
        for row in rows:
            branches, rest = divmod(ghosts.kind[row], OF_BRANCH)
            if row != rows[0]:
                if branches == 1:
                    continue
                branches = max(1, branches)
            uses = used(ghosts.uses[row], draft.counts)
            kind = branches * OF_BRANCH + OF_USES[uses] + rest % DEPTHS
            ghosts.use(row, kind, uses, now, counts=draft.counts)
        if rows:
            self._noted += draft.counts
            self._renew_if_due()

    def retain(self, node: Node, seconds: float) -> None:
        if self._pages([node]) > self._most_retained:
            return
        now, kept = self.clock(), self._kept
        kept.retain(node, now + seconds)
        retained = kept.retained(node, now)
        while self._pages(retained) > self._most_retained:
            kept.release(kept.row_of[retained.pop(0)])

    def prefer(self, node: Node, priority: int, is_new: bool) -> None:
        self._kept.prefer(node, priority, is_new)

    def _pages(self, nodes: list[Node]) -> int:
        """Return the pages that these checkpoints keep in memory: their own, and the KV before them."""
        path = {part for node in nodes for part in node.climb()}
        return len(nodes) * self._checkpoint_pages + sum(len(part.pages) for part in path)

    def changed(self, node: Node) -> None:
        """Note a change of a node. If it was used, too, `touched` follows."""
        if node.checkpoint is not None:
            mark, before = mark_of(node), node.mark
            if mark != before or mark & LEAF:  # a leaf may have got or lost KV that serves no other prefix
                self._keep(node, mark)
                if not before:
                    self.toggled(node)
            return
        self._advance(node)
        if shares_anew(node):
            self.toggled(node)
        if is_bare_leaf(node):
            self._bare.add(node)
        if node.mark:
            self._leave(node)
            self.toggled(node)

    def touched(self, node: Node) -> None:
        self._advance(node)
        self.place(node)

    def place(self, node: Node) -> None:
        if node.checkpoint is not None:
            mark, kept = mark_of(node), self._kept
            if mark != node.mark or kept.time[kept.row_of[node]] != node.checkpoint_time:
                self._keep(node, mark)

    def _advance(self, node: Node) -> None:
        if self._now < node.kv_time or self._now < node.checkpoint_time:
            self._now = max(node.kv_time, node.checkpoint_time)

    def _keep(self, node: Node, mark: int, moved: bool = False) -> None:
        """Note a checkpoint that is new, was used or changed. moved: the nearest one above is another."""
        kept, before = self._kept, node.mark
        self._advance(node)
        if not before:
            row = self._take(node)
        elif kept.time[row := kept.row_of[node]] != node.checkpoint_time:
            self._used(node, row)
        elif kept.kind[row] != (kind := self._kind(node, kept.uses[row])):
            kept.change(row, kind, self._now)
        node.mark = mark
        if mark & GUESS:
            kept.release(row)  # what is not expected to be used again is not retained
        if moved or mark & LEAF or (mark ^ before) & ~BRANCHED:  # its worth may be another one
            worth = INFINITE if mark & HELD else 0.0 if mark & GUESS else self._worth.of(node)
            kept.worth[row], kept.leaf[row] = worth, mark & LEAF
        kept.rank(node, row, self._now)
        self._renew_if_due()

    def _renew_if_due(self) -> None:
        """Renew the rates once enough checkpoints were taken and used."""
        (least, part), kept = RENEWED, self._kept
        if self._noted >= least and self._noted >= len(kept) // part:
            self._noted = 0
            self._ghosts.renew(GHOSTS * len(kept), self._now)
            kept.renew(self._now)

    def _take(self, node: Node) -> int:
        """Add a checkpoint that is new; return its row."""
        self._noted += 1
        prefix = self._prefix_of(node)
        uses = min(MOST_USES, node.hits and 1 + node.hits)  # of a snapshot
        if not node.speculative:  # a guess is evicted first, and leaves no ghost
            uses = max(uses, self._ghosts.take(prefix, self._now))
        return self._kept.take(node, prefix, self._kind(node, uses), uses)

    def _prefix_of(self, node: Node) -> int:
        """Return the id of the prefix that ends at the node, from that of the nearest checkpoint at or above it."""
        above, row = node, -1
        while above.parent is not None and (row := self._kept.row_of.get(above, -1)) < 0:
            above = above.parent
        if row >= 0:
            before = self._kept.prefix[row]
        else:
            assert isinstance(above, Root), f"{node} is not in the tree"
            before = hash(above.namespace)
        key = b"".join([part.edge for part in Index.path(node, above)])
        return prefix_ids(key, self._unit_bytes, before)[-1] if key else before

    def _leave(self, node: Node) -> None:
        """Remove a node whose checkpoint is gone. If it was evicted in its turn, it is remembered."""
        kept = self._kept
        if node.end in node.lost and not node.mark & GUESS:
            row = kept.row_of[node]
            self._ghosts.put(kept.prefix[row], kept.kind[row], kept.uses[row], kept.time[row], self._now)
        node.mark = 0
        kept.leave(node, self._now)

    def _used(self, node: Node, row: int) -> None:
        """Note that work resumed at the checkpoint: a request's, or that of the prefill of a finished answer."""
        kept, time = self._kept, node.checkpoint_time
        is_request = kept.seen[row] != node.hits & 0xFF
        if is_request:
            kept.seen[row] = kept.seen[row] + 1 & 0xFF
            self._noted += 1
        uses = used(kept.uses[row], is_request)
        kept.use(row, self._kind(node, uses), uses, time, counts=is_request)

    def _kind(self, node: Node, uses: int) -> int:
        """Return the class of a checkpoint."""
        branches = (node.live if node.live < BRANCHES else BRANCHES) - 1
        used = LEARNED * DEPTHS if node.learned and not uses else OF_USES[uses]
        return branches * OF_BRANCH + used + OF_BITS[(node.end * self._unit >> 6).bit_length()]


def used(uses: int, is_request: bool) -> int:
    """Return the number of uses (see `Aging`) after one more, a request's or other work's."""
    return min(MOST_USES, max(2, uses + 1)) if is_request else max(1, uses)


def mark_of(node: Node) -> int:
    """Return what class and worth of a checkpoint are computed from beside times, as one number of 1 to 255.

    Of the number of branches the lowest bits: it changes by one at a time.
    """
    mark = (node.live & 7) << 5 | TAKEN
    if node.children:
        mark |= PARENT
    if node.holds:
        mark |= HELD
    if node.speculative:
        mark |= GUESS
    if is_free_leaf(node):
        mark |= LEAF
    return mark
