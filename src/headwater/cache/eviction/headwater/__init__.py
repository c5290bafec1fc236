"""The default eviction policy. Its algorithm:

1. A leaf of KV without a checkpoint is evicted first, the least recently used one before others.
2. Then the checkpoint with the lowest score: worth x index of reuse. A speculative one has the score 0.
3. Worth: FLOPs saved over the nearest checkpoint above, divided by the pages that are freed (`base/worth.py`).
4. Checkpoints are counted in classes: by branches below, uses and depth (`rates.py`). Tails have their own.
5. The rate of reuse of a class at an age is uses divided by time in memory; before any count it is a prior.
6. The index of reuse is the highest rate until any later age at which the checkpoint could be evicted (`rates.py`).
7. An evicted checkpoint leaves a ghost entry. A request that could have resumed there is a use of it (`ghosts.py`).
8. The index is computed again when 1/16 of the checkpoints were taken or used; then the lowest scores are ranked.
9. Ranked checkpoints are evicted in that order, unless their score changed (`order.py`).
10. A client's hints choose among the checkpoints of its own namespace only.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from headwater.cache.eviction.base.lazy_heap import bare_leaves
from headwater.cache.eviction.base.policy import Eviction, Kind, Room, Victim
from headwater.cache.eviction.base.rows import MAX_SLICE_ROWS
from headwater.cache.eviction.base.worth import Worth, next_below
from headwater.cache.eviction.headwater.ghosts import Ghosts, prefix_ids
from headwater.cache.eviction.headwater.order import Candidates
from headwater.cache.eviction.headwater.rates import (
    BRANCHES_MARK,
    CLASSES_A_BRANCH,
    DEPTH_CLASSES,
    LEAF,
    MAX_USES,
    MIDDLES,
    PRIOR_USES,
    PRIOR_USES_OF_TAILS,
    SPECULATIVE,
    ReuseRates,
    class_of,
    class_of_ghost,
    class_of_leaf,
    class_of_tail,
    mark_of,
    used,
)
from headwater.cache.node import Node, Root
from headwater.plan import CacheLayout, Draft

MIN_NOTED, NOTED_FRACTION = 64, 16  # rates are renewed when 64 checkpoints, and 1/16 of all, were taken or used
GHOSTS_A_CHECKPOINT = 8  # ghost entries for each checkpoint in memory


class Headwater(Eviction):
    """The algorithm above. A client's priorities evict the lowest score x weight of its namespace.

    A use is a request that resumed there, or would have, had the checkpoint not been evicted (`begun`). Other work, as
    the prefill of a finished answer, is not a use: it resumes at the end of its own prompt, and a checkpoint that
    nothing else used has a class between no and one use. Before anything is known the rate is n x place / (8 x age):
    n = 1 for no use, 2 for one or other work, 3 for more, and 4 for an unused checkpoint at a learned position. Place:
    a session resumes at its deepest checkpoint, so one with another below it counts 1/`superseded`, one with several
    branches `branch`. Without checkpoints, when work can resume at every page, the policy is LRU of leaves.

    Instead of a checkpoint that a client has retained the lowest other one of its namespace is evicted. Retentions of a
    namespace take at most the share `retained` of all pages, with their KV; those that lapse first are dropped.
    """

    def __init__(
        self, layout: CacheLayout, superseded: float = 8.0, branch: float = 2.0, retained: float = 0.25
    ) -> None:
        if superseded <= 0 or branch <= 0:
            raise ValueError(f"superseded is {superseded} and branch {branch}; both must be above 0")
        if not 0 <= retained <= 1:
            raise ValueError(f"retained is {retained}, must be a share of the memory: 0 to 1")
        self.keeps_history = not layout.is_stateless
        self._layout, self._bare = layout, bare_leaves()
        self._unit_bytes, self._unit_tokens = layout.unit_bytes, layout.unit_tokens
        prior_uses = np.append(np.outer([1.0, 1 / superseded, branch], PRIOR_USES), PRIOR_USES_OF_TAILS)
        prior = prior_uses.reshape(-1, 1) / (8 * MIDDLES)
        self.rates = ReuseRates(prior, group=DEPTH_CLASSES)
        self.candidates, self.ghosts = Candidates(self.rates, Worth(layout)), Ghosts(self.rates)
        self._max_retained_pages = int(retained * layout.n_pages)
        # noted: checkpoints taken or used since the last renewal; all ghost entries that a request uses count as one
        self._now = self._noted = 0
        self._due = MIN_NOTED  # `_noted` at which the next renewal begins
        self._hashed = b"", 0, [0]  # of the prompt that began last: key beyond its checkpoint, start, ids of prefixes
        self._work: Iterator[int] | None = None  # a renewal of rates or ranking that is not done yet
        self._worked_at, self._rows_left = 0, MAX_SLICE_ROWS  # rows that this work may handle in the current tick

    def victim(self, room: Room, now: int) -> Victim | None:
        if room is not Room.STATE and (bare := self._bare.lowest()) is not None:
            return bare, Kind.TAIL
        self.candidates.settle(self._now)
        node = self.candidates.lowest(now, room is Room.KV, self.clock)
        return None if node is None else (node, Kind.CHECKPOINT)

    def reuse_rate(self, node: Node, now: int) -> float:
        row = self.candidates.row_of.get(node)
        if row is None:
            return super().reuse_rate(node, now)
        return 0.0 if node.speculative else self.rates.at(self.candidates.kind[row], now - self.candidates.time[row])

    def tail_rate(self, position: int, uses: int, age: int) -> float:
        if self._layout.is_stateless:
            return super().tail_rate(position, uses, age)
        leaf = class_of_leaf(position, min(MAX_USES, uses and 1 + uses))
        return min(self.rates.at(class_of_tail(position, uses), age), self.rates.at(leaf, age))

    def tail_watched(self, position: int, uses: int, age: int, used: float) -> None:
        kind = class_of_tail(position, uses)
        self.rates.watched(kind, 0, age)
        self.rates.reused(kind, age, used)

    # ---- changes of nodes

    def changed(self, node: Node) -> None:
        """Note a change of a node. If it was used, too, `touched` follows."""
        before = node.mark
        if node.checkpoint is not None:
            mark = mark_of(node)
            if mark != before or mark & LEAF:  # a leaf may have got or lost KV that serves no other prefix
                self._keep(node, mark)
                if not before:
                    self._toggled(node)
            return
        if self._now < node.kv_time or self._now < node.checkpoint_time:
            self._advance(node)
        below = len(node.children)
        if not below and not node.pins and node.parent is not None:
            self._bare.add(node)
        shares = below == 1 or below == 2  # its KV may serve a single leaf now, or no longer
        if shares:
            self._toggled(node)
        if before:
            self._leave(node)
            if not shares:
                self._toggled(node)

    def touched(self, node: Node) -> None:
        if self._now < node.kv_time or self._now < node.checkpoint_time:
            self._advance(node)
        if node.checkpoint is not None:
            candidates = self.candidates
            if not node.mark or candidates.time[candidates.row_of[node]] != node.checkpoint_time:
                self._keep(node, mark_of(node))

    def _toggled(self, node: Node) -> None:
        """Note that the node got or lost its checkpoint, or that its KV serves a single leaf now, or no longer."""
        for below in next_below(node):
            mark = below.mark
            if mark & SPECULATIVE or not mark or self._noted >= self._due or self._work is not None:
                self._keep(below, mark_of(below))
            else:
                self.candidates.changed.add(below)
        above = node.parent
        while above is not None and above.checkpoint is None:
            above = above.parent
        if above is not None and (mark := mark_of(above)) != above.mark:
            self._keep(above, mark)

    def _advance(self, node: Node) -> None:
        """Continue with the time of a node, which is later."""
        self.candidates.settle(self._now)
        self._now = max(node.kv_time, node.checkpoint_time)

    def _keep(self, node: Node, mark: int) -> None:
        """Note a checkpoint that is new, was used or changed. Its score is computed later."""
        if self._now < node.kv_time or self._now < node.checkpoint_time:
            self._advance(node)
        candidates, before = self.candidates, node.mark
        if not before:
            self._take(node)
        else:
            row = candidates.row_of[node]
            if candidates.time[row] != node.checkpoint_time:
                self._use(node, row)
            elif (mark ^ before) & BRANCHES_MARK:
                kind = class_of(node, candidates.uses[row], self._unit_tokens)
                if kind != candidates.kind[row]:
                    candidates.change(row, kind, self._now)
        if mark & SPECULATIVE:
            candidates.release(candidates.row_of[node])  # not expected to be used again
        node.mark = mark
        candidates.changed.add(node)
        if self._noted >= self._due or self._work is not None:
            self._renew_if_due()

    def _take(self, node: Node) -> None:
        """Add a checkpoint that is new."""
        self._noted += 1
        prefix = self._prefix_of(node)
        uses = min(MAX_USES, node.hits and 1 + node.hits)  # of a snapshot
        if not node.speculative:  # a speculative one is evicted first, and leaves no ghost entry
            uses = max(uses, self.ghosts.take(prefix, self._now))
        self._due = max(MIN_NOTED, (len(self.candidates.keys) + 1) // NOTED_FRACTION)
        self.candidates.take(node, prefix, class_of(node, uses, self._unit_tokens), uses)

    def _use(self, node: Node, row: int) -> None:
        """Note that work resumed at the checkpoint: a request's, or that of the prefill of a finished answer."""
        candidates = self.candidates
        is_request = candidates.seen[row] != node.hits & 0xFF
        if is_request:
            candidates.seen[row] = candidates.seen[row] + 1 & 0xFF
            self._noted += 1
        uses = used(candidates.uses[row], is_request)
        kind = class_of(node, uses, self._unit_tokens)
        candidates.use(row, kind, uses, node.checkpoint_time, counts=is_request)

    def _leave(self, node: Node) -> None:
        """Remove a node whose checkpoint is gone. If the policy chose it, it leaves a ghost entry."""
        candidates = self.candidates
        if node.end in node.lost and not node.mark & SPECULATIVE:
            row, of = candidates.row_of[node], candidates
            self.ghosts.put(of.prefix[row], of.kind[row], of.uses[row], of.time[row], self._now)
        node.mark = 0
        candidates.leave(node, self._now)
        self._due = max(MIN_NOTED, len(candidates.keys) // NOTED_FRACTION)
        if candidates.is_used_up(self._now):
            self._rank_again()

    def _prefix_of(self, node: Node) -> int:
        """Return the id of the prefix that ends at the node, from that of the nearest checkpoint at or above it.

        What the prompt that began last has in common with the node is not hashed again.
        """
        candidates, above, edges = self.candidates, node, list[bytes]()
        while not above.mark and above.parent is not None:
            edges.append(above.edge)
            above = above.parent
        if above.mark:
            before: int = candidates.prefix[candidates.row_of[above]]
        else:
            assert isinstance(above, Root), f"{node} is not in the tree"
            before = hash(above.namespace)
        if not edges:
            return before
        key = edges[0] if len(edges) == 1 else b"".join(reversed(edges))
        prompt, start, ids = self._hashed
        at, end = above.end - start, node.end - start
        if at >= 0 and end < len(ids) and ids[at - 1] == before and prompt.startswith(key, at * self._unit_bytes):
            return ids[end - 1]
        return prefix_ids(key, self._unit_bytes, before)[-1]

    def begun(self, draft: Draft, node: Node, now: int) -> None:
        """Count a use of each evicted checkpoint of the prompt, beyond the one where it resumes.

        If none had been evicted, each above the deepest would have a checkpoint below it: one without branches moves to
        the class of one branch. One of that class is used only if it is the deepest, one of several each time.
        """
        ghosts = self.ghosts
        if not ghosts.keys:
            return
        width, unit = self._unit_bytes, self._unit_tokens
        end = (max(draft.end, len(draft.key) * unit // width) - 1) // unit  # one token must be computed
        key, before = draft.key[node.end * width : end * width], self._prefix_of(node)
        ids = prefix_ids(key, width, before)
        rows = ghosts.found(ids)
        self._hashed = key, node.end, [*ids, before]
        for row in rows:
            kind, is_deepest = ghosts.kind[row], row == rows[0]
            if is_deepest or kind // CLASSES_A_BRANCH != 1:
                uses = used(ghosts.uses[row], draft.sharing.counts)
                ghosts.use(row, class_of_ghost(kind, uses, is_deepest), uses, now, counts=draft.sharing.counts)
        if rows:
            self._noted += draft.sharing.counts
            self._renew_if_due()

    # ---- renewal

    def _renew_if_due(self) -> None:
        """Begin to renew rates and ranking once enough checkpoints were taken and used; else continue."""
        if self._work is None and self._noted >= self._due:
            self._noted, self._work = 0, self._renewal()
        self._continue()

    def _renewal(self) -> Iterator[int]:
        """Renew the rates by the time until now, and the ranking by the rates; yield the rows handled."""
        yield from self.ghosts.renew(GHOSTS_A_CHECKPOINT * len(self.candidates), self._now)
        yield from self.candidates.watch_all(self._now)
        self.rates.renew()
        yield from self.candidates.rank_all(self._now)

    def _rank_again(self) -> None:
        """Rank the candidates when those that were ranked are used up, or nearly so in a large table."""
        if self._work is None:
            self._work = self.candidates.rank_all(self._now)
        self._continue(at_once=not self.candidates.ranking.ranked)

    def _continue(self, at_once: bool = False) -> None:
        """Continue the work, in each tick for as many rows as numpy handles at once: no request waits for all."""
        if self._worked_at != self._now:
            self._worked_at, self._rows_left = self._now, MAX_SLICE_ROWS
        self.candidates.settle(self._now)
        while at_once or self._rows_left > 0:
            rows = None if self._work is None else next(self._work, None)
            if rows is None:
                self._work = None
                return
            self._rows_left -= rows

    # ---- hints

    def retain(self, node: Node, seconds: float) -> None:
        if self._pages([node]) > self._max_retained_pages:
            return
        now, candidates = self.clock(), self.candidates
        candidates.retain(node, now + seconds)
        retained = candidates.retained(node, now)
        while self._pages(retained) > self._max_retained_pages:
            candidates.release(candidates.row_of[retained.pop(0)])

    def prefer(self, node: Node, priority: int, is_new: bool) -> None:
        self.candidates.prefer(node, priority, is_new)

    def _pages(self, nodes: list[Node]) -> int:
        """Return the pages that these checkpoints keep in memory: their own, and the KV before them."""
        path = {part for node in nodes for part in node.climb()}
        return len(nodes) * self._layout.checkpoint_pages + sum(len(part.pages) for part in path)
