"""Loads: prefixes that are read from tiers, and what reads them. Positions in tokens."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from headwater.account import TierOutcome
from headwater.cache.prefix_cache import PrefixCache
from headwater.errors import PlanClosed
from headwater.plan import Plan
from headwater.tiers.names import RUN
from headwater.tiers.store import PEER


@dataclass(frozen=True, slots=True)
class TailPlace:
    """Tail of a prompt: the position of its checkpoint, its end, and whether the hidden row after it is there."""

    start: int
    end: int
    has_hidden: bool

    def usable_end(self, prompt_tokens: int) -> int:
        """Return where a prompt resumes with it. Without the hidden row the prompt's last token is computed."""
        return self.end if self.has_hidden else min(self.end, prompt_tokens - 1)


@dataclass(frozen=True, slots=True)
class Offer:
    """Parts that one tier holds of a prompt. Positions in tokens."""

    tier: int  # number of the tier, the fastest first
    states: frozenset[int] = frozenset()  # positions
    runs: frozenset[tuple[int, int]] = frozenset()  # of KV: start, end
    tails: frozenset[TailPlace] = frozenset()
    other_fingerprint: bool = False  # no states, but there are some under another fingerprint


@dataclass(frozen=True, slots=True)
class Source:
    """A part to be read: where it begins and ends, the tier that has it, and its kind."""

    start: int
    end: int
    tier: int
    kind: str = RUN  # STATE, RUN or TAIL


@dataclass(frozen=True, slots=True)
class Candidate:
    """Parts in tiers that let a prompt resume at a position."""

    at: int  # of its checkpoint
    end: int  # the position
    sources: tuple[Source, ...]
    has_hidden: bool = False  # the hidden row after its tail is there


@dataclass(eq=False, slots=True)
class OpenLoad:
    """A load in progress: readers fill the pages of its plan."""

    id: int
    plan: Plan
    expected: float  # seconds
    given_up: bool = field(default=False, kw_only=True)  # parts that are not being read yet are not read
    failed: TierOutcome | None = field(default=None, kw_only=True)
    seconds: float = field(default=0.0, kw_only=True)  # that it took
    tiers: str = field(default="", kw_only=True)  # kinds of the tiers that were read

    def close(self, cache: PrefixCache) -> None:
        """Publish what was read, or give its pages back if it failed."""
        try:
            if self.failed is None:
                cache.commit(self.plan)
        finally:
            with suppress(PlanClosed):  # it was committed
                cache.abandon(self.plan)
            cache.release(self.id)


@dataclass(eq=False, slots=True)
class Load(OpenLoad):
    """Load of a prefix, which fills its plan's pages from `write_from` on, and the pages of the state and the tail."""

    namespace: str
    key: bytes  # of the prefix, and of its tail
    at: int  # position of the prefix's end
    sources: tuple[Source, ...]  # runs, the state unless memory has it, the tail if there is one
    before: int  # position at which its request would have resumed otherwise
    tail_failed: TierOutcome | None = field(default=None, kw_only=True)  # the rest is used
    follows: bool = field(default=False, kw_only=True)  # a prefill elsewhere, which may go on for long
    is_awaited: bool = field(default=True, kw_only=True)  # False: that prefill has not ended
    is_finished: bool = field(default=False, kw_only=True)
    earlier: Load | None = field(default=None, kw_only=True)  # of the prefix, after which this one reads the tail

    @property
    def end(self) -> int:
        """Position at which a request can resume after it."""
        return self.at if self.tail_failed is not None else max(self.at, self.sources[-1].end)


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier's content, and its work since the start."""

    kind: str
    parts: int
    bytes: int
    limit: int | None  # bytes
    evicted: int  # parts, by this server
    read: int  # parts
    bytes_read: int
    written: int
    bytes_written: int
    corrupt: int  # parts that were not what was stored, and were dropped
    errors: int  # failures of the store, after each of which it is left alone for a while
    usable: bool  # whether it is asked now
    states: int = 0  # of all fingerprints
    other_states: int = 0  # of fingerprints other than this server's: it cannot use them
    sent: int = 0  # parts of this server's memory that other workers of a cluster read
    bytes_shared: int = 0  # that came from other workers of a cluster through memory that both have
    bytes_networked: int = 0  # that came from them over the network

    def pulled_by_way(self) -> dict[str, int]:
        """Return the bytes that came from other workers of a cluster; none of another tier."""
        return {} if self.kind != PEER else {"shared memory": self.bytes_shared, "network": self.bytes_networked}

    def parts_by_work(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("read", "written", "evicted", "corrupt", "sent")}


@dataclass(frozen=True, slots=True)
class ReadSpeed:
    """Expected seconds of a read from a tier, or of a pull from another worker of a cluster."""

    state: float  # of a state alone, after what is being read already
    token: float  # of each token of KV

    def seconds(self, tokens: int) -> float:
        """Return the seconds to read a state, and KV of so many tokens."""
        return self.state + self.token * tokens


class TierReader(Protocol):
    """Reader of tiers."""

    run_tokens: int  # length of a run of KV

    def begin(self, load: Load) -> None:
        """Begin to fill a load's pages, and call `Loads.finished` when that has succeeded or failed."""

    def load_seconds(self, tier: int, state: bool, tokens: int) -> float:
        """Return the expected seconds to read a state, and KV of so many tokens, the tier's queue included."""

    def tail_seconds(self, tier: int, tokens: int) -> float:
        """Return the expected seconds to read a tail of `tokens` tokens, the tier's queue included."""

    def prefill_seconds(self, tokens: int) -> float | None:
        """Return the expected seconds to prefill so many tokens; None before any was measured."""
