"""Tiers under a virtual clock: a store of a size and a bandwidth below memory, asked and loaded as the server does it.

Each checkpoint that placement chose is stored when it is computed, or, with `selective`, when a request resumes from
it. Storing takes no time. One load is read at a time.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headwater.errors import ConfigError
from headwater.schedule.kinds.request import Request
from headwater.schedule.scheduler import Scheduler
from headwater.schedule.tier_load import Load, Offer, OpenLoad
from headwater.schedule.tiers import Loads, Tiers
from headwater.setting import parse_bytes, show_bytes
from headwater.tiers.catalog import Catalog, Entry
from headwater.tiers.names import Names, run_name, runs_of, state_name

SPELLED = re.compile(r"([\d.]+\w+)@([\d.]+\w+)/s(/always)?(/selective)?")
SPELLING = "SIZE@BANDWIDTH/s, like 100GB@2GB/s, or with /always or /selective"
OFF = "off"
LATENCY = 1e-3  # seconds of a load beside its bytes
RUN_TOKENS = 1024
NAMES_KEY = b"lab"


@dataclass(frozen=True, slots=True)
class TierLaw:
    """A store's size in bytes and its bandwidth in bytes a second."""

    size: int
    bandwidth: int
    always: bool = False  # loads even if computing is faster
    selective: bool = False  # stores checkpoints that were hit alone

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


class LabLoads(Tiers):
    """Loads of a simulated server, one after the other, at the speed of `bandwidth` bytes a second."""

    peak_bytes = written_bytes = 0  # of a store

    def __init__(
        self,
        bandwidth: float,
        latency: float,
        scheduler: Scheduler,
        page_bytes: int,
        prefill_seconds: Callable[[int], float],
        now: Callable[[], float],
    ) -> None:
        """`latency`: seconds of a load beside its bytes."""
        self._bandwidth, self._latency = bandwidth, latency
        self._scheduler, self._page_bytes = scheduler, page_bytes
        self._layout, self._now, self._prefill = scheduler.layout, now, prefill_seconds
        unit = self._layout.unit_tokens
        self.run_tokens = max(unit, RUN_TOKENS // unit * unit)
        self._loads = Loads(scheduler.cache, self, scheduler.new_id)
        self._reading: deque[tuple[float, OpenLoad]] = deque()  # and when each is read
        self._asked: set[int] = set()

    def holds_back(self, seq: Request) -> bool:
        return seq.id in self._asked and self._loads.holds_back(seq, self._scheduler.planner.match(seq))

    def forget(self, request: int) -> None:
        self._loads.forget(request)
        self._asked.discard(request)

    @property
    def busy(self) -> bool:
        return bool(self._reading)

    def due(self) -> float | None:
        """Return when the next load is read."""
        return self._reading[0][0] if self._reading else None

    def take_read(self) -> None:
        """Publish loads that are read by now."""
        while self._reading and self._reading[0][0] <= self._now():
            _, load = self._reading.popleft()
            self._finish(load)
            self._scheduler.room_was_made()

    def _finish(self, load: OpenLoad) -> None:
        """Publish a load that is read."""
        assert isinstance(load, Load), "no segments are loaded"
        self._loads.finished(load)
        self._was_read(load)
        if load.failed is None:
            self.loaded_tokens += load.plan.end - load.before

    def _was_read(self, load: Load) -> None:
        """Note that a load has ended."""

    def begin(self, load: Load) -> None:
        tokens = sum(run.end - run.start for run in load.runs)
        begun = max(self._now(), self._free_at(load))
        load.seconds = self._latency + self._bytes(True, tokens) / self._bandwidth
        load.tiers = "tier"
        self._reading.append((begun + load.seconds, load))

    def _free_at(self, load: Load) -> float:
        """Return when a load can begin: after those before it."""
        return self._reading[-1][0] if self._reading else 0.0

    def load_seconds(self, tier: int, state: bool, tokens: int) -> float:
        waiting = max(0.0, self._reading[-1][0] - self._now()) if self._reading else 0.0
        return self._latency + waiting + self._bytes(state, tokens) / self._bandwidth

    def prefill_seconds(self, tokens: int) -> float | None:
        return self._prefill(tokens)

    def _bytes(self, state: bool, tokens: int) -> int:
        layout = self._layout
        pages = tokens // layout.page_size * layout.kv_pages_per_unit + state * layout.checkpoint_pages
        return pages * self._page_bytes

    def _offer(self, seq: Request, offer: Offer) -> None:
        """Offer a request the parts of its prompt."""
        self._loads.ask(seq.id, [offer.tier])
        self._asked.add(seq.id)
        self._loads.answered(seq.id, offer)


class LabTiers(LabLoads):
    """One store of a simulated server."""

    def __init__(
        self,
        law: TierLaw,
        scheduler: Scheduler,
        page_bytes: int,
        prefill_seconds: Callable[[int], float],
        now: Callable[[], float],
    ) -> None:
        super().__init__(law.bandwidth, LATENCY, scheduler, page_bytes, prefill_seconds, now)
        self._law = law
        self._names = Names(NAMES_KEY, "", self._layout.unit_bytes)
        self._catalog = Catalog()

    # -- requests

    def arrived(self, seq: Request) -> None:
        unit, entries = self._layout.unit_tokens, self._catalog.entries
        digests = self._names.digests(seq.namespace, seq.key)
        last = min(seq.last_resumable // unit, len(digests) - 1)
        ends = [end for end in range(1, last + 1) if state_name(digests, end) in entries]
        length = self.run_tokens // unit
        runs = {run for end in ends for run in runs_of(end, length) if run_name(digests, *run) in entries}
        at = frozenset(end * unit for end in ends)
        self._offer(seq, Offer(0, at, frozenset((start * unit, end * unit) for start, end in runs)))

    # -- loads

    def _was_read(self, load: Load) -> None:
        """Note that the parts of a load were used now."""
        unit, digests = self._layout.unit_tokens, self._names.digests(load.namespace, load.key)
        names = [run_name(digests, run.start // unit, run.end // unit) for run in load.runs]
        for name in (*names, state_name(digests, load.state.end // unit)):
            if name in self._catalog.entries:
                self._catalog.entries[name].used = self._now()

    def load_seconds(self, tier: int, state: bool, tokens: int) -> float:
        return 0.0 if self._law.always else super().load_seconds(tier, state, tokens)

    # -- copies

    def saved(self, namespace: str, key: bytes, positions: Sequence[int]) -> None:
        if not self._law.selective:
            self._store(namespace, key, positions)

    def resumed(self, namespace: str, key: bytes, at: int) -> None:
        self._store(namespace, key, (at,))

    def _store(self, namespace: str, key: bytes, positions: Sequence[int]) -> None:
        unit, entries = self._layout.unit_tokens, self._catalog.entries
        if not positions:
            return
        digests = self._names.digests(namespace, key)
        for at in positions:
            end = at // unit
            below = (at for at in range(end - 1, 0, -1) if state_name(digests, at) in entries)
            after = next(below, 0) * unit  # the previous checkpoint
            runs = runs_of(end, self.run_tokens // unit) if self._layout.kv_pages_per_unit else []
            state = state_name(digests, end)
            new = {run_name(digests, *run): run for run in runs}
            missing = [run for name, run in new.items() if name not in entries]
            size = self._bytes(state not in entries, sum(end - start for start, end in missing) * unit)
            if not self._make_room(size, frozenset((*new, state))):
                continue
            for start, stop in missing:
                entry = Entry(self._bytes(False, (stop - start) * unit), self._now(), 0.0, digests[start])
                self._catalog.add(run_name(digests, start, stop), entry)
            if state not in entries:
                self._catalog.add(state, Entry(self._bytes(True, 0), self._now(), self._prefill(at - after), ""))
            self.written_bytes += size
            self.peak_bytes = max(self.peak_bytes, self._catalog.bytes)

    def _make_room(self, size: int, keep: frozenset[str]) -> bool:
        if self._catalog.bytes + size > self._law.size:
            for names in self._catalog.victims(self._now(), keep):
                if self._catalog.bytes + size <= self._law.size:
                    break
                for name in names:
                    self._catalog.remove(name)
        return self._catalog.bytes + size <= self._law.size
