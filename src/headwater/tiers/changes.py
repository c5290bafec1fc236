"""Changes of a store's content: stored prefixes and segments, and removed parts.

The thread that made a change notes it, and another one reads it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headwater.cache.segments.store import SegmentKey


@dataclass(frozen=True, slots=True)
class PrefixStored:
    """All parts of a prefix are there. `names`: its runs of KV in their order, with entries between them, its state."""

    namespace: str
    key: bytes  # of the index, up to its end
    names: Sequence[str]


@dataclass(frozen=True, slots=True)
class SegmentsStored:
    """Segments are there, each of which is one part."""

    names: Sequence[str]
    keys: Sequence[SegmentKey]


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """One part is there, by digests of its blocks, as KV events have them; found when the store was listed."""

    name: str
    end: int  # units of the index; of a segment, its tokens
    parent: int | None  # digest of the block before a run; None at a prompt's begin
    digests: Sequence[int]  # of a run's blocks; of a state, that of the block after which it stands; of a segment


@dataclass(frozen=True, slots=True)
class PartsRemoved:
    """Parts were removed; unknown names are ignored."""

    names: Sequence[str]


@dataclass(frozen=True, slots=True)
class AllForgotten:
    """The whole content of the store became unknown."""


Change = PrefixStored | SegmentsStored | BlocksStored | PartsRemoved | AllForgotten


class StoreChanges:
    """Receiver of changes. This one ignores them."""

    def put(self, change: Change) -> None:
        """Note a change."""


class StoreLog(StoreChanges):
    """Log of changes until they are read. It ignores changes before it is opened."""

    def __init__(self) -> None:
        self.is_open = False
        self.wake: Callable[[], None] = lambda: None  # called after each change
        self._log: deque[Change] = deque()

    def put(self, change: Change) -> None:
        if self.is_open:
            self._log.append(change)
            self.wake()

    def open(self) -> None:
        """Log changes from now on."""
        self.is_open = True

    def close(self) -> None:
        """Ignore further changes; the log's reader forgets all earlier ones."""
        self.put(AllForgotten())
        self.is_open = False

    def take(self) -> list[Change]:
        """Return the changes since the last call."""
        taken = []
        while self._log:
            taken.append(self._log.popleft())
        return taken


IGNORED = StoreChanges()
