"""Tails: the tokens after a checkpoint, at most a page, with all that a request needs to resume after any of them.

A row of a tail does not depend on later rows, so a tail serves each prompt that begins like it, up to where they part.
Only the hidden row after its last token, from which the next token is sampled, serves a prompt that ends there.
Tails of a node are in the order of their token ids: the longest common beginning is next to where a prompt would stand.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from headwater.cache.eviction.base.policy import Eviction
from headwater.cache.index import Index
from headwater.cache.lease import Lease, OpenPlan
from headwater.cache.node import MidPage, Node, StoredTail
from headwater.cache.pool import Pool
from headwater.plan import CacheLayout, Draft, Tail

MAX_COPIED_TAILS = 8  # of a checkpoint whose next prompt is not known

MakeRoom = Callable[[int, float, int, bool, int], bool]  # see `Evictor.make_room_for_tail`


class Tails:
    """The tails of all nodes. Their pages are taken from the region of states."""

    def __init__(self, layout: CacheLayout, index: Index, pool: Pool, policy: Eviction) -> None:
        self._layout, self._index, self._pool, self._policy = layout, index, pool, policy
        self._now = 0  # tick of the latest leg
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

    # ---- reading

    def longest(self, node: Node, ids: bytes, is_whole: bool) -> MidPage | None:
        """Return what the tails of a node have of the token ids that follow its end in a prompt; None if nothing.

        is_whole: the prompt ends with these ids, so its last one is computed, unless there is the hidden row after it.
        """
        best, most = None, 0
        at = bisect_right(node.tails, ids, key=_ids_of)
        for tail in node.tails[max(0, at - 1) : at + 1]:
            common = common_bytes(tail.ids, ids) // self.token_bytes
            if is_whole and tail.has_hidden and tail.ids == ids:
                return MidPage(common, node, tail, is_whole=True)
            common = min(common, len(ids) // self.token_bytes - is_whole)
            if common > most:
                best, most = tail, common
        is_long = most >= self._layout.min_tail_tokens
        for tokens in range(most, most - 1 if is_long else 0, -1):
            whole = self._exact(node, ids[: tokens * self.token_bytes])
            if whole is not None:  # it may have the hidden row
                return MidPage(tokens, node, whole)
        return MidPage(most, node, best) if is_long else None

    def hold(self, node: Node, ids: bytes) -> Sequence[StoredTail]:
        """Pin the tails of a node that are to be copied: the one with most of these token ids, or the last used ones.

        ids: those that follow in a prompt, if it is known.
        """
        longest = self.longest(node, ids, is_whole=False)
        found = [] if longest is None or longest.tail is None else [longest.tail]
        if not ids:
            found = sorted(node.tails, key=lambda tail: tail.used, reverse=True)[:MAX_COPIED_TAILS]
        for tail in found:
            self._pin(tail)
        return found

    def as_plan(self, tail: StoredTail, ids: bytes) -> Tail:
        """Return a tail, or its beginning that these token ids share, as a copy names it."""
        n = common_bytes(tail.ids, ids) // self.token_bytes if ids else tail.tokens
        start, rows = tail.node.end * self._layout.unit_tokens, tail.rows[: self._layout.tail_pages[n]]
        has_hidden = tail.has_hidden and n == tail.tokens
        return Tail(start, start + n, tail.kv, rows, has_hidden, tail.ids[: n * self.token_bytes])

    def _exact(self, node: Node, ids: bytes) -> StoredTail | None:
        """Return the tail of a node that has exactly these token ids."""
        at = bisect_left(node.tails, ids, key=_ids_of)
        return node.tails[at] if at < len(node.tails) and node.tails[at].ids == ids else None

    def first(self) -> StoredTail | None:
        """Return the least recently used tail that no open plan reads; None if there is none."""
        return next((tail for tail in self._order if not tail.pins), None)

    # ---- legs

    def take(self, ends: tuple[int, ...], draft: Draft, now: int, make_room: MakeRoom) -> tuple[Tail, ...]:
        """Take the pages of the tails that a leg writes; those that are not worth the room are left out."""
        self._now, tails = now, tuple[Tail, ...]()
        n_kv = self._layout.kv_pages_per_unit
        for end in ends:
            is_last = draft.saving.ends and end == draft.end
            tail = Tail(end - self.length(end), end, (), (), has_hidden=is_last)
            if make_room(*self.value(tail), is_last and draft.saving.is_passed, now):
                pages = self._pool.states.take(self.pages_of(tail.end - tail.start))
                tails += (replace(tail, kv=pages[:n_kv], rows=pages[n_kv:]),)
        return tails

    def value(self, tail: Tail) -> tuple[int, float, int]:
        """Return the pages of a tail, the FLOPs a page that it saves, and the position at which it begins."""
        pages = self.pages_of(tail.end - tail.start)
        return pages, self._layout.flops.between(tail.start, tail.end + tail.has_hidden) / pages, tail.start

    def pin(self, mid_page: MidPage | None, opened: OpenPlan, lease: Lease, now: int) -> None:
        """Protect the content with the tokens before a start in mid-page, if there is one, until the plan is closed."""
        if mid_page is None:
            return
        opened.mid_page, opened.kept = mid_page, mid_page.as_plan(opened.draft.resumes_at)
        tail = mid_page.tail
        if tail is None:
            self._index.pin(mid_page.node)
            return
        self.uses += 1
        self._now = now
        if opened.draft.sharing.counts:
            self._watched(tail, mid_page.tokens / tail.tokens)
        tail.used = now
        tail.hits += opened.draft.sharing.counts
        self._order.move_to_end(tail)
        self._pin(tail)
        if mid_page.tokens == tail.tokens:
            lease.continued = tail

    def unpin(self, opened: OpenPlan) -> None:
        """Undo the `pin` of a plan that is closed."""
        if opened.mid_page is None:
            return
        tail = opened.mid_page.tail
        if tail is None:
            self._index.unpin(opened.mid_page.node)
        else:
            self.release((tail,))

    def _pin(self, tail: StoredTail) -> None:
        tail.pins += 1
        if tail.pins == 1:
            self._pinned_pages += tail.pages

    def release(self, tails: Sequence[StoredTail]) -> None:
        """Unpin tails."""
        for tail in tails:
            tail.pins -= 1
            if not tail.pins:
                self._pinned_pages -= tail.pages

    def keep(self, opened: OpenPlan, lease: Lease, now: int) -> None:
        """Store the tails that a leg wrote, except those without a checkpoint before them.

        If the leg ends a prompt or an answer, the end of its session's turn before is the next to be evicted.
        """
        draft = opened.draft
        if draft.saving.ends and draft.start < draft.end:
            self._supersede(lease.continued)
        for tail in opened.tails:
            node = self._node_at(lease.node, tail.start // self._layout.unit_tokens)
            if node is None or not self.may_begin_at(node):
                self.give(tail)
                continue
            ids = draft.key[tail.start * self.token_bytes : tail.end * self.token_bytes]
            tokens, (_, worth, _) = tail.end - tail.start, self.value(tail)
            stored = StoredTail(node, ids, tokens, tail.kv, tail.rows, tail.has_hidden, worth)
            if not self.add(stored, now):
                self._index.tidy(node)

    def _node_at(self, last: Node | None, end: int) -> Node | None:
        """Return the node at depth `end` on the path to `last`. If work can resume at every page, one is made."""
        if last is None or last.end < end:
            return None
        if self.every_page and end:
            return self._index.boundary(last, end)
        return next((node for node in last.climb() if node.end == end), None)

    def abandon(self, opened: OpenPlan) -> None:
        """Give back the pages of tails that a leg was to write; it writes none."""
        for tail in opened.tails:
            self.give(tail)
        opened.tails = ()

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

    def remove(self, tail: StoredTail) -> None:
        """Remove a tail that no open plan reads."""
        assert not tail.pins, f"{tail} is read"
        self._watched(tail, 0.0)
        tail.node.tails = tuple(other for other in tail.node.tails if other is not tail)
        del self._order[tail]
        self._index.version += 1
        self.pages -= tail.pages
        self.give(tail)

    def evict(self, tail: StoredTail) -> None:
        """Remove a tail to make room."""
        self.evicted += 1
        self.remove(tail)
        self._index.tidy(tail.node)

    def _watched(self, tail: StoredTail, used: float) -> None:
        """Report the time since a tail's last use to the policy, and the share of its tokens that a request uses."""
        if tail.used:
            start = tail.node.end * self._layout.unit_tokens
            self._policy.tail_watched(start, tail.hits, max(0, self._now - tail.used), used)

    def drop(self, node: Node) -> None:
        """Remove the tails of a node whose checkpoint, or end, is given up."""
        for tail in node.tails:
            self.remove(tail)

    def _supersede(self, tail: StoredTail | None) -> None:
        """Let the end of a session's earlier turn be evicted next, if it has one: the session continued after it.

        One after which several requests resumed is kept as others are: sessions part there, as after a question.
        """
        if tail is not None and tail in self._order and tail.has_hidden and tail.hits <= 1:
            tail.used = 0
            self._order.move_to_end(tail, last=False)

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
