"""What was given up for memory, as far as it is remembered: it tells `evicted` from `cold` and `diverged`."""

from __future__ import annotations

CAPACITY = 4096


class Losses:
    """The first units of dropped edges, each with its namespace and position; the oldest are forgotten."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._entries: dict[tuple[str, int, bytes], None] = {}

    def add(self, namespace: str, position: int, unit: bytes) -> None:
        """An edge of `namespace` that began at unit `position` with the bytes `unit` was dropped."""
        self._entries.pop((namespace, position, unit), None)
        self._entries[namespace, position, unit] = None
        if len(self._entries) > self._capacity:
            del self._entries[next(iter(self._entries))]

    def __contains__(self, entry: tuple[str, int, bytes]) -> bool:
        return entry in self._entries

    def __len__(self) -> int:
        return len(self._entries)
