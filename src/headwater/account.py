"""Account of one request: tokens saved by the cache, resume position, and miss reason. Positions are in tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Reason why a request did not resume deeper. A closed list."""

    FULL = "full"  # everything but the last page was cached: not a miss
    COLD = "cold"  # no cached prefix in this namespace begins like this prompt
    OTHER_NAMESPACE = "other_namespace"  # this namespace is empty, and others are not
    DIVERGED = "diverged"  # resumed at the page where the prompt leaves the cached prefix
    NO_CHECKPOINT = "no_checkpoint"  # KV is cached deeper, but no state was kept there
    EVICTED = "evicted"  # a deeper match was evicted for memory
    TOO_SHORT = "too_short"  # the prompt has no full page before its last token
    NO_MEMORY = "no_memory"  # a match existed, but memory could not hold it together with the request
    CACHE_OFF = "cache_off"  # the server runs without a cache
    PROMPT_LOGPROBS = "prompt_logprobs"  # requested for the prompt's tokens, so each was computed


REMEDIES = {  # docs/trouble.md has more of each
    Reason.FULL: "nothing: it is not a miss",
    Reason.COLD: "expected for a new prefix; otherwise move what changes (a date, an id) to the prompt's end",
    Reason.OTHER_NAMESPACE: "expected for a tenant's first request; otherwise keep its cache_salt",
    Reason.DIVERGED: "expected; if too early, diverged_in names the message: a template may rewrite turns",
    Reason.NO_CHECKPOINT: "the next one hits; otherwise mark the boundary (cache_control), or try another --placement",
    Reason.EVICTED: "more --memory, lower --max-running, or another --eviction",
    Reason.TOO_SHORT: "nothing: less than a page could be saved",
    Reason.NO_MEMORY: "more --memory, or shorter requests",
    Reason.CACHE_OFF: "start the server without --no-cache",
    Reason.PROMPT_LOGPROBS: "leave out echo or logprobs, unless the prompt is to be scored",
}


class TierOutcome(StrEnum):
    """Outcome of a request's lookup in tiers. A closed list."""

    LOADED = "loaded"
    MISS = "tier_miss"  # no tier has a state deeper than memory's, with all KV below it, or a missing segment
    OTHER_FINGERPRINT = "other_fingerprint"  # tier_miss, and a server with another one stored a deeper state
    COMPUTING_IS_FASTER = "computing_is_faster"
    SLOW = "tier_slow"  # an answer or a load took too long, and the request computed
    CORRUPT = "tier_corrupt"  # a part differs from the stored one
    FAILED = "tier_failed"  # a store could not be read, or a part was evicted meanwhile
    NO_MEMORY = "no_memory"


@dataclass(frozen=True, slots=True)
class CacheAccount:
    """Account of one request, sent with its response and written to the log."""

    prompt_tokens: int
    cached_tokens: int  # not computed, neither in the request nor in segments built for it
    resumed_at: int  # position at which prefill began
    stranded_tokens: int
    reason: Reason
    waited_for_leader: bool = False  # another request was computing the same prefix
    preemptions: int = 0
    segments: int = 0  # number of stored segments in the composed prompt
    composed_tokens: int = 0  # tokens of their interiors
    cold_tokens: int = 0  # the part of `composed_tokens` in cold segments, built for this request
    recomputed_tokens: int = 0  # seams, and segments of the prompt that were not reused
    approximate_tokens: int = 0  # the part of `cached_tokens` in composed prefixes
    loaded_tokens: int = 0  # the part of `cached_tokens` read from a tier, for this request or one it waited for
    loaded_segments: int = 0  # the part of `segments` that was read likewise
    loaded_from: str | None = None  # tiers: disk, redis
    load_seconds: float = 0.0
    tier_outcome: TierOutcome | None = None  # None: the server has no tiers, or memory had all
    prefilled_by: str | None = None  # worker of a cluster that computed only the first token
    segments_apart: int = 0  # of a composed prompt, those that other workers of a cluster computed for this request
    diverged_in: int | None = None  # with reason `diverged`, the client's message in which the page resumed at begins
    handed_over_tokens: int = 0  # of the prompt, that the one that decoded loaded, in part at least from a worker

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "reason": str(self.reason)}
