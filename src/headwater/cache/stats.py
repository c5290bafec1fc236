"""Statistics of a cache: pages by owner, and counts of operations, evictions and segments."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass

from headwater.cache.evictor import Evictor
from headwater.cache.index import Index
from headwater.cache.lease import Lease, OpenPlan
from headwater.cache.pool import Pool
from headwater.cache.segments.store import SegmentStore
from headwater.cache.tails import Tails
from headwater.plan import CacheLayout

USES = ("kv", "checkpoint", "tail", "private", "slot", "segment", "free")


@dataclass(slots=True)
class Operations:
    """Counts of a cache's operations since its creation."""

    reserves: int = 0
    commits: int = 0
    abandons: int = 0
    resumes: int = 0  # requests that began at a checkpoint (or at a page, for a model without recurrent layers)
    resumed_tokens: int = 0  # tokens that these requests did not compute


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Pages by owner add up to `pages_total`. Counters run from the cache's creation."""

    pages_total: int
    pages_free: int
    pages_kv: int  # KV that the index holds
    pages_checkpoint: int  # checkpoints that the index holds
    pages_tail: int  # tails that the index holds
    pages_private: int  # KV of one request only, and checkpoints and tails of open plans
    pages_slot: int  # pages behind the slots of running requests
    pages_segment: int  # segments, stored and being built
    dead_kv_tokens: int  # KV that no checkpoint at or below it can use
    checkpoints: int
    nodes: int
    namespaces: int
    leases: int
    open_plans: int
    reserves: int
    commits: int
    abandons: int
    saved_checkpoints: int
    saved_speculative: int  # speculative ones of these
    resumes: int  # requests that began at a checkpoint (or at a page, for a model without recurrent layers)
    resumed_tokens: int  # tokens that these requests did not compute
    evicted_checkpoints: int
    evicted_speculative: int  # speculative ones of these
    evicted_unused: int  # those at which no request had resumed
    evicted_kv_pages: int
    tails: int
    saved_tails: int
    evicted_tails: int
    tail_uses: int  # legs that started in mid-page
    segments: int
    segment_uses: int  # uses of a segment by a request
    evicted_segments: int
    tick: int  # of the cache: a logical clock

    def pages_by_use(self) -> dict[str, int]:
        """Return the pages by use; they add up to `pages_total`."""
        return {use: getattr(self, f"pages_{use}") for use in USES}

    def evictions_by_kind(self) -> dict[str, int]:
        """Return the evictions of checkpoints (speculative ones apart), pages of KV and segments."""
        return {
            "checkpoint": self.evicted_checkpoints - self.evicted_speculative,
            "speculative_checkpoint": self.evicted_speculative,
            "kv_page": self.evicted_kv_pages,
            "tail": self.evicted_tails,
            "segment": self.evicted_segments,
        }

    def saved_by_kind(self) -> dict[str, int]:
        """Return the checkpoints that were saved, speculative ones apart."""
        return {
            "checkpoint": self.saved_checkpoints - self.saved_speculative,
            "speculative_checkpoint": self.saved_speculative,
            "tail": self.saved_tails,
        }


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of a cache that hold pages and count evictions."""

    layout: CacheLayout
    index: Index
    pool: Pool
    evictor: Evictor
    segments: SegmentStore
    tails: Tails

    def count(
        self, leases: Collection[Lease], plans: Collection[OpenPlan], operations: Operations, tick: int
    ) -> CacheStats:
        """Return the statistics. All counts but those of the few leases are kept incrementally."""
        layout, index, evictor, segments = self.layout, self.index, self.evictor, self.segments
        saves = sum(len(opened.saves) for opened in plans) * layout.checkpoint_pages
        saves += sum(len(tail.kv) + len(tail.rows) for opened in plans for tail in opened.tails)
        dead_units = 0 if layout.every_page or not index.unit_pages else index.dead_pages // index.unit_pages
        return CacheStats(
            pages_total=self.pool.size,
            pages_free=self.pool.free,
            pages_kv=index.kv_pages,
            pages_checkpoint=index.checkpoints * layout.checkpoint_pages,
            pages_tail=self.tails.pages,
            pages_private=sum(lease.n_private for lease in leases) + saves,
            pages_slot=sum(len(lease.slot) for lease in leases) + sum(len(s.lent) for s in segments),
            pages_segment=segments.pages,
            dead_kv_tokens=dead_units * layout.unit_tokens,
            checkpoints=index.checkpoints,
            nodes=index.nodes,
            namespaces=len(index.roots),
            leases=len(leases),
            open_plans=len(plans),
            **asdict(operations),
            saved_checkpoints=index.saved,
            saved_speculative=index.saved_speculative,
            evicted_checkpoints=evictor.checkpoints,
            evicted_speculative=evictor.speculative,
            evicted_unused=evictor.reuse[0],
            evicted_kv_pages=evictor.kv_pages,
            tails=len(self.tails),
            saved_tails=self.tails.saved,
            evicted_tails=self.tails.evicted,
            tail_uses=self.tails.uses,
            segments=len(segments),
            segment_uses=segments.uses,
            evicted_segments=segments.evicted,
            tick=tick,
        )
