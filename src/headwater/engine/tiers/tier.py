"""One tier of an engine: its store, how fast it is, and whether it may be asked now."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence, Set

from headwater.account import TierOutcome
from headwater.cache_folder import own_folder
from headwater.config import ServeConfig
from headwater.engine.meter import Ratio
from headwater.engine.tiers.fingerprints import TierFingerprints
from headwater.engine.workers import Workers
from headwater.errors import ConfigError
from headwater.schedule.tier_load import TierStats
from headwater.setting import SettingError, without_password
from headwater.tiers.changes import IGNORED, PartsRemoved, StoreChanges
from headwater.tiers.names import Names, read_key
from headwater.tiers.part import HEADER, SEAL_BYTES, CorruptPart, Part, Sealer
from headwater.tiers.place import TierPlace
from headwater.tiers.store import OwnStore, Store, StoreError, Usage

FIRST_BANDWIDTH = 1e9  # bytes a second, until some were read
LATENCY = 1e-3  # seconds of a load beside its bytes
BREAK = 10.0  # seconds for which a store that failed is left alone
READERS = 2  # threads that read parts
WAIT_FACTOR = 4  # times the expected seconds, after which a load is not waited for

# A part that is made when it is to be written, and is valid until its thread makes the next one.
NamedPart = tuple[str, Callable[[], Part]]

log = logging.getLogger("headwater.engine")


def patience(expected: float, computing: float | None) -> float:
    """Return the seconds for which a load is waited for that was expected to take `expected` seconds.

    A quarter of `computing`, the seconds that computing the same takes, if that is longer: giving up costs all of them.
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


class Tier:
    """One store, how fast it is, and whether it may be asked now."""

    def __init__(self, number: int, store: Store, fingerprints: TierFingerprints, sealer: Sealer) -> None:
        self.number, self.store, self.fingerprints, self._sealer = number, store, fingerprints, sealer
        self.bandwidth = Ratio()  # bytes, seconds
        self.waiting = 0  # bytes that loads in progress still read
        self.counts: Counter[str] = Counter()
        self.changes: StoreChanges = IGNORED
        self.usage = Usage(0, 0, store.limit)  # as it was after the last copy
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
        """The store, which may be this server's alone."""
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
        """Fill `payload` with a part of this kind, end and key, and check it; return why it could not be."""
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
        """Say from now on what is stored, and what is gone."""
        self.changes = self.own_store.changes = changes
        self.own_store.claim()

    def put(self, parts: Sequence[NamedPart], closing: Callable[[], bool]) -> None:
        """Store parts that are not there, in their order, until `closing()`; the others count as used now.

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
        """Return why a part has not the expected size: it is gone, or it is not what was stored."""
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
            log.warning("%s; this tier is not read for %g s", error, BREAK)
        self.unreadable_until = time.monotonic() + BREAK
        self.counts["errors"] += 1

    def failed_to_write(self, error: Exception) -> None:
        """Do not write for a while: a full disk can still be read."""
        if self.writable:
            log.warning("%s; this tier is not written for %g s", error, BREAK)
        self.unwritable_until = time.monotonic() + BREAK
        self.counts["errors"] += 1

    def look(self) -> None:
        """Ask the store for its figures, and for fingerprints that are new. Raises StoreError."""
        self.usage = self.store.usage()
        self.fingerprints.learn(self.usage.states)

    @property
    def stats(self) -> TierStats:
        """Figures of its content, as far as they are known without asking it, and of its work."""
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
        """Return the expected seconds to read so many bytes, after those that are being read."""
        return LATENCY + (self.waiting + size) / self.bytes_a_second
