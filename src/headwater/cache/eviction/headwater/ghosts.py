"""Ghost entries: evicted checkpoints still teach, and have their uses again when they are taken again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from headwater.cache.eviction.base.rows import MAX_SLICE_ROWS
from headwater.cache.eviction.headwater.rates import Aging, ReuseRates

SLACK_FRACTION = 8  # up to 1/8 more entries than the limit are kept between two renewals
MAX_FORGOTTEN = 256  # entries at once: about as long as a slice of rows takes
WATCHED_FRACTION = 4  # 1/4 of the entries, but at least a slice of rows, is watched at each renewal


def prefix_ids(key: bytes, unit_bytes: int, before: int) -> list[int]:
    """Return an id for the prefix that ends at each unit of `key`. before: id of the prefix that the key continues."""
    ids = []
    for at in range(0, len(key) - unit_bytes + 1, unit_bytes):
        before = hash((before, key[at : at + unit_bytes]))
        ids.append(before)
    return ids


class Ghosts(Aging[int]):
    """Class, uses and last use of evicted checkpoints, by the id of their prefix.

    Entries are forgotten in the order of their last event: the eviction, or a use since.
    """

    def __init__(self, rates: ReuseRates) -> None:
        super().__init__(rates)
        self.row_of: OrderedDict[int, int] = OrderedDict()  # in the order of the last event
        self._unwatched = 0  # rows that are to be watched before others

    def put(self, prefix: int, kind: int, uses: int, time: int, now: int) -> None:
        """Add a checkpoint that is evicted now, whose time until then is counted elsewhere. time: of its last use."""
        if prefix in self.row_of:
            self.remove(prefix)
        self.add(prefix, (kind, uses, time, max(0, now - time)))

    def found(self, prefixes: list[int]) -> list[int]:
        """Return the row of each of the prefixes that has one, the last one first."""
        known = self.row_of.keys() & prefixes
        return [self.row_of[prefix] for prefix in reversed(prefixes) if prefix in known] if known else []

    def use(self, row: int, kind: int, uses: int, now: int, counts: bool = True) -> None:
        super().use(row, kind, uses, now, counts)
        self.row_of.move_to_end(self.keys[row])

    def take(self, prefix: int, now: int) -> int:
        """Remove the entry of a checkpoint that is taken again; return its uses, 0 if there is no entry."""
        row = self.row_of.get(prefix)
        if row is None:
            return 0
        uses: int = self.uses[row]
        self.end_span(row, now)
        self.remove(prefix)
        return uses

    def renew(self, limit: int, now: int) -> Iterator[int]:
        """Count time until now. If the entries exceed the limit by more than 1/8, forget the oldest ones.

        Yields the rows handled. Many entries are watched in turns: the time of the others counts later.
        """
        rows = len(self) if len(self) <= MAX_SLICE_ROWS else max(MAX_SLICE_ROWS, len(self) // WATCHED_FRACTION)
        while rows > 0 and len(self):
            if not 0 < self._unwatched <= len(self):
                self._unwatched = len(self)
            stop = self._unwatched
            self._unwatched = max(0, stop - min(rows, MAX_SLICE_ROWS))
            self.watch(slice(self._unwatched, stop), now)
            rows -= stop - self._unwatched
            yield stop - self._unwatched
        if len(self) > limit + limit // SLACK_FRACTION:
            while (excess := len(self) - limit) > 0:
                for _ in range(min(excess, MAX_FORGOTTEN)):
                    prefix = next(iter(self.row_of))
                    self.end_span(self.row_of[prefix], now)
                    self.remove(prefix)
                yield MAX_SLICE_ROWS * min(excess, MAX_FORGOTTEN) // MAX_FORGOTTEN
