"""Store in the process's own memory: that of the host, below a card's.

On a CPU a larger `--memory` is better: nothing is copied.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence, Set

from headwater.tiers.catalog import Catalog, Entry
from headwater.tiers.changes import IGNORED, PartsRemoved, StoreChanges
from headwater.tiers.part import Buffer, Header
from headwater.tiers.store import StoreFull, Usage, filled


class MemoryStore:
    """Parts as bytes, at most `limit` bytes of them."""

    kind, shown, medium = "memory", "memory", "CPU"

    def __init__(self, limit: int | None, clock: Callable[[], float] = time.time) -> None:
        self.limit, self._clock = limit, clock
        self.changes: StoreChanges = IGNORED
        self._content: dict[str, bytes] = {}
        self._catalog = Catalog()
        self._evicted = 0
        self._changing = threading.Lock()

    def has(self, names: Sequence[str]) -> list[bool]:
        return [name in self._content for name in names]

    def get(self, name: str) -> Buffer | None:
        with self._changing:
            content = self._content.get(name)
            if content is not None:
                self._catalog.entries[name].used = self._clock()
            return content

    def read_into(self, name: str, pieces: Sequence[memoryview]) -> bool:
        return filled(self.get(name), pieces)

    def put(self, name: str, pieces: Sequence[Buffer], keep: Set[str] = frozenset()) -> None:
        content = b"".join(pieces)
        with self._changing:
            if name in self._content:
                return
            self._make_room(len(content), keep)
            header = Header.of(content)
            known = (header.seconds, header.below) if header else (0.0, "")
            self._catalog.add(name, Entry(len(content), self._clock(), *known))
            self._content[name] = content

    def touch(self, names: Sequence[str]) -> None:
        with self._changing:
            for name in names:
                if name in self._catalog.entries:
                    self._catalog.entries[name].used = self._clock()

    def delete(self, names: Sequence[str]) -> None:
        with self._changing:
            for name in names:
                self._content.pop(name, None)
                self._catalog.remove(name)
            self.changes.put(PartsRemoved(names))

    def usage(self) -> Usage:
        with self._changing:
            states = dict(self._catalog.states)
            return Usage(len(self._content), self._catalog.bytes, self.limit, self._evicted, states)

    def catalog(self) -> Catalog:
        return self._catalog

    def claim(self) -> None:
        """Do nothing: no other server has this memory."""

    def is_private(self) -> bool:
        return True

    def piece(self, name: str, at: int, size: int) -> bytes:
        return self._content.get(name, b"")[at : at + size]

    def close(self) -> None:
        """Do nothing: the memory goes with the store."""

    def _make_room(self, size: int, keep: Set[str]) -> None:
        if self.limit is None or self._catalog.bytes + size <= self.limit:
            return
        if size > self.limit:
            raise StoreFull(f"{self.shown}: a part of {size:,} bytes, and the limit is {self.limit:,}")
        for names in self._catalog.evict(self.limit - size, self._clock(), keep, self._content.pop):
            self._evicted += len(names)
            self.changes.put(PartsRemoved(names))
        if self._catalog.bytes + size > self.limit:
            raise StoreFull(f"{self.shown}: {size:,} bytes do not fit in addition to {self._catalog.bytes:,}")
