"""Choice of a request's worker by cost.

`LeastCost` is Headwater's; turns and the fewest requests are the simplest others. `lab/cluster/rivals.py` has those
of other projects, and the table of all.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from headwater.schedule.prefill_seconds import PrefillSpeed

if TYPE_CHECKING:
    from headwater.engine.meter import Backlog
    from headwater.schedule.tier_load import ReadSpeed

UNMEASURED_SPEED = PrefillSpeed(0.0, 1e-3)  # until a worker has measured its speed
TIE_SHARE = 0.1  # of the least cost: candidates within it are equal
UNLIKE_SPEED_RATIO = 2.0  # measured seconds a token; from this ratio on workers are assumed to differ
RECOMPUTED_SHARE = 0.5  # of evicted tokens, assumed to be computed again
WIDESPREAD_SHARE = 0.25  # of the workers: if they have a prefix, each worker is going to need it
MIN_WIDESPREAD_WORKERS = 4
MAX_HOLDERS = 2  # workers that a message names to pull from
MAX_MEMORY_HELD = 0.95  # share of the memory that requests are counted with


class Role(StrEnum):
    """Part of requests that a worker computes."""

    BOTH = "both"  # prompts and their answers
    PREFILL = "prefill"  # prompts, and the first token after each
    DECODE = "decode"  # answers, and prompts for which prefill elsewhere does not pay


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Prompt of a request, for the choice of a worker."""

    tokens: int
    blocks: Sequence[int] = ()  # digests of its full blocks, each of which covers the ones before it
    block_tokens: int = 64
    session: str = ""  # of its client; "": not known
    composed: Sequence[int] = ()  # digests of the blocks of the prefix that is composed of its segments, if it has any

    def shared(self, blocks: Container[int]) -> int:
        """Return the leading tokens whose blocks are all in `blocks`, without this prompt's last token.

        `blocks`: digests of whole prompts, so that with a block it has the ones before it.
        """
        most = min(len(self.blocks), max(0, self.tokens - 1) // self.block_tokens)
        if not most or self.blocks[0] not in blocks:
            return 0
        return self.block_tokens * bisect_left(self.blocks, True, hi=most, key=lambda block: block not in blocks)


class Stored(NamedTuple):
    """Leading tokens of a prompt that a worker would have after a load from one of its stores."""

    medium: str
    tokens: int


class Found(NamedTuple):
    """Leading tokens of a prompt in a cache."""

    cached: int  # whose exact KV is there
    resumable: int  # up to the deepest position with all states
    unsent: int = 0  # part of `resumable` that only a composed prefix has; no other worker can pull it
    stored: Sequence[Stored] = ()  # in stores that have more


NOTHING = Found(0, 0)


@dataclass(slots=True)
class Candidate:
    """Worker that a request may be sent to. `price_reads` adds the tokens that it would read."""

    running: int  # requests that compute
    waiting: int
    queued_tokens: int  # of prompts that are not computed yet
    prefill: PrefillSpeed | None  # as measured
    request_seconds: float  # mean, from submission to end
    max_running: int
    reusable: int  # leading tokens of the request's prompt that it has states and KV for
    cached: int = 0  # leading tokens that it has exact KV for
    unsent: int = 0  # of `reusable`, those of a composed prefix, which no other worker can pull
    underway: int = 0  # leading tokens that earlier requests of this router are computing there
    memory_held: float = 0.0  # share of its memory that requests hold
    name: str = ""
    pool: str = ""  # fingerprint: workers of one pool compute equal bits
    role: Role = Role.BOTH
    pull: ReadSpeed | None = None  # from workers of its pool; None: it pulls nothing
    stored: Sequence[Stored] = ()  # leading tokens that its own stores have
    loads: Mapping[str, ReadSpeed] = field(default_factory=dict)  # from these stores, by medium
    read: int = 0  # leading tokens, including those that it is going to pull or to load
    read_seconds: float = 0.0  # until it has them
    is_loaded: bool = False  # from its own store
    composed: int = 0  # tokens of segments that it does not compute with the prompt
    widespread: int = 0  # leading tokens that many workers have, noted by `note_widespread`

    @property
    def load(self) -> int:
        """Number of its requests."""
        return self.running + self.waiting

    @property
    def sendable(self) -> int:
        """Leading tokens that others can pull."""
        return self.reusable - self.unsent

    @property
    def own(self) -> int:
        """Leading tokens that are cached or being computed there."""
        return max(self.reusable, self.underway)

    def uncached(self, prompt: Prompt) -> int:
        """Return the tokens of a prompt that the worker has to compute."""
        return prompt.tokens - max(self.reusable, self.underway, self.read) - self.composed

    def compose(self, prompt: Prompt, interiors: int) -> None:
        """Note that the worker has, or will have, `interiors` tokens of a prompt's segments."""
        self.composed = min(interiors, prompt.tokens - max(self.own, self.read))


@dataclass(slots=True, eq=False)
class Outstanding:
    """Open request that a router has sent to a worker."""

    prompt: Prompt
    uncached: int  # tokens that its worker is expected to compute
    has_begun: bool = False  # the first token has come


class OpenRequests:
    """Open requests that a router has sent to one worker: their sums, and the blocks that they compute.

    Sums are kept up to date, so that a route takes the same time with any number of requests. Blocks and uncached
    tokens are those of requests without a first token.
    """

    def __init__(self) -> None:
        self.number = 0
        self.prompt_tokens = 0  # of all
        self.uncached_tokens = 0  # of those without a first token
        self.blocks: Counter[int] = Counter()  # likewise, by the number of requests that have each

    def add(self, one: Outstanding) -> None:
        """Count a request."""
        self.number += 1
        self.prompt_tokens += one.prompt.tokens
        if not one.has_begun:
            self.uncached_tokens += one.uncached
            self.blocks.update(one.prompt.blocks)

    def begin(self, one: Outstanding) -> None:
        """Note that the first token of a request has come. Later calls change nothing."""
        if one.has_begun:
            return
        one.has_begun = True
        self.uncached_tokens -= one.uncached
        blocks = self.blocks
        for block in one.prompt.blocks:
            if (others := blocks.pop(block) - 1) > 0:
                blocks[block] = others

    def remove(self, one: Outstanding) -> None:
        """Remove a request from the sums."""
        self.begin(one)
        self.number -= 1
        self.prompt_tokens -= one.prompt.tokens


@dataclass(slots=True)
class Known:
    """State of a worker in a router: its last report, and the requests that were sent to it since."""

    name: str
    max_running: int
    backlog: Backlog
    open: OpenRequests
    pool: str = ""
    role: Role = Role.BOTH

    def candidate(self, prompt: Prompt, found: Found) -> Candidate:
        """Return the worker as a candidate for a prompt, of which it has `found`.

        The report counts all routers' requests, this router's own sums are newer: the larger number counts.
        """
        backlog, number = self.backlog, self.open.number
        held = max(backlog.held_tokens, self.open.prompt_tokens)
        return Candidate(
            running=max(backlog.running, min(number, self.max_running)),
            waiting=max(backlog.waiting, number - self.max_running),
            queued_tokens=max(backlog.queued_tokens, self.open.uncached_tokens),
            prefill=backlog.prefill,
            request_seconds=backlog.request_seconds,
            max_running=self.max_running,
            reusable=found.resumable,
            cached=found.cached,
            unsent=found.unsent,
            underway=prompt.shared(self.open.blocks),
            memory_held=min(1.0, held / backlog.memory_tokens) if backlog.memory_tokens else 0.0,
            name=self.name,
            pool=self.pool,
            role=self.role,
            pull=backlog.pull,
            stored=found.stored,
            loads=backlog.loads,
        )


def price_reads(candidates: Sequence[Candidate]) -> None:
    """Note in each candidate the leading tokens that it would read, if that is faster than computing them.

    A worker loads the prefix in one of its own stores, or pulls the longest one in its pool's memory, whichever saves
    more seconds.
    """
    if all(one.pull is None and not one.stored for one in candidates):
        return
    deepest: dict[str, int] = {}
    for one in candidates:
        deepest[one.pool] = max(deepest.get(one.pool, 0), one.sendable)
    for one, speed in zip(candidates, prefill_speeds(candidates), strict=True):
        reads = [(end, one.loads[medium], True) for medium, end in one.stored if medium in one.loads]
        if one.pull is not None:
            reads.append((deepest[one.pool], one.pull, False))
        most = 0.0
        for end, reading, is_loaded in reads:
            if end <= one.own:
                continue
            seconds = reading.seconds(end - min(end, one.cached))
            saved = speed.between(one.own, end) - seconds
            if saved > most:
                most, one.read, one.read_seconds, one.is_loaded = saved, end, seconds, is_loaded


def note_widespread(candidates: Sequence[Candidate]) -> None:
    """Note in each candidate the leading tokens that many workers have: a quarter of all, and at least four."""
    many = max(MIN_WIDESPREAD_WORKERS, math.ceil(WIDESPREAD_SHARE * len(candidates)))
    if many < len(candidates):
        tokens = sorted((one.reusable for one in candidates), reverse=True)[many - 1]
        for one in candidates:
            one.widespread = tokens


def holders(chosen: int, candidates: Sequence[Candidate], most: int = MAX_HOLDERS) -> list[int]:
    """Return at most `most` workers from which the chosen one pulls, the deepest first; none if it does not pull."""
    one = candidates[chosen]
    if not one.read or one.is_loaded:
        return []
    found = [i for i, other in enumerate(candidates) if other.pool == one.pool and other.sendable > one.own]
    return sorted(found, key=lambda i: (-candidates[i].sendable, candidates[i].load))[:most]


def preferred(names: Iterable[str], key: object) -> str:
    """Return the name that a key prefers, by rendezvous hashing (Thaler and Ravishankar, 1998).

    Without that name, the key goes to its next one, and no other key moves.
    """
    return max(names, key=lambda name: hashlib.blake2b(f"{name} {key}".encode(), digest_size=8).digest())


class Choice(ABC):
    """Rule of a router. Most rules need only `choose`."""

    @abstractmethod
    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> int:
        """Return the index of the worker for a prompt."""

    def begun(self, prompt: Prompt, name: str) -> None:  # noqa: B027
        """Note that a worker has sent the first token after a prompt."""

    def ended(self, prompt: Prompt, name: str) -> None:  # noqa: B027
        """Note that a worker has ended a request, or lost it."""

    def left(self, name: str) -> None:  # noqa: B027
        """Note that a worker has left, after the ends of all of its requests."""


class Turns:
    """Round-robin choice among equally good workers."""

    def __init__(self) -> None:
        self._turn = count()

    def least(self, costs: Sequence[float]) -> int:
        """Return the index of one of the least costs."""
        least = min(costs)
        return self.of([at for at, cost in enumerate(costs) if cost == least])

    def of(self, equal: Sequence[int]) -> int:
        """Return one of them."""
        return equal[next(self._turn) % len(equal)]


class LeastCost(Choice):
    """Least cost in seconds: the time to the first token, and the later recomputation of evicted tokens.

    A cost is the sum of

    - the mean time until a slot is free, if all are taken;
    - the tokens queued there, and the uncached tokens of the prompt, at the worker's measured speed. Tokens that an
      earlier request is computing there are not computed again. If a load or a pull is faster than computing, its time
      counts instead;
    - half of the tokens that admission evicts there, at that speed: as many as get new pages, divided by the share of
      the memory that requests leave to the cache, since a small cache evicts tokens that are needed sooner. Cached KV
      needs no new pages, even if its state is evicted and all of it is recomputed.

    A prefix that many workers have, like a system prompt, counts at no worker. Later requests need it at each of them,
    so that a worker without it computes it once for all; otherwise that worker would never get a request.

    Among workers within 10% of the least cost, a prefix that no worker has cached is sent to the worker that its hash
    selects, so that its next request reaches the same cache. Prompts without a full block are sent to the worker with
    the fewest requests, then in turns.
    """

    def __init__(self) -> None:
        self._turns = Turns()

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> int:
        speeds = prefill_speeds(candidates)
        costs = [expected_seconds(prompt, one, speed) for one, speed in zip(candidates, speeds, strict=True)]
        least = min(costs)
        near = [i for i, cost in enumerate(costs) if cost <= least * (1 + TIE_SHARE)]
        if prompt.blocks and len(near) > 1:
            at = max(one.reusable for one in candidates) // prompt.block_tokens
            key = prompt.blocks[min(at, len(prompt.blocks) - 1)]
            names = [candidates[i].name for i in near]
            return near[names.index(preferred(names, key))]
        fewest = min(candidates[i].load for i in near)
        return self._turns.of([i for i in near if candidates[i].load == fewest])


def expected_seconds(prompt: Prompt, one: Candidate, speed: PrefillSpeed) -> float:
    """Return the expected seconds until the first token, and those of recomputing evicted tokens."""
    too_many = one.running + one.waiting + 1 - one.max_running
    waiting = too_many * one.request_seconds / max(1, one.max_running) if too_many > 0 else 0.0
    new = prompt.tokens - max(one.cached, one.reusable, one.underway, one.widespread)
    evicted = new / (1 - min(MAX_MEMORY_HELD, one.memory_held))
    done = prompt.tokens - one.uncached(prompt)
    computing = speed.seconds(done, prompt.tokens) - speed.between(done, max(done, one.widespread))
    return waiting + one.read_seconds + computing + (one.queued_tokens + RECOMPUTED_SHARE * evicted) * speed.token


def prefill_speeds(candidates: Sequence[Candidate]) -> list[PrefillSpeed]:
    """Return each worker's speed: the lower median, or its own if seconds a token differ by `UNLIKE_SPEED_RATIO`.

    The time of a token depends on the measured steps, so that equal workers measure different speeds. A worker without
    a measurement is assumed to be like the others; otherwise it would never get a request.
    """
    measured = [one.prefill for one in candidates if one.prefill is not None]
    if not measured:
        return [UNMEASURED_SPEED] * len(candidates)
    median = sorted(measured, key=attrgetter("token"))[(len(measured) - 1) // 2]
    least, most = median.token / UNLIKE_SPEED_RATIO, median.token * UNLIKE_SPEED_RATIO
    own = (one.prefill or median for one in candidates)
    return [median if least <= speed.token <= most else speed for speed in own]


class RoundRobin(Choice):
    """Workers in turns."""

    def __init__(self) -> None:
        self._turn = count()

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> int:
        return next(self._turn) % len(candidates)


class LeastLoaded(Choice):
    """The worker with the fewest requests."""

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> int:
        return min(range(len(candidates)), key=lambda i: candidates[i].load)
