"""What the cache holds and has done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Pages by owner add up to `pages_total`. Counters run from the cache's creation."""

    pages_total: int
    pages_free: int
    pages_kv: int  # KV that the index holds
    pages_checkpoint: int  # checkpoints that the index holds
    pages_private: int  # KV that is a request's own, and checkpoints of open plans
    pages_slot: int  # what backs the slots of running requests
    pages_segment: int  # stored segments, and such as are being made
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
    resumes: int  # requests that began at a checkpoint (or a page, where every page will do)
    resumed_tokens: int  # that those did not compute
    evicted_checkpoints: int
    evicted_speculative: int  # of them
    evicted_kv_pages: int
    segments: int
    segment_uses: int  # how often a request was composed of one
    evicted_segments: int

    def pages_by_use(self) -> dict[str, int]:
        """They add up to `pages_total`."""
        return {
            "kv": self.pages_kv,
            "checkpoint": self.pages_checkpoint,
            "private": self.pages_private,
            "slot": self.pages_slot,
            "segment": self.pages_segment,
            "free": self.pages_free,
        }

    def evictions_by_kind(self) -> dict[str, int]:
        """Checkpoints, speculative ones apart, and pages of KV."""
        return {
            "checkpoint": self.evicted_checkpoints - self.evicted_speculative,
            "speculative_checkpoint": self.evicted_speculative,
            "kv_page": self.evicted_kv_pages,
            "segment": self.evicted_segments,
        }

    def saved_by_kind(self) -> dict[str, int]:
        return {
            "checkpoint": self.saved_checkpoints - self.saved_speculative,
            "speculative_checkpoint": self.saved_speculative,
        }
