"""Tiers under a virtual clock: a store with a size and a bandwidth below memory, used as by the server.

Each checkpoint that placement chose is stored when it is computed, or, with `selective`, when a request resumes from
it. Storing takes no time. A store, or a link to other workers, reads for one load at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count

from headwater.errors import ConfigError
from headwater.plan import CacheLayout, Tail
from headwater.schedule.kinds.request import Request
from headwater.schedule.scheduler import Scheduler
from headwater.schedule.tier_load import Load, Offer, ReadSpeed
from headwater.schedule.tiers import Copies, Loads, TierFigures, Tiers
from headwater.setting import OFF, parse_bytes, show_bytes
from headwater.tiers.catalog import Catalog, Entry
from headwater.tiers.changes import IGNORED, PartsRemoved, PrefixStored, StoreChanges
from headwater.tiers.names import STATE, Names, run_name, runs_of, state_name

SPELLED = re.compile(r"([\d.]+\w+)@([\d.]+\w+)/s(/always)?(/selective)?")
SPELLING = "SIZE@BANDWIDTH/s, like 100GB@2GB/s, or with /always or /selective"
LATENCY_SECONDS = 1e-3  # of a load, in addition to its bytes
RUN_TOKENS = 1024
NAMES_KEY = b"lab"
STORE = 0  # number of the store among the tiers of a server


@dataclass(frozen=True, slots=True)
class TierLaw:
    """A store's size in bytes and its bandwidth in bytes a second."""

    size: int
    bandwidth: int
    always: bool = False  # loads even if computing is faster
    selective: bool = False  # stores only checkpoints that were hit

    @classmethod
    def read(cls, text: str) -> TierLaw | None:
        """Read off, or SIZE@BANDWIDTH/s with /always, /selective, both or none. Raises ConfigError for all else."""
        if text == OFF:
            return None
        found = SPELLED.fullmatch(text)
        if found is None:
            raise ConfigError(f"tier is {text!r}, must be off, or like 100GB@2GB/s, 100GB@2GB/s/always or /selective")
        law = cls(parse_bytes(found[1]), parse_bytes(found[2]), found[3] is not None, found[4] is not None)
        if not law.size or not law.bandwidth:
            raise ConfigError(f"tier is {text!r}: size and bandwidth must be more than 0")
        return law

    def __str__(self) -> str:
        rules = f"{'/always' if self.always else ''}{'/selective' if self.selective else ''}"
        return f"{show_bytes(self.size)}@{show_bytes(self.bandwidth)}/s{rules}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of parts of prefixes."""

    layout: CacheLayout
    page_bytes: int

    @property
    def run_tokens(self) -> int:
        """Tokens of a run of KV."""
        unit = self.layout.unit_tokens
        return max(unit, RUN_TOKENS // unit * unit)

    def bytes(self, state: bool, tokens: int) -> int:
        """Return the bytes of a state, if `state`, and of the KV of `tokens` tokens."""
        layout = self.layout
        pages = tokens // layout.page_size * layout.kv_pages_per_unit + state * layout.checkpoint_pages
        return pages * self.page_bytes


@dataclass(slots=True)
class Line:
    """Queue of loads from a store, or from other workers, one at a time."""

    bandwidth: float  # bytes a second
    latency: float  # seconds of a load in addition to its bytes
    free_at: float = 0.0  # seconds: the end of the last load

    def seconds(self, size: int) -> float:
        """Return the seconds to read `size` bytes, without the wait."""
        return self.latency + size / self.bandwidth

    def wait(self, now: float) -> float:
        """Return the seconds until a load can begin."""
        return max(0.0, self.free_at - now)

    def read(self, begin: float, size: int) -> float:
        """Read `size` bytes from `begin` on, or once the line is free; return the end."""
        self.free_at = max(begin, self.free_at) + self.seconds(size)
        return self.free_at


class LabStore(Copies):
    """Content of a simulated store."""

    medium = "STORAGE"  # in KV events
    peak_bytes = written_bytes = 0

    def __init__(
        self, law: TierLaw, sizes: Sizes, prefill_seconds: Callable[[int], float], now: Callable[[], float]
    ) -> None:
        self.law, self.line = law, Line(law.bandwidth, LATENCY_SECONDS)
        self._sizes, self._prefill, self._now = sizes, prefill_seconds, now
        self._unit, self._run_units = sizes.layout.unit_tokens, sizes.run_tokens // sizes.layout.unit_tokens
        self._names = Names(NAMES_KEY, "", sizes.layout.unit_bytes)
        self.catalog = Catalog()
        self.changes: StoreChanges = IGNORED

    def offer(self, seq: Request) -> Offer:
        """Return the parts of a request's prompt that are stored."""
        unit, entries = self._unit, self.catalog.entries
        digests = self._names.digests(seq.namespace, seq.key)
        last = min(seq.last_resumable // unit, len(digests) - 1)
        ends = [end for end in range(1, last + 1) if state_name(digests, end) in entries]
        runs = {run for end in ends for run in runs_of(end, self._run_units) if run_name(digests, *run) in entries}
        at = frozenset(end * unit for end in ends)
        return Offer(STORE, at, frozenset((start * unit, end * unit) for start, end in runs))

    def was_read(self, load: Load) -> None:
        """Note that the parts of a load from this store were used now."""
        unit, digests = self._unit, self._names.digests(load.namespace, load.key)
        for source in load.sources:
            start, end = source.start // unit, source.end // unit
            name = state_name(digests, end) if source.kind == STATE else run_name(digests, start, end)
            if source.tier == STORE and name in self.catalog.entries:
                self.catalog.entries[name].used = self._now()

    def store(self, namespace: str, key: bytes, positions: Sequence[int]) -> None:
        """Store checkpoints, and the KV before them."""
        unit, entries = self._unit, self.catalog.entries
        if not positions:
            return
        digests = self._names.digests(namespace, key)
        for at in positions:
            end = at // unit
            below = (at for at in range(end - 1, 0, -1) if state_name(digests, at) in entries)
            after = next(below, 0) * unit  # the previous checkpoint
            runs = runs_of(end, self._run_units) if self._sizes.layout.kv_pages_per_unit else []
            state = state_name(digests, end)
            new = {run_name(digests, *run): run for run in runs}
            missing = [run for name, run in new.items() if name not in entries]
            size = self._sizes.bytes(state not in entries, sum(end - start for start, end in missing) * unit)
            if not self._make_room(size, frozenset((*new, state))):
                continue
            for start, stop in missing:
                entry = Entry(self._sizes.bytes(False, (stop - start) * unit), self._now(), 0.0, digests[start])
                self.catalog.add(run_name(digests, start, stop), entry)
            if state not in entries:
                self.catalog.add(state, Entry(self._sizes.bytes(True, 0), self._now(), self._prefill(at - after), ""))
            prefix = key[: end * self._sizes.layout.unit_bytes]
            self.changes.put(PrefixStored(namespace, prefix, [*new, state]))
            self.written_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.catalog.bytes)

    def saved(self, namespace: str, key: bytes, positions: Sequence[int], tails: Sequence[Tail] = ()) -> None:
        if not self.law.selective:
            self.store(namespace, key, positions)

    def resumed(self, namespace: str, key: bytes, at: int) -> None:
        self.store(namespace, key, (at,))

    def _make_room(self, size: int, keep: frozenset[str]) -> bool:
        if self.catalog.bytes + size > self.law.size:
            for names in self.catalog.evict(self.law.size - size, self._now(), keep):
                self.changes.put(PartsRemoved(names))
        return self.catalog.bytes + size <= self.law.size


class LabLoads(Tiers):
    """Loads of a simulated server: from a store, if it has one."""

    def __init__(
        self,
        scheduler: Scheduler,
        page_bytes: int,
        prefill_seconds: Callable[[int], float],
        now: Callable[[], float],
        law: TierLaw | None = None,
    ) -> None:
        """`law`: of the store."""
        self._scheduler, self._now, self._prefill = scheduler, now, prefill_seconds
        self._sizes = Sizes(scheduler.layout, page_bytes)
        self.run_tokens = self._sizes.run_tokens
        self.store = None if law is None else LabStore(law, self._sizes, prefill_seconds, now)
        self.copies = self.store or Copies()
        self.loaded_tokens = self.loaded_segments = 0
        self._loads = Loads(scheduler.cache, self, scheduler.new_id)
        self._reading: list[tuple[float, int, Callable[[], None]]] = []  # heap of the ends of reads, and their calls
        self._numbers = count()
        self._asked: set[int] = set()

    # -- requests

    def arrived(self, seq: Request) -> None:
        offers = list(self._offers(seq))
        if offers or seq.load is not None:
            self._loads.ask(seq.id, [offer.tier for offer in offers])
            self._asked.add(seq.id)
            for offer in offers:
                self._loads.answered(seq.id, offer)

    def _offers(self, seq: Request) -> Iterator[Offer]:
        """Yield each tier's offer for a request's prompt."""
        if self.store is not None:
            yield self.store.offer(seq)

    def holds_back(self, seq: Request) -> bool:
        return seq.id in self._asked and self._loads.holds_back(seq, self._scheduler.planner.match(seq))

    def forget(self, request: int) -> None:
        self._loads.forget(request)
        self._asked.discard(request)

    # -- loads

    @property
    def busy(self) -> bool:
        return bool(self._reading)

    def due(self) -> float | None:
        """Return the end of the next load."""
        return self._reading[0][0] if self._reading else None

    def take_read(self) -> None:
        """Publish loads that are read by now."""
        while self._reading and self._reading[0][0] <= self._now():
            heappop(self._reading)[2]()
            self._scheduler.room_was_made()

    def _at(self, time: float, then: Callable[[], None]) -> None:
        """Call `then` at `time`, the end of a read."""
        heappush(self._reading, (time, next(self._numbers), then))

    def _finish(self, load: Load) -> None:
        """Publish a load that was read, or free its pages if it failed."""
        self._loads.finished(load)
        if load.failed is None:
            self.loaded_tokens += load.end - load.before
            if self.store is not None:
                self.store.was_read(load)

    def begin(self, load: Load) -> None:
        now, *runs, state = self._now(), *load.sources
        tokens = {state.tier: 0}
        for run in runs:
            tokens[run.tier] = tokens.get(run.tier, 0) + run.end - run.start
        sizes = {tier: self._sizes.bytes(tier == state.tier, n) for tier, n in tokens.items()}
        load.seconds = max(self._line(tier).seconds(size) for tier, size in sizes.items())
        load.tiers = ",".join(sorted({self._kind(tier) for tier in sizes}))
        self._at(max(self._read(tier, now, size) for tier, size in sizes.items()), partial(self._finish, load))

    def _line(self, tier: int) -> Line:
        """Return the queue of loads from a tier."""
        assert self.store is not None, "there is one tier"
        return self.store.line

    def _kind(self, tier: int) -> str:
        return "tier"

    def _read(self, tier: int, now: float, size: int) -> float:
        """Read `size` bytes of a tier; return the end."""
        return self._line(tier).read(now, size)

    def figures(self) -> TierFigures:
        loads = {} if self.store is None else {self.store.medium: self._speed(STORE)}
        return TierFigures(self.loaded_tokens, self.loaded_segments, loads=loads)

    def _speed(self, tier: int) -> ReadSpeed:
        a_token = self._sizes.bytes(False, self.run_tokens) / self.run_tokens / self._line(tier).bandwidth
        return ReadSpeed(self.load_seconds(tier, True, 0), a_token)

    def load_seconds(self, tier: int, state: bool, tokens: int) -> float:
        if tier == STORE and self.store is not None and self.store.law.always:
            return 0.0
        line = self._line(tier)
        return line.latency + line.wait(self._now()) + self._sizes.bytes(state, tokens) / line.bandwidth

    def tail_seconds(self, tier: int, tokens: int) -> float:
        return self.load_seconds(tier, False, tokens)  # tiers of the lab hold no tails

    def prefill_seconds(self, tokens: int) -> float | None:
        return self._prefill(tokens)
