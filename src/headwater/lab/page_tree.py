"""Prefix tree of a trace, and where each request's overlap with the earlier ones ends. All KV is kept."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

from headwater.cache.positions.online import Exchange, OnlineTree
from headwater.traces.request import Request, Trace


@dataclass(frozen=True, slots=True)
class Passage:
    """Pages at which one request's overlap and its prompt end, numbered as in `PageTree`; 0 is the root."""

    overlap: int  # the last page that an earlier request has, too
    end: int  # the last full page of the prompt that leaves one token to compute


class PageTree:
    """Tree of all pages of a trace's prompts and known answers. Page 0 is the root, which is empty.

    parents: of each page, by number. depths: tokens from the beginning to each page's end. passages: of the requests.
    """

    def __init__(self, trace: Trace, order: Iterable[Request], page: int) -> None:
        """Enter the requests in `order`. Pages have `page` tokens, or a block of the trace if that is longer."""
        self.page = max(1, page // trace.block_tokens) * trace.block_tokens
        self.parents, self.depths = [0], [0]
        self.passages: list[Passage] = []
        found: dict[tuple[int, bytes, str], int] = {}
        step = self.page // trace.block_tokens * trace.element_bytes
        for request in order:
            last = max(0, request.prompt_tokens - 1) // self.page
            text = trace.key(request, request.known_tokens)
            overlap = end = at = 0
            new = False
            for i in range(len(text) // step):
                key = at, text[i * step : (i + 1) * step], "" if at else request.namespace
                number = found.get(key)
                if number is None:
                    new = True
                    number = found[key] = len(self.parents)
                    self.parents.append(at)
                    self.depths.append(self.depths[at] + self.page)
                at = number
                if i < last:
                    end = at
                    overlap = overlap if new else at
            self.passages.append(Passage(overlap, end))


class Growth:
    """`OnlineTree` that gets the nodes of a page tree as requests reach them: ends of overlaps and of prompts."""

    def __init__(self, pages: PageTree, rule: OnlineTree) -> None:
        self.rule = rule
        self._pages = pages
        n = len(pages.parents)
        size, free = [1] * n, [1] * n
        for page in range(n - 1, 0, -1):
            size[pages.parents[page]] += size[page]
        self._at = [0] * n  # preorder: a page's descendants are the `size` after it
        for page in range(1, n):
            above = pages.parents[page]
            self._at[page] = free[above]
            free[page] = free[above] + 1
            free[above] += size[page]
        self._size = size
        self._present = [0]  # preorder places of pages that are nodes, ascending
        self._node = {0: 0}  # by preorder place

    def request(self, passage: Passage) -> Exchange:
        """Add the request's nodes, and let the rule exchange checkpoints."""
        overlap = self._enter(passage.overlap)
        return self.rule.request(overlap, self._enter(passage.end))

    def _enter(self, page: int) -> int:
        place = self._at[page]
        if place not in self._node:
            after = bisect_left(self._present, place)
            depth = self._pages.depths[page]
            if after < len(self._present) and self._present[after] < place + self._size[page]:
                self._node[place] = self.rule.split(self._node[self._present[after]], depth)
            else:
                self._node[place] = self.rule.add(self._nearest(page), depth)
            insort(self._present, place)
        return self._node[place]

    def _nearest(self, page: int) -> int:
        while (place := self._at[page]) not in self._node:
            page = self._pages.parents[page]
        return self._node[place]
