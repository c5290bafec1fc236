"""Fingerprints of a store's states: the server's own, and others, whose states it cannot use."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from headwater.tiers.fingerprint import Fingerprint
from headwater.tiers.names import Names, fingerprint_name
from headwater.tiers.part import CorruptPart, Sealer
from headwater.tiers.store import Store

MOST = 4  # other fingerprints under which a prompt is looked up

log = logging.getLogger("headwater.engine")


class TierFingerprints:
    """Own fingerprint and those that were found in a store."""

    def __init__(self, store: Store, key: bytes, own: Fingerprint, unit_bytes: int) -> None:
        self._store, self._key, self._unit_bytes = store, key, unit_bytes
        self._sealer = Sealer(key)
        self.own, self.names = own, Names(key, own.digest, unit_bytes)
        self._checked = False  # what the store has of the own one
        self._known: set[str] = {self.names.tag}
        self.others: list[Names] = []  # at most MOST, those with most states first

    def keep(self) -> None:
        """Store the own fingerprint, if it is not there, or was not what was stored at the first call.

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
        """Read the fingerprints that are new among those of the store's states (by tag). Raises StoreError."""
        for tag in sorted(states, key=lambda tag: -states[tag]):
            if tag in self._known or not states[tag]:
                continue
            self._known.add(tag)
            found = self._read(tag)
            if found is not None and len(self.others) < MOST:
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
