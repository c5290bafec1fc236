"""Tails: the tokens after a checkpoint, at most a page, with all that a request needs to resume after any of them.

A row of a tail does not depend on later rows, so a tail serves each prompt that begins like it, up to where they part.
Only the hidden row after its last token, from which the next token is sampled, serves a prompt that ends there.
Tails of a node are in the order of their token ids: the longest common beginning is next to where a prompt would stand.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from headwater.cache.index import Index
from headwater.cache.node import Node
from headwater.cache.pool import Pool
from headwater.plan import CacheLayout, Tail


@dataclass(slots=True, eq=False)
class StoredTail:
    """One tail, of a node whose end has a checkpoint, or of any node if work can resume at every page."""

    node: Node
    ids: bytes = field(repr=False)  # its token ids
    tokens: int
    kv: Sequence[int]  # the page with their KV; none for models without attention
    rows: Sequence[int]  # pages with its hidden row, then the inputs of recurrences and windows
    has_hidden: bool  # it is the end of a prompt or an answer
    before: StoredTail | None = None  # the end of the turn after which this one's session continued
    used: int = 0  # tick of its last use
    pins: int = 0  # open plans that read it

    @property
    def pages(self) -> int:
        return len(self.kv) + len(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class MidPage:
    """Tokens after a node's end that a request need not compute: those of a tail, or the first of a cached page."""

    tokens: int
    node: Node  # of the tail, or the one whose edge has the page
    tail: StoredTail | None = None
    page: Sequence[int] = ()  # the cached page
    is_whole: bool = False  # the request needs no row: all its tokens are there, and the hidden row after the last

    def as_plan(self, start: int) -> Tail:
        """Return it as a plan names it, after a checkpoint at position `start`."""
        if self.tail is None:
            return Tail(start, start + self.tokens, self.page, ())
        is_all = self.tail.tokens == self.tokens
        return Tail(start, start + self.tokens, self.tail.kv, self.tail.rows, self.tail.has_hidden and is_all)


class Tails:
    """The tails of all nodes. Their pages are taken from the region of states."""

    def __init__(self, layout: CacheLayout, index: Index, pool: Pool) -> None:
        self._layout, self._index, self._pool = layout, index, pool
        self.every_page = layout.every_page
        self.token_bytes = layout.unit_bytes // layout.unit_tokens  # of an id in a key
        self.pages = 0
        self.saved = self.evicted = self.uses = 0
        self._pinned_pages = 0
        self._order = OrderedDict[StoredTail, None]()  # the least recently used first

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[StoredTail]:
        return iter(self._order)

    def evictable_beside(self, mid_page: MidPage | None) -> int:
        """Return the pages of tails that neither an open plan reads, nor the next one, which is to read `mid_page`."""
        read = None if mid_page is None else mid_page.tail
        return self.pages - self._pinned_pages - (0 if read is None or read.pins else read.pages)

    def length(self, end: int) -> int:
        """Return the number of tokens of a tail that ends at a position: 1 to a page."""
        return (end - 1) % self._layout.unit_tokens + 1

    def pages_of(self, tokens: int) -> int:
        """Return the pages of a tail: of KV and of rows."""
        return self._layout.kv_pages_per_unit + self._layout.tail_pages[tokens]

    def take(self, tokens: int) -> tuple[array[int], array[int]]:
        """Take the pages of a tail from the pool, of KV and of rows."""
        pages = self._pool.states.take(self.pages_of(tokens))
        n_kv = self._layout.kv_pages_per_unit
        return pages[:n_kv], pages[n_kv:]

    # ---- reading

    def longest(self, node: Node, ids: bytes, is_whole: bool) -> MidPage | None:
        """Return what the tails of a node have of the token ids that follow its end in a prompt; None if nothing.

        is_whole: the prompt ends with these ids, so its last one is computed, unless there is the hidden row after it.
        """
        best, tokens = None, 0
        at = bisect_right(node.tails, ids, key=_ids_of)
        for tail in node.tails[max(0, at - 1) : at + 1]:
            common = common_bytes(tail.ids, ids) // self.token_bytes
            if is_whole and tail.has_hidden and tail.ids == ids:
                return MidPage(common, node, tail, is_whole=True)
            common = min(common, len(ids) // self.token_bytes - is_whole)
            if common > tokens:
                best, tokens = tail, common
        if best is None:
            return None
        exact = ids[: tokens * self.token_bytes]
        at = bisect_left(node.tails, exact, key=_ids_of)  # the one that ends there, if any, may have the hidden row
        return MidPage(tokens, node, node.tails[at] if node.tails[at].ids == exact else best)

    def first(self) -> StoredTail | None:
        """Return the least recently used tail that no open plan reads; None if there is none."""
        return next((tail for tail in self._order if not tail.pins), None)

    # ---- changes

    def add(self, tail: StoredTail, now: int) -> bool:
        """Store a tail, and remove those of its node that it covers. False: another covers it, and its pages are free.

        A tail covers one of which it has all tokens, unless that one has a hidden row that it lacks. One that an open
        plan reads is not replaced.
        """
        tails = tail.node.tails
        at = bisect_right(tails, tail.ids, key=_ids_of)
        if at < len(tails) and tails[at].ids.startswith(tail.ids) and not tail.has_hidden:
            self.give(tail)
            return False
        same = tails[at - 1] if at and tails[at - 1].ids == tail.ids else None
        if same is not None and (same.has_hidden or same.pins or not tail.has_hidden):
            self.give(tail)
            return False
        for other in tails[:at]:
            if tail.ids.startswith(other.ids) and not other.pins and (other.ids == tail.ids or not other.has_hidden):
                self.remove(other)
        at = bisect_right(tail.node.tails, tail.ids, key=_ids_of)
        tail.node.tails = (*tail.node.tails[:at], tail, *tail.node.tails[at:])
        self._index.version += 1
        self.pages += tail.pages
        self.saved += 1
        tail.used = now
        self._order[tail] = None
        return True

    def pin(self, tail: StoredTail, now: int) -> None:
        """Protect a tail that an open plan reads; it counts as just used."""
        self.uses += 1
        tail.used = now
        self._order.move_to_end(tail)
        tail.pins += 1
        if tail.pins == 1:
            self._pinned_pages += tail.pages

    def unpin(self, tail: StoredTail) -> None:
        """Undo one `pin`."""
        tail.pins -= 1
        if not tail.pins:
            self._pinned_pages -= tail.pages

    def remove(self, tail: StoredTail) -> None:
        """Remove a tail that no open plan reads."""
        assert not tail.pins, f"{tail} is read"
        tail.node.tails = tuple(other for other in tail.node.tails if other is not tail)
        del self._order[tail]
        self._index.version += 1
        self.pages -= tail.pages
        tail.before = None
        self.give(tail)

    def evict(self, tail: StoredTail) -> None:
        """Remove a tail to make room."""
        self.evicted += 1
        self.remove(tail)
        self._index.tidy(tail.node)

    def drop(self, node: Node) -> None:
        """Remove the tails of a node whose checkpoint, or end, is given up."""
        for tail in node.tails:
            self.remove(tail)

    def supersede(self, tail: StoredTail | None) -> None:
        """Let the ends of a session's earlier turns, from `tail` back, be evicted next: it has continued after them.

        They are used once more only if another session branches off there, as the choices after a question do.
        """
        while tail is not None and tail in self._order:
            tail.used = 0
            self._order.move_to_end(tail, last=False)
            tail = tail.before

    def may_begin_at(self, node: Node) -> bool:
        """Return whether a request can resume at the end of a node."""
        return self.every_page or not node.end or node.checkpoint is not None

    def give(self, tail: Tail | StoredTail) -> None:
        """Give the pages of a tail that is not stored back to the pool."""
        self._pool.states.give(tail.kv)
        self._pool.states.give(tail.rows)


def _ids_of(tail: StoredTail) -> bytes:
    return tail.ids


def common_bytes(a: bytes, b: bytes) -> int:
    """Return the length of the longest common beginning."""
    low, high = 0, min(len(a), len(b)) + 1
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
