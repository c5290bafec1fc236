"""Statistics of a cache: its pages by owner, and counters of what it has done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Pages by owner add up to `pages_total`. Counters run from the cache's creation."""

    pages_total: int
    pages_free: int
    pages_kv: int  # KV that the index holds
    pages_checkpoint: int  # checkpoints that the index holds
    pages_private: int  # KV of one request only, and checkpoints of open plans
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
    saved_speculative: int  # of them
    resumes: int  # requests that began at a checkpoint (or at a page, for a model without recurrent layers)
    resumed_tokens: int  # tokens that these requests did not compute
    evicted_checkpoints: int
    evicted_speculative: int  # of them
    evicted_kv_pages: int
    segments: int
    segment_uses: int  # uses of a segment by a request
    evicted_segments: int

    def pages_by_use(self) -> dict[str, int]:
        """Return the pages by use; they add up to `pages_total`."""
        return {
            "kv": self.pages_kv,
            "checkpoint": self.pages_checkpoint,
            "private": self.pages_private,
            "slot": self.pages_slot,
            "segment": self.pages_segment,
            "free": self.pages_free,
        }

    def evictions_by_kind(self) -> dict[str, int]:
        """Return the evictions of checkpoints (speculative ones apart), pages of KV and segments."""
        return {
            "checkpoint": self.evicted_checkpoints - self.evicted_speculative,
            "speculative_checkpoint": self.evicted_speculative,
            "kv_page": self.evicted_kv_pages,
            "segment": self.evicted_segments,
        }

    def saved_by_kind(self) -> dict[str, int]:
        """Return the checkpoints that were saved, speculative ones apart."""
        return {
            "checkpoint": self.saved_checkpoints - self.saved_speculative,
            "speculative_checkpoint": self.saved_speculative,
        }
