"""The account of one request: what the cache did for it, and why it resumed where it did. Positions are in tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why a request resumed where it did and not deeper. A closed list."""

    FULL = "full"  # everything but the last page was cached: not a miss
    COLD = "cold"  # nothing in this namespace begins like this prompt
    OTHER_NAMESPACE = "other_namespace"  # this namespace is empty, and others are not
    DIVERGED = "diverged"  # resumed at the page where the prompt leaves what is cached
    NO_CHECKPOINT = "no_checkpoint"  # KV is cached deeper, but no state was kept there
    EVICTED = "evicted"  # what would have matched deeper was given up for memory
    TOO_SHORT = "too_short"  # the prompt has no full page before its last token
    NO_MEMORY = "no_memory"  # a match was there, but could not be held beside the request
    CACHE_OFF = "cache_off"  # the server runs without a cache
    PROMPT_LOGPROBS = "prompt_logprobs"  # those of the prompt's tokens were asked for, so each was computed


@dataclass(frozen=True, slots=True)
class CacheAccount:
    """What the cache did for one request; goes out with its response and into the log."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens that were not computed, neither here nor in segments made for this
    resumed_at: int  # position at which prefill began
    stranded_tokens: int
    reason: Reason
    waited_for_leader: bool = False  # another request was computing the same prefix
    preemptions: int = 0
    segments: int = 0  # stored ones that the prompt was composed of
    composed_tokens: int = 0  # their interiors
    cold_tokens: int = 0  # of `composed_tokens`: of cold segments, made for this request; all others are cached ones
    recomputed_tokens: int = 0  # of the prompt's segments, what was computed all the same: seams, and those not reused
    approximate_tokens: int = 0  # of `cached_tokens`: prefixes that were themselves composed

    def as_dict(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "resumed_at": self.resumed_at,
            "stranded_tokens": self.stranded_tokens,
            "reason": str(self.reason),
            "waited_for_leader": self.waited_for_leader,
            "preemptions": self.preemptions,
            "segments": self.segments,
            "composed_tokens": self.composed_tokens,
            "cold_tokens": self.cold_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "approximate_tokens": self.approximate_tokens,
        }
