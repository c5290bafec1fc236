"""The setup of one row of the lab: model, memory, policies, and hints in the requests of its trace."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from headwater.cache import NoCache, PrefixCache
from headwater.cache.changes import IGNORED, Changes
from headwater.cache.placement import make_placement
from headwater.errors import ConfigError
from headwater.lab.speculation import Law
from headwater.lab.tiers import LATENCY_SECONDS, TierLaw
from headwater.models.profiles import Profile
from headwater.plan import CacheLayout, Draft, Match, Plan, Retention
from headwater.request import PRIORITIES, TIMES_TO_LIVE, SegmentEviction
from headwater.schedule.kinds.segment import Composer
from headwater.schedule.limits import Limits
from headwater.schedule.planner import DecodeReuse, Planner
from headwater.schedule.scheduler import Scheduler
from headwater.setting import OFF, parse_bytes, show_bytes
from headwater.traces.request import Request, Trace

ENDED, HIGH = "ended", "high"
HINTS_SPELLING = "ended, high, 5m, 1h, or several kinds as ended+5m"
SESSIONS_PER_HIGH_PRIORITY = 4


@dataclass(frozen=True, slots=True)
class Hints:
    """Hints of all requests."""

    ended: bool = False  # the last request of each session ends it
    ttl: str | None = None  # time to live of the checkpoint after system prompt and tools
    high: bool = False  # requests of every fourth session have high priority

    @classmethod
    def read(cls, text: str) -> Hints | None:
        """Read off, or hints joined by +. Raises ConfigError for all else."""
        if text == OFF:
            return None
        words = text.split("+")
        ttls = [word for word in words if word in TIMES_TO_LIVE]
        if len(ttls) > 1 or len(set(words)) < len(words) or not {*words} <= {*ttls, ENDED, HIGH}:
            raise ConfigError(f"hints are {text!r}, must be {OFF}, or {HINTS_SPELLING}")
        return cls(ENDED in words, ttls[0] if ttls else None, HIGH in words)

    def __str__(self) -> str:
        kinds = {ENDED: self.ended, HIGH: self.high, self.ttl: self.ttl}
        return "+".join(name for name, given in kinds.items() if name and given)

    def given(self, trace: Trace) -> Trace:
        """Return the trace with the hints in its requests. Retries end no conversation."""
        last = {request.session: number for number, request in enumerate(trace.requests)}
        order = {session: number for number, session in enumerate(last)}
        requests = (
            self._of(request, last[request.session] == number and not request.retry, order[request.session])
            for number, request in enumerate(trace.requests)
        )
        return replace(trace, requests=tuple(requests))

    def _of(self, request: Request, is_last: bool, session: int) -> Request:
        parts = request.boundaries
        if self.ttl is not None and parts.system_end:
            parts = replace(parts, retained=(Retention(parts.system_end, TIMES_TO_LIVE[self.ttl]),))
        priority = PRIORITIES["high"] if self.high and session % SESSIONS_PER_HIGH_PRIORITY == 0 else request.priority
        return replace(request, boundaries=parts, ended=self.ended and is_last, priority=priority)


class LeadingParts(PrefixCache):
    """A cache of the leading parts of prompts: publishes a request's known key and takes no checkpoint beyond it."""

    def reserve(self, draft: Draft, match: Match | None = None) -> Plan:
        known = len(draft.key) // self.layout.unit_bytes * self.layout.unit_tokens
        publish = min(draft.publish, known)
        return super().reserve(replace(draft, publish=publish, saving=draft.saving.until(publish)), match)


PoolKind = Literal["unified", "split", "elastic"]
Reuse = Literal["prefix", "segments", "both"]


@dataclass(frozen=True, slots=True)
class System:
    """Policies of a published system."""

    placement: str
    eviction: str
    page_size: int | None = None  # None: the user's
    tails: bool = False  # whether requests resume in mid-page


# The baselines as Marconi's authors built them (section 5.1), their system, SegLen's, and ours.
SYSTEMS = {
    "vanilla": System("none", "none"),
    "vllm+": System("every_block(1)", "lru_path", 32),
    "sglang+": System("branch", "lru_path"),
    "marconi": System("branch", "marconi"),
    "seglen": System("branch", "seglen"),
    "headwater": System("headwater", "headwater", tails=True),
}
NO_CACHE = "none"  # instead of an eviction policy: no cache


NETWORK = re.compile(r"([\d.]+\w+)/s(?:@([\d.]+)ms)?")
NETWORK_SPELLING = "BANDWIDTH/s, or BANDWIDTH/s@LATENCY, like 12.5GB/s@1ms"

FAILURES = re.compile(r"(\d+(?:\.\d+)?)s(?:/(\d+(?:\.\d+)?)s)?")
FAILURES_SPELLING = "EVERY, or EVERY/ABSENT, like 600s/30s"
ABSENT_SECONDS = 17.0  # until another worker serves after a failure: 16 to 17 with Ray (docs/cluster.md)


@dataclass(frozen=True, slots=True)
class Network:
    """Links of workers, each of which receives one prefix at a time, and sends one at a time."""

    bandwidth: int  # bytes a second
    latency: float = LATENCY_SECONDS  # of a pull, in addition to its bytes

    @classmethod
    def read(cls, text: str) -> Network | None:
        """Read off or NETWORK_SPELLING. Raises ConfigError for all else."""
        if text == OFF:
            return None
        found = NETWORK.fullmatch(text)
        if found is None or not parse_bytes(found[1]):
            raise ConfigError(f"pulls are {text!r}, must be off or {NETWORK_SPELLING}, and more than 0")
        return cls(parse_bytes(found[1]), LATENCY_SECONDS if found[2] is None else float(found[2]) / 1e3)

    def __str__(self) -> str:
        latency = "" if self.latency == LATENCY_SECONDS else f"@{1e3 * self.latency:g}ms"
        return f"{show_bytes(self.bandwidth)}/s{latency}"


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures of workers, each after an exponentially distributed time, and their replacement."""

    every: float  # seconds on average until a worker fails
    absent: float = ABSENT_SECONDS  # seconds until another one serves

    @classmethod
    def read(cls, text: str) -> Failures | None:
        """Read off or FAILURES_SPELLING. Raises ConfigError for all else."""
        if text == OFF:
            return None
        found = FAILURES.fullmatch(text)
        if found is None or not float(found[1]):
            raise ConfigError(f"failures are {text!r}, must be off or {FAILURES_SPELLING}, EVERY more than 0")
        return cls(float(found[1]), ABSENT_SECONDS if found[2] is None else float(found[2]))

    def __str__(self) -> str:
        return f"{self.every:g}s" + ("" if self.absent == ABSENT_SECONDS else f"/{self.absent:g}s")


@dataclass(frozen=True, slots=True)
class Cluster:
    """Simulated workers behind a router."""

    workers: int
    router: str  # rule, as it is spelled on the command line
    event_delay: float = 0.0  # seconds until the router knows of a change of a cache
    network: Network | None = None  # over which workers pull prefixes; None: they do not
    prefill: int = 0  # number of workers that only prefill
    failures: Failures | None = None  # None: no worker fails


@dataclass(frozen=True, slots=True)
class Setup:
    """Model, memory and policies of one row. Bytes, tokens."""

    profile: Profile
    memory: int
    placement: str = "headwater"
    eviction: str = "lru"
    pool: PoolKind = "unified"
    state_fraction: float = 0.5  # of a split or elastic pool
    page_size: int = 64
    slots: int = 1  # states that a running request takes
    decode_reuse: DecodeReuse = "canonical"
    reuse: Reuse = "both"  # content that prompts made of segments reuse
    segment_share: float = 0.5  # of the memory, up to which segments grow at the expense of prefixes
    segment_eviction: SegmentEviction = SegmentEviction.COST
    speculation: Law | None = None
    tier: TierLaw | None = None
    hints: Hints | None = None  # of requests
    running: int = 1  # concurrent requests, whose drafts take memory
    tails: bool = True  # requests resume in mid-page, if the recording has token ids and the pool is unified
    cluster: Cluster | None = None  # its workers have `memory` each

    def layout(self, trace: Trace) -> CacheLayout:
        """Return the memory's layout. Raises ConfigError if it is too small, or page and block do not fit."""
        of_drafts = 0 if self.speculation is None else self.speculation.bytes(self.profile, self.running)
        if of_drafts >= self.memory:
            raise ConfigError(
                f"memory is {self.memory:,} bytes, drafts of {self.running:,} requests take {of_drafts:,}"
            )
        page = self.profile.bytes_of_page(self.page_size)
        per_page = 0 if self.speculation is None else self.speculation.bytes_per_page(self.profile, self.page_size)
        return self.profile.layout(
            (self.memory - of_drafts) * page // (page + per_page),
            self.page_size,
            block_tokens=trace.block_tokens,
            state_fraction=None if self.pool == "unified" else self.state_fraction,
            elastic=self.pool == "elastic",
            slots=self.slots + (0 if self.speculation is None else self.speculation.states - 1),
            tails=self.tails and trace.has_token_ids,
        )

    def cache(
        self, layout: CacheLayout, changes: Changes = IGNORED, clock: Callable[[], float] | None = None
    ) -> PrefixCache:
        """Return an empty cache, whose changes are reported to `changes` and whose retentions end by `clock`."""
        if self.eviction == NO_CACHE:
            return NoCache(layout)
        kind = LeadingParts if self.reuse == "segments" else PrefixCache
        share, eviction = self.segment_share, self.segment_eviction
        return kind(layout, self.eviction, None, share, eviction, changes, clock)

    def planner(self, cache: PrefixCache) -> Planner:
        placement = make_placement("none" if self.eviction == NO_CACHE else self.placement)
        return Planner(cache, placement, self.keeps_answers)

    def scheduler(self, cache: PrefixCache, limits: Limits) -> Scheduler:
        """Return the server's scheduler. It composes segments if there is a cache, `reuse` and the model permit."""
        off, composes = self.eviction == NO_CACHE, self.composes
        return Scheduler(
            cache,
            make_placement("none" if off else self.placement),
            limits,
            "none" if off else self.decode_reuse,
            composer=Composer(cache, self.profile.state.conv_taps) if composes else None,
            speculation=None if self.speculation is None else self.speculation.speculation(),
        )

    @property
    def composes(self) -> bool:
        """True if prompts are composed of stored segments."""
        return self.profile.composes and self.eviction != NO_CACHE and self.reuse != "prefix"

    @property
    def keeps_answers(self) -> bool:
        return self.decode_reuse != "none" and self.eviction != NO_CACHE


def as_reused(request: Request, reuse: Reuse) -> Request:
    """Return the request limited to the content that is reused: prefixes, or segments and the part before the first."""
    if not request.segments or reuse == "both":
        return request
    if reuse == "prefix":
        return replace(request, segments=())
    return replace(request, known_tokens=request.segments[0].start)


def system(name: str) -> System:
    """Return the system with this name. Raises ConfigError if it is unknown."""
    if name not in SYSTEMS:
        raise ConfigError(f"system {name!r} is unknown, must be one of {', '.join(SYSTEMS)}")
    return SYSTEMS[name]
