"""Page ids that are free. One region for everything, or two of fixed size; which is which is set once."""

from __future__ import annotations

from array import array

from headwater.types import CacheLayout


class Region:
    """A run of page ids and those of them that nobody owns, as a stack: what was freed last is warm."""

    def __init__(self, first: int, last: int) -> None:
        self.ids = range(first, last)
        self._stack = array("i", reversed(self.ids))

    @property
    def free(self) -> int:
        """Pages that nobody owns."""
        return len(self._stack)

    def take(self, count: int) -> array[int]:
        """`count` page ids. The caller has made sure that there are as many; ValueError if not."""
        if count == 0:
            return array("i")
        if count > len(self._stack):
            raise ValueError(f"{count} pages asked for, {len(self._stack)} are free")
        taken = self._stack[-count:]
        del self._stack[-count:]
        return taken

    def give(self, pages: array[int] | tuple[int, ...]) -> None:
        """Pages that their owner needs no more."""
        self._stack.extend(pages)

    def free_ids(self) -> tuple[int, ...]:
        return tuple(self._stack)


class Pool:
    """The arena's page ids: `kv` and `states` are one region, or two where the layout has a state fraction."""

    def __init__(self, layout: CacheLayout) -> None:
        if layout.state_fraction is None:
            self.kv = self.states = Region(0, layout.n_pages)
        else:
            n_kv = layout.n_pages - round(layout.n_pages * layout.state_fraction)
            self.kv, self.states = Region(0, n_kv), Region(n_kv, layout.n_pages)

    @property
    def split(self) -> bool:
        return self.kv is not self.states

    @property
    def free(self) -> int:
        return self.kv.free + self.states.free if self.split else self.kv.free

    def check(self, owned: list[int]) -> None:
        """Every page has exactly one owner or is free in the region it belongs to."""
        regions = (self.kv, self.states) if self.split else (self.kv,)
        free: list[int] = []
        for region in regions:
            ids = region.free_ids()
            assert all(page in region.ids for page in ids), f"a free page lies outside of {region.ids}"
            free += ids
        total = sum(len(region.ids) for region in regions)
        assert len(set(free)) == len(free), "a page is free twice"
        assert len(set(owned)) == len(owned), "a page has two owners"
        assert not set(free) & set(owned), "a page is both free and owned"
        assert len(free) + len(owned) == total, f"{total} pages, but {len(free)} free and {len(owned)} owned"
