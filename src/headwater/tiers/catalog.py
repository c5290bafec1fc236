"""Catalog of a store's parts, and their order of eviction: first KV that no state needs.

Any state, tail or segment may be evicted, a tail also with its state; a run of KV only if no state is at its end and no
run continues it. What saves the least computing time per freed byte and per second since its last use is evicted first.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass

from headwater.tiers.names import ENTRIES, FINGERPRINT, RUN, STATE, TAIL, WHOLE, entries_name, tag_of

MIN_AGE_SECONDS = 1.0  # a clock may be set back
YOUNG_SECONDS = 60.0  # a younger run without a state may be part of another server's copy in progress


@dataclass(slots=True)
class Entry:
    """Catalog entry of a part."""

    bytes: int
    used: float  # time of its last use
    seconds: float  # of its computation
    below: str  # digest of the end of the run that it continues, or of a tail's state; "" of a state or a segment


def digest_of(name: str) -> str:
    """Return the digest of the key up to a part's end."""
    return name[1:].partition("-")[0]


class Catalog:
    """Entries by name, and their bytes."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.bytes = 0
        self.states: Counter[str] = Counter()  # by the tag of their fingerprint

    def add(self, name: str, entry: Entry) -> None:
        """Add a part; one of the same name is replaced."""
        self.remove(name)
        self.entries[name] = entry
        self.bytes += entry.bytes
        self.states[tag_of(name)] += name.startswith(STATE)

    def remove(self, name: str) -> None:
        """Remove a part, if it is there."""
        entry = self.entries.pop(name, None)
        if entry is not None:
            self.bytes -= entry.bytes
            self.states[tag_of(name)] -= name.startswith(STATE)

    def stranded(self) -> list[str]:
        """Return runs of KV that no state needs, tails without a state, entries of neither, and unused fingerprints."""
        return list(_Tree(dict(self.entries), frozenset()).stranded())

    def evict(
        self, most: int, now: float, keep: Set[str], delete: Callable[[str], object] = lambda name: None
    ) -> Iterator[list[str]]:
        """Delete groups of parts in order of eviction until at most `most` bytes are left, and yield each group."""
        for names in self.victims(now, keep):
            if self.bytes <= most:
                return
            for name in names:
                delete(name)
                self.remove(name)
            yield names

    def victims(self, now: float, keep: Set[str] = frozenset()) -> Iterator[list[str]]:
        """Yield groups of names in order of eviction, without `keep`: a segment, a tail, or a state with its tails and
        the runs that only it needed.

        The catalog itself is not changed.
        """
        tree = _Tree(dict(self.entries), keep)
        yield tree.removed([name for name in tree.stranded() if now - self.entries[name].used > YOUNG_SECONDS])
        queue = [(tree.value(name, now), name) for name in self.entries if name[0] in WHOLE and name not in keep]
        heapq.heapify(queue)
        while queue:
            value, name = heapq.heappop(queue)
            if name not in tree.entries:
                continue
            again = tree.value(name, now)
            if again > value and queue and again > queue[0][0]:  # a shared run is now its own, or the reverse
                heapq.heappush(queue, (again, name))
                continue
            if name[0] == TAIL:
                yield tree.removed(tree.with_entries(name))
                continue
            tree.states.discard(digest_of(name))
            tails = [part for tail in tree.tails[digest_of(name)] for part in tree.with_entries(tail)]
            yield tree.removed([name, *tails, *tree.stranded_at(digest_of(name))])


class _Tree:
    """Runs by the digest of their ends: a run continues those whose digest is its `below`.

    Entries of the MTP head are evicted with the run of the same tokens.
    """

    def __init__(self, entries: dict[str, Entry], keep: Set[str]) -> None:
        self.entries, self.keep = entries, keep
        self.states = {digest_of(name) for name in entries if name.startswith(STATE)}
        self.runs: defaultdict[str, set[str]] = defaultdict(set)  # names by the digest of the end
        self.above: defaultdict[str, int] = defaultdict(int)  # number of runs that continue a digest
        self.tails: defaultdict[str, list[str]] = defaultdict(list)  # names by the digest of their state
        for name, entry in entries.items():
            if name.startswith(TAIL):
                self.tails[entry.below].append(name)
            if name.startswith(RUN):
                self.runs[digest_of(name)].add(name)
                self.above[entry.below] += 1

    def value(self, name: str, now: float) -> float:
        """Return the seconds that a part saves per byte evicted with it and per second since its last use."""
        entry = self.entries[name]
        size, digest, others = entry.bytes, digest_of(name), 0
        while self.above[digest] <= others and (digest not in self.states or not others):
            alone = self.runs.get(digest, set())
            if len(alone) != 1:
                break
            run = self.entries[next(iter(alone))]
            size += sum(self.entries[name].bytes for name in self.with_entries(next(iter(alone))))
            digest, others = run.below, 1
        return entry.seconds / max(1, size) / max(MIN_AGE_SECONDS, now - entry.used)

    def stranded(self) -> Iterator[str]:
        """Remove runs that no state and no later run needs, from leaves to roots, and yield their names.

        Tails without a state, entries without a run or a tail, and fingerprints without parts are among them. A tail of
        a prompt that is shorter than a page needs no state.
        """
        tags = {tag_of(name) for name in self.entries if name[0] != FINGERPRINT}
        yield from [name for name in self.entries if name[0] == FINGERPRINT and name[1:] not in tags]
        of_tails = {entries_name(name) for names in self.tails.values() for name in names}
        for name in self.entries:
            if name[0] == ENTRIES and RUN + name[1:] not in self.entries and name not in of_tails:
                yield name
        for digest in self.tails.keys() - self.states - {""}:
            yield from [part for name in self.tails[digest] for part in self.with_entries(name)]
        for digest in list(self.runs):
            yield from self.stranded_at(digest)

    def stranded_at(self, digest: str) -> Iterator[str]:
        """Remove the runs that end at a digest if nothing needs them, then the runs before them; yield their names."""
        while digest and digest not in self.states and not self.above[digest] and self.runs.get(digest):
            if not self.keep.isdisjoint(self.runs[digest]):
                return
            below = ""
            for name in self.runs.pop(digest):
                yield from self.with_entries(name)
                below = self.entries[name].below
                self.above[below] -= 1
            digest = below

    def removed(self, names: list[str]) -> list[str]:
        """Remove parts, so that none is in two groups."""
        for name in names:
            del self.entries[name]
        return names

    def with_entries(self, of: str) -> list[str]:
        """Return the name of a run or a tail, and that of its entries if there are any."""
        return [name for name in (of, entries_name(of)) if name in self.entries]
