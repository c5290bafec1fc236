"""One tier of an engine: its store, speed, failures, and the fingerprints of its states."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from headwater.account import TierOutcome
from headwater.cache_folder import own_folder
from headwater.config import ServeConfig
from headwater.engine.meter import Ratio
from headwater.errors import ConfigError
from headwater.schedule.tier_load import TierStats
from headwater.setting import SettingError, without_password
from headwater.tiers.changes import IGNORED, PartsRemoved, StoreChanges
from headwater.tiers.fingerprint import Fingerprint
from headwater.tiers.names import Names, fingerprint_name, read_key
from headwater.tiers.part import HEADER, SEAL_BYTES, CorruptPart, Part, Sealer
from headwater.tiers.place import TierPlace
from headwater.tiers.store import OwnStore, Store, StoreError, Usage

FIRST_BANDWIDTH = 1e9  # bytes a second, until some were read
LATENCY = 1e-3  # seconds of a load without its bytes
BREAK_SECONDS = 10.0  # without calls to a store that failed
READERS = 2  # threads that read parts
WAIT_FACTOR = 4  # times the expected seconds of a load, after which requests stop waiting
MAX_OTHER_FINGERPRINTS = 4  # under which a prompt is looked up

# A part that is built when it is written, and is valid until its thread builds the next one.
NamedPart = tuple[str, Callable[[], Part]]

log = logging.getLogger("headwater.engine")

Result = TypeVar("Result")


def patience(expected: float, computing: float | None) -> float:
    """Return the seconds to wait for a load that is expected to take `expected` seconds.

    At least a quarter of `computing`, the seconds to compute the same tokens, which giving up costs.
    """
    return max(WAIT_FACTOR * expected, (computing or 0.0) / WAIT_FACTOR)


def open_stores(config: ServeConfig) -> list[Store]:
    """Open the stores of the settings. Raises SettingError."""
    stores: list[Store] = []
    for place in config.tier:
        try:
            stores.append(TierPlace.parse(place).open())
        except (ConfigError, StoreError) as error:
            raise SettingError("tier", repr(without_password(place)), f"but {error}") from error
    return stores


def tier_key(config: ServeConfig) -> bytes:
    """Return the secret key of the settings' tiers. Raises SettingError."""
    try:
        return read_key(config.tier_key or own_folder() / "tier-key")
    except (ConfigError, OSError) as error:
        raise SettingError("tier_key", repr(str(config.tier_key or "")), f"but {error}") from error


class Workers:
    """Daemon threads that run calls in the order of their submission.

    Calls may never return: unlike the threads of ThreadPoolExecutor, these do not keep the process from ending.
    """

    def __init__(self, count: int, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._ended, self._lock = False, threading.Lock()
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[..., Result], *given: Any) -> Future[Result]:
        """Queue a call. After `end` it is cancelled."""
        future: Future[Result] = Future()
        with self._lock:
            if self._ended:
                future.cancel()
            else:
                self._calls.put((future, lambda: call(*given)))
        return future

    def end(self, seconds: float) -> bool:
        """Cancel calls that have not begun, and wait at most `seconds` for the others; return whether all ended."""
        until = time.monotonic() + seconds
        with self._lock:
            self._ended = True
            for _ in self._threads:
                self._calls.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if self._ended:
                future.cancel()
            elif future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)


class TierFingerprints:
    """The server's own fingerprint, and other ones in a store, whose states it cannot use."""

    def __init__(self, store: Store, key: bytes, own: Fingerprint, unit_bytes: int) -> None:
        self._store, self._key, self._unit_bytes = store, key, unit_bytes
        self._sealer = Sealer(key)
        self.own, self.names = own, Names(key, own.digest, unit_bytes)
        self._checked = False  # the content of the own one in the store
        self._known: set[str] = {self.names.tag}
        self.others: list[Names] = []  # at most MAX_OTHER_FINGERPRINTS, those with most states first

    def keep(self) -> None:
        """Store the own fingerprint if it is missing, or if the first call finds another content.

        Raises StoreError.
        """
        name = fingerprint_name(self.names.tag)
        if not self._checked:
            if self._read(self.names.tag) is None:
                self._store.delete([name])
            self._checked = True
        if not self._store.has([name])[0]:
            self._store.put(name, self._sealer.seal(name, self.own.part()))

    def learn(self, states: Mapping[str, int]) -> None:
        """Read the fingerprints of the store's states (by tag) that are not known yet. Raises StoreError."""
        for tag in sorted(states, key=lambda tag: -states[tag]):
            if tag in self._known or not states[tag]:
                continue
            self._known.add(tag)
            found = self._read(tag)
            if found is not None and len(self.others) < MAX_OTHER_FINGERPRINTS:
                self.others.append(Names(self._key, found.digest, self._unit_bytes))
            why = "it is not known which components differ" if found is None else _difference(self.own, found)
            log.info("%s holds %s states of another fingerprint: %s", self._store.shown, f"{states[tag]:,}", why)

    def count_others(self, states: Mapping[str, int]) -> int:
        """Return how many of a store's states have another fingerprint."""
        return sum(count for tag, count in states.items() if tag != self.names.tag)

    def _read(self, tag: str) -> Fingerprint | None:
        name = fingerprint_name(tag)
        content = self._store.get(name)
        if content is None:
            return None
        try:
            return Fingerprint.read(self._sealer.unseal(name, content))
        except CorruptPart as error:
            log.info("%s: fingerprint %s cannot be read: %s", self._store.shown, tag, error)
            return None


def _difference(own: Fingerprint, other: Fingerprint) -> str:
    """Describe how another fingerprint differs."""
    return f"model {other.model!r}, other {', '.join(own.differs(other))}"


class Tier:
    """Store with its measured speed; not read or written for a while after a failure."""

    def __init__(self, number: int, store: Store, fingerprints: TierFingerprints, sealer: Sealer) -> None:
        self.number, self.store, self.fingerprints, self._sealer = number, store, fingerprints, sealer
        self.bandwidth = Ratio()  # bytes, seconds
        self.waiting = 0  # bytes that loads in progress still read
        self.counts: Counter[str] = Counter()
        self.changes: StoreChanges = IGNORED
        self.usage = Usage(0, 0, store.limit)  # as of the last copy
        self.unreadable_until = self.unwritable_until = 0.0
        # threads of its own: a slow store delays no other
        self.lookups = Workers(1, f"headwater-tier-{number}-lookup")
        self.parts = Workers(READERS, f"headwater-tier-{number}-part")

    @property
    def names(self) -> Names:
        """Names of this server's parts in it."""
        return self.fingerprints.names

    @property
    def own_store(self) -> OwnStore:
        """The store, which may be private to this server."""
        assert isinstance(self.store, OwnStore), f"a {self.store.kind} store never is"
        return self.store

    @property
    def usable(self) -> bool:
        """True if parts are read."""
        return time.monotonic() >= self.unreadable_until

    @property
    def writable(self) -> bool:
        return time.monotonic() >= self.unwritable_until

    def read(self, name: str, kind: str, end: int, key: bytes, payload: Sequence[memoryview]) -> TierOutcome | None:
        """Fill `payload` with a part of this kind, end and key, and check it; return the reason if that fails."""
        header, stored_key, seal = (memoryview(bytearray(n)) for n in (HEADER.size, len(key), SEAL_BYTES))
        begun = time.perf_counter()
        try:
            if not self.store.read_into(name, [header, stored_key, *payload, seal]):
                return self._unreadable(name)
            part = self._sealer.check(name, header, stored_key, payload, seal)
            if part.end != end or part.kind != kind or bytes(part.key) != key:
                raise CorruptPart("it belongs to other tokens")
        except StoreError as error:
            self.failed(error)
            return TierOutcome.FAILED
        except CorruptPart as error:
            return self._corrupt(name, error)
        self.counts["read"] += 1
        self.counts["bytes_read"] += part.bytes
        self.bandwidth.note(part.bytes, time.perf_counter() - begun)
        return None

    def publish(self, changes: StoreChanges) -> None:
        """Publish stored and removed parts from now on."""
        self.changes = self.own_store.changes = changes
        self.own_store.claim()

    def put(self, parts: Sequence[NamedPart], closing: Callable[[], bool]) -> None:
        """Store missing parts in their order, until `closing()`; the others count as used now.

        Raises StoreError.
        """
        self.fingerprints.keep()
        names = [name for name, _ in parts]
        there, keep = self.store.has(names), frozenset(names)
        self.store.touch([name for name, known in zip(names, there, strict=True) if known])
        for (name, make), known in zip(parts, there, strict=True):
            if closing():
                return
            if not known:
                self._put(name, make(), keep)
        self.look()

    def _put(self, name: str, part: Part, keep: Set[str]) -> None:
        self.store.put(name, self._sealer.seal(name, part), keep)
        self.counts["written"] += 1
        self.counts["bytes_written"] += part.bytes

    def _unreadable(self, name: str) -> TierOutcome:
        """Return why a part does not have the expected size: it is gone or damaged."""
        if self.store.has([name])[0]:
            return self._corrupt(name, CorruptPart("it has another size"))
        self.counts["gone"] += 1
        self.changes.put(PartsRemoved([name]))
        return TierOutcome.FAILED

    def _corrupt(self, name: str, error: CorruptPart) -> TierOutcome:
        log.warning("tier %s: part %s is dropped: %s", self.store.shown, name, error)
        self.counts["corrupt"] += 1
        try:
            self.store.delete([name])
        except StoreError as failure:
            self.failed_to_write(failure)
        return TierOutcome.CORRUPT

    def failed(self, error: Exception) -> None:
        """Do not read for a while."""
        if self.usable:
            log.warning("%s; this tier is not read for %g s", error, BREAK_SECONDS)
        self.unreadable_until = time.monotonic() + BREAK_SECONDS
        self.counts["errors"] += 1

    def failed_to_write(self, error: Exception) -> None:
        """Do not write for a while: a full disk can still be read."""
        if self.writable:
            log.warning("%s; this tier is not written for %g s", error, BREAK_SECONDS)
        self.unwritable_until = time.monotonic() + BREAK_SECONDS
        self.counts["errors"] += 1

    def look(self) -> None:
        """Read the store's figures and new fingerprints. Raises StoreError."""
        self.usage = self.store.usage()
        self.fingerprints.learn(self.usage.states)

    @property
    def stats(self) -> TierStats:
        """Figures of its content, as of the last call to the store, and of its work."""
        names = ("read", "bytes_read", "written", "bytes_written", "corrupt", "errors")
        work = {name: self.counts[name] for name in names}
        used = self.usage
        return TierStats(
            self.store.kind, used.parts, used.bytes, used.limit, used.evicted, **work, usable=self.usable,
            states=sum(used.states.values()), other_states=self.fingerprints.count_others(used.states),
        )  # fmt: skip

    @property
    def bytes_a_second(self) -> float:
        """The bandwidth, as measured."""
        return self.bandwidth.value or FIRST_BANDWIDTH

    def seconds(self, size: int) -> float:
        """Return the expected seconds to read `size` bytes, after those that are being read."""
        return LATENCY + (self.waiting + size) / self.bytes_a_second
