"""Count of pages that can be evicted while requests keep theirs, for the decision of a reserve."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headwater.cache.index import Index
from headwater.cache.lease import Lease
from headwater.cache.node import Node
from headwater.cache.segments.store import SegmentStore
from headwater.cache.survey import Survey
from headwater.plan import CacheLayout


@dataclass(frozen=True)
class Evictable:
    """Pages of KV and of checkpoints that may go, in one cache; unpinned segments included."""

    layout: CacheLayout
    index: Index
    segments: SegmentStore
    leases: Mapping[int, Lease]

    def surely(self, survey: Survey) -> tuple[int, int]:
        """Return a fast lower bound of `beside`: as if no two leases had a page in common."""
        named = survey.end
        for lease in self.leases.values():
            end = lease.deep or lease.node
            named += 0 if end is None else end.end
        checkpoints = self.index.checkpoints - len(self.leases) - 1
        kv = max(0, self.index.kv_pages - named * self.index.unit_pages)
        return self._with_segments(kv, max(0, checkpoints))

    def beside(self, survey: Survey, letting_go: Lease | None, keep: Iterable[Node] = ()) -> tuple[int, int]:
        """Return the evictable pages while this leg and all leases keep their pages; one lease releases its checkpoint.

        keep: nodes that stay with their checkpoints, and the KV before them.
        """
        guarded: set[Node] = set()
        held = set(keep)
        for kept_node in held:
            _climb(kept_node, guarded)
        for other in self.leases.values():
            for node in (other.node, other.deep):
                _climb(node, guarded)
            if other.held and other.node is not None and other is not letting_go:
                held.add(other.node)
        if survey.resume is not None:
            held.add(survey.resume)
        kept = 0
        if survey.path:
            last = survey.path[-1]
            if last.end > survey.end and last not in guarded:
                assert last.parent is not None, f"{last} is a root"
                kept = (survey.end - last.parent.end) * self.index.unit_pages
                last = last.parent
            _climb(last, guarded)
        kv = self.index.kv_pages - kept - sum(len(node.pages) for node in guarded)
        return self._with_segments(kv, self.index.checkpoints - sum(node.checkpoint is not None for node in held))

    def _with_segments(self, kv: int, checkpoints: int) -> tuple[int, int]:
        of_segments = self.segments.evictable
        return kv + of_segments[0], checkpoints * self.layout.checkpoint_pages + of_segments[1]


def _climb(node: Node | None, into: set[Node]) -> None:
    """Add `node` and its ancestors."""
    while node is not None and node not in into:
        into.add(node)
        node = node.parent
