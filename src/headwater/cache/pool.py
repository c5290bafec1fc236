"""Free page ids: one region for KV and states, or two, of fixed sizes or trading pages in whole steps."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from headwater.plan import CacheLayout

Shortage = tuple[int, int, int]  # pages needed, free, and evictable


class Region:
    """A set of page ids with a stack of free ones: the page freed last is taken first, as CPU caches may have it."""

    def __init__(self, first: int, last: int) -> None:
        self.size = last - first
        self._stack = array("i", reversed(range(first, last)))

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._stack)

    def take(self, count: int) -> array[int]:
        """Take `count` page ids. Raises ValueError if fewer are free: the caller checks before."""
        if count == 0:
            return array("i")
        if count > len(self._stack):
            raise ValueError(f"{count} pages are needed, {len(self._stack)} are free")
        taken = self._stack[-count:]
        del self._stack[-count:]
        return taken

    def upcoming(self, count: int) -> array[int]:
        """Return the page ids that are taken next, at most `count`."""
        return self._stack[max(0, len(self._stack) - count) :]

    def give(self, pages: Sequence[int]) -> None:
        """Return pages to the region."""
        self._stack.extend(pages)

    def free_ids(self) -> tuple[int, ...]:
        """Return the free page ids."""
        return tuple(self._stack)


class Pool:
    """The arena's page ids: `kv` and `states` are one region, or two if the layout has a state fraction.

    Elastic regions (the Alibaba article, "elastic memory pool") trade free pages in steps of `layout.elastic_pages`.
    In the article a step is one physical page of the GPU's virtual memory; here any free pages make one.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self.step = 0 if layout.state_fraction is None else layout.elastic_pages  # 0: nothing is traded
        if layout.state_fraction is None:
            self.kv = self.states = Region(0, layout.n_pages)
            self._of_states = bytearray()
        else:
            n_kv = layout.n_pages - round(layout.n_pages * layout.state_fraction)
            self.kv, self.states = Region(0, n_kv), Region(n_kv, layout.n_pages)
            self._of_states = bytearray(n_kv) + bytearray(b"\1") * (layout.n_pages - n_kv)
        self._lent = array("i")

    @property
    def split(self) -> bool:
        """True if KV and states have separate regions."""
        return self.kv is not self.states

    @property
    def free(self) -> int:
        """Number of free pages in all regions."""
        return self.kv.free + self.states.free if self.split else self.kv.free

    @property
    def size(self) -> int:
        """Number of pages of the pool, without those that it has lent."""
        return self.kv.size + self.states.size if self.split else self.kv.size

    @property
    def n_lent(self) -> int:
        """Number of pages that are lent, of which the memory belongs to another pool."""
        return len(self._lent)

    def lend(self, count: int) -> array[int]:
        """Take free pages out of one region, and return their ids. Raises ValueError if fewer are free."""
        pages = self.kv.take(count)
        self.kv.size -= count
        self._lent.extend(pages)
        return pages

    def get_back(self, count: int) -> None:
        """Add at most `n_lent` pages that were lent to the free ones."""
        pages = self._lent[len(self._lent) - count :]
        del self._lent[len(self._lent) - count :]
        self.kv.size += count
        self.kv.give(pages)

    def shortage(self, kv: int, states: int, evictable: tuple[int, int] = (0, 0)) -> Shortage | None:
        """Return the shortage for `kv` and `states` pages after evicting `evictable` ones; None if there is none."""
        if not self.split:
            short = (kv + states, self.kv.free, sum(evictable))
            return short if short[0] > short[1] + short[2] else None
        free = self.kv.free, self.states.free
        needs = kv, states
        spare = [free[at] + evictable[at] - needs[at] for at in (0, 1)]
        for at in (0, 1):
            lent = max(0, spare[1 - at]) // self.step * self.step if self.step else 0
            if spare[at] + lent < 0:
                return needs[at], free[at], evictable[at] + lent
        return None

    def trade(self, kv: int, states: int) -> None:
        """Move free pages, in whole steps, from the region that can spare some to the one that has too few."""
        sides = (self.kv, kv), (self.states, states)
        for (poor, wanted), (rich, kept) in (sides, sides[::-1]):
            steps = min(-((poor.free - wanted) // self.step), (rich.free - kept) // self.step)
            if steps > 0:
                pages = rich.take(steps * self.step)
                for page in pages:
                    self._of_states[page] = poor is self.states
                rich.size -= len(pages)
                poor.size += len(pages)
                poor.give(pages)

    def check(self, kv: list[int], states: list[int]) -> None:
        """Verify that every page has exactly one owner or is free, in its own region. kv, states: owned pages."""
        if not self.split:
            _check_region(self.kv, [*kv, *states])
            return
        for region, owned in ((self.kv, kv), (self.states, states)):
            for page in (*region.free_ids(), *owned):
                assert self._of_states[page] == (region is self.states), f"page {page} belongs to the other region"
            _check_region(region, owned)
        total, pages = self.kv.size + self.states.size, len(self._of_states)
        assert total == pages, f"regions of {self.kv.size} and {self.states.size} pages in an arena of {pages}"


def _check_region(region: Region, owned: list[int]) -> None:
    free = region.free_ids()
    assert len(set(free)) == len(free), "a page is free twice"
    assert len(set(owned)) == len(owned), "a page has two owners"
    assert not set(free) & set(owned), "a page is both free and owned"
    assert len(free) + len(owned) == region.size, f"{region.size} pages, but {len(free)} free and {len(owned)} owned"
