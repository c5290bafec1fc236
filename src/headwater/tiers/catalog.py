"""Catalog of a store's parts: what is evicted for room, so that no byte is kept that no state needs.

A state may go anywhere; a run of KV goes only if no state stands at its end and no run goes on from there. The state
goes first that saves the least time for the bytes that go with it, and has not been used for longest.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Set
from dataclasses import dataclass

from headwater.tiers.names import RUN, STATE

LEAST_AGE = 1.0  # seconds; a clock may go back


@dataclass(slots=True)
class Entry:
    """A part."""

    bytes: int
    used: float  # time of its last use
    seconds: float  # that computing it took
    below: str  # digest of the end of the run that it goes on from; "" of a state


def digest_of(name: str) -> str:
    """Return the digest of the key up to a part's end."""
    return name[1:].partition("-")[0]


class Catalog:
    """Entries by name, and their bytes."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.bytes = 0

    def add(self, name: str, entry: Entry) -> None:
        """Add a part; one of the same name is replaced."""
        self.remove(name)
        self.entries[name] = entry
        self.bytes += entry.bytes

    def remove(self, name: str) -> None:
        """Take a part out, if it is there."""
        entry = self.entries.pop(name, None)
        self.bytes -= 0 if entry is None else entry.bytes

    def stranded(self) -> list[str]:
        """Return runs of KV that no state needs."""
        return list(_Tree(dict(self.entries), frozenset()).stranded())

    def victims(self, now: float, keep: Set[str] = frozenset()) -> Iterator[list[str]]:
        """Yield names in the order in which they go, all but some: a state with the runs that none needs after it.

        Nothing is taken out by that.
        """
        tree = _Tree(dict(self.entries), keep)
        yield list(tree.stranded())
        queue = [(tree.value(name, now), name) for name in self.entries if name.startswith(STATE) and name not in keep]
        heapq.heapify(queue)
        while queue:
            value, name = heapq.heappop(queue)
            again = tree.value(name, now)
            if again > value and queue and again > queue[0][0]:  # a run that it shared is its own now, or the reverse
                heapq.heappush(queue, (again, name))
                continue
            tree.states.discard(digest_of(name))
            yield [name, *tree.stranded_at(digest_of(name))]


class _Tree:
    """Runs by the digest of their ends: a run goes on from the ones whose digest is its `below`."""

    def __init__(self, entries: dict[str, Entry], keep: Set[str]) -> None:
        self.entries, self.keep = entries, keep
        self.states = {digest_of(name) for name in entries if name.startswith(STATE)}
        self.runs: defaultdict[str, set[str]] = defaultdict(set)  # names by the digest of the end
        self.above: defaultdict[str, int] = defaultdict(int)  # runs that go on from a digest
        for name, entry in entries.items():
            if name.startswith(RUN):
                self.runs[digest_of(name)].add(name)
                self.above[entry.below] += 1

    def value(self, name: str, now: float) -> float:
        """Return the seconds that a state saves, for the bytes that go with it and the time since its last use."""
        entry = self.entries[name]
        size, digest, others = entry.bytes, digest_of(name), 0
        while self.above[digest] <= others and (digest not in self.states or not others):
            alone = self.runs.get(digest, set())
            if len(alone) != 1:
                break
            run = self.entries[next(iter(alone))]
            size += run.bytes
            digest, others = run.below, 1
        return entry.seconds / size / max(LEAST_AGE, now - entry.used)

    def stranded(self) -> Iterator[str]:
        """Yield runs on which nothing stands, from leaves to roots; they are taken out."""
        for digest in list(self.runs):
            yield from self.stranded_at(digest)

    def stranded_at(self, digest: str) -> Iterator[str]:
        """Yield the runs that end at a digest if nothing stands there, then those that they go on from."""
        while digest and digest not in self.states and not self.above[digest] and self.runs.get(digest):
            if not self.keep.isdisjoint(self.runs[digest]):
                return
            below = ""
            for name in self.runs.pop(digest):
                yield name
                below = self.entries[name].below
                self.above[below] -= 1
            digest = below
