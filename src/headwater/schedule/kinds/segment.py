"""Segments of prompts: the stored ones that a request is composed of, and builds of those that are missing."""

from __future__ import annotations

from collections.abc import Sequence as Ids

from headwater.cache.prefix_cache import PrefixCache
from headwater.cache.segments.compose import METHODS, Widths, usable, whole_segments
from headwater.cache.segments.store import SegmentKey, StoredSegment
from headwater.errors import ConfigError, OutOfPages
from headwater.plan import Plan
from headwater.request import Fidelity, Generation, SamplingParams, Span
from headwater.schedule.kinds.request import Composition, Request
from headwater.schedule.limits import Budget
from headwater.schedule.sequence import Legs, Purpose, Sequence, key_of


class SegmentBuild(Sequence):
    """Building a segment: its tokens are prefilled alone and stored, up to the tail that each use recomputes."""

    purpose = Purpose.SEGMENT

    def __init__(self, id: int, key: SegmentKey, cache: PrefixCache) -> None:
        super().__init__(id, Generation(key.token_ids, SamplingParams(), key.namespace))
        self._cache, self._key = cache, key
        self._end = key.tokens - key.widths.tail

    @property
    def n_prompt(self) -> int:
        return self._end

    def may_stop_at(self, position: int, unit: int) -> bool:
        """A build leaves no checkpoints in the index."""
        return False

    def next_leg(self, legs: Legs, budget: Budget) -> Plan | None:
        """Reserve a leg that ends a number of pages after the head, from which recurrences are cut into chunks.

        So a segment has the same bits whatever budgets its steps had. A small budget is for the head alone.
        """
        page, head, end = self._cache.layout.page_size, self._key.widths.head, self._end
        if end - self.computed > budget.tokens:
            end = head + (self.computed + budget.tokens - head) // page * page
        if end <= self.computed:
            return None
        self.planned = end
        return self._cache.segments.plan(self.id, self.computed, end)

    def segments_of(self, plan: Plan) -> tuple[StoredSegment, ...]:
        stored = self._cache.segments.find(self._key)
        return () if stored is None or not stored.ready else (stored,)


class Composing:
    """Choice of stored segments for requests, and start of builds. This one composes and builds nothing."""

    def prepare(self, seq: Request) -> tuple[list[SegmentKey], bool]:
        return [], False

    def unused(self, seq: Request) -> list[SegmentKey]:
        return []

    def wanted(self, ids: Ids[int], namespace: str) -> SegmentKey | None:
        raise ConfigError("no segments are stored: the cache is off")

    def find(self, key: SegmentKey) -> StoredSegment | None:
        return None

    def build(self, id: int, key: SegmentKey) -> SegmentBuild | None:
        return None


class Composer(Composing):
    """Chooses stored segments for requests. It has no state beside the cache's.

    `conv_taps`: taps of the widest convolution before a recurrence; 1 if there is none.
    """

    def __init__(self, cache: PrefixCache, conv_taps: int) -> None:
        self._cache, self._conv_taps = cache, conv_taps

    def prepare(self, seq: Request) -> tuple[list[SegmentKey], bool]:
        """Pin the segments that `seq` takes, unless some are missing or being built.

        Returns the missing ones, and whether others are being built. If any, nothing is pinned, and the stored ones
        count as just used, so that builds do not evict them. A segment that was built for `seq` and evicted since, or
        could not be built, is computed as plain text.
        """
        missing, waits = [], False
        taken: list[tuple[Span, StoredSegment]] = []
        for span, key in self._choose(seq):
            stored = self.find(key)
            if stored is None:
                if key not in seq.tried and key not in missing:
                    missing.append(key)
            elif stored.ready:
                taken.append((span, stored))
            else:
                seq.tried.add(key)
                waits = True
        if missing:
            for _, stored in taken:
                self._cache.expect_segment(stored)
        elif taken and not waits:
            self._pin(seq, taken)
        return missing, waits

    def _choose(self, seq: Request) -> tuple[tuple[Span, SegmentKey], ...]:
        """Return the segments that `seq` could take now, and set the key under which it is cached.

        A request resumes at its deepest cached prefix, exact or composed before, and takes segments of what follows.
        Of two prefixes of equal depth it takes the exact one.
        """
        if not seq.composes:
            return ()
        widths, exact_key = self._widths(seq.generation.fidelity), seq.exact_key
        exact = self._cache.match(exact_key, seq.n_prompt, seq.namespace)
        seq.key, seq.marked_from, seq.match = exact_key, None, exact
        best, chosen = exact.checkpoint_tokens, self._usable(seq, widths, exact.checkpoint_tokens)
        for first in (exact.checkpoint_tokens, 0):
            spans = self._usable(seq, widths, first)
            if not spans or spans[0].start + widths.head == seq.marked_from:
                continue
            begin = spans[0].start + widths.head
            key = seq.marked_key(exact_key, begin)
            match = self._cache.match(key, seq.n_prompt, seq.namespace, near=(exact, begin))
            if first == exact.checkpoint_tokens or match.checkpoint_tokens > best:
                best, seq.key, seq.marked_from, seq.match = match.checkpoint_tokens, key, begin, match
                chosen = self._usable(seq, widths, best)
        return tuple((span, self._key(seq, span, widths)) for span in chosen)

    def _usable(self, seq: Request, widths: Widths, first: int) -> tuple[Span, ...]:
        """Return the segments from position `first` on that may be composed."""
        if seq.whole is None:
            ids = seq.prompt_ids(Span(0, seq.n_prompt))
            seq.whole = whole_segments(ids, seq.generation.segments, seq.generation.fidelity)
        reused = (span for span in seq.generation.segments if span not in seq.whole)
        return usable(reused, widths, first, seq.n_prompt - 1)

    def _pin(self, seq: Request, taken: list[tuple[Span, StoredSegment]]) -> None:
        for _, stored in taken:
            self._cache.segments.pin(stored)
        fidelity = seq.generation.fidelity
        spans, segments = zip(*taken, strict=True)
        seq.composition = Composition(self._cache, spans, segments, self._widths(fidelity), METHODS[fidelity].carries)

    def unused(self, seq: Request) -> list[SegmentKey]:
        """Return the key of a segment at the prompt's end, if it is not stored: clients warm segments in this way.

        It is computed with the prompt, and stored in addition.
        """
        if not seq.composes:
            return []
        widths = self._widths(seq.generation.fidelity)
        last = (span for span in seq.generation.segments[-1:] if span.end == seq.n_prompt)
        keys = [self._key(seq, span, widths) for span in usable(last, widths, 0, seq.n_prompt)]
        return [key for key in keys if key not in seq.tried and self.find(key) is None]

    def wanted(self, ids: Ids[int], namespace: str) -> SegmentKey | None:
        """Return the key of a text as a segment of a request with the default fidelity. None: it is too short."""
        widths = self._widths(Fidelity.BALANCED)
        return SegmentKey(namespace, key_of(tuple(ids)), widths) if widths.interior(len(ids)) > 0 else None

    def find(self, key: SegmentKey) -> StoredSegment | None:
        """Return the segment, stored or being built."""
        return self._cache.segments.find(key)

    def build(self, id: int, key: SegmentKey) -> SegmentBuild | None:
        """Reserve the pages of a segment. None: there is no room for it."""
        try:
            self._cache.reserve_segment(id, key)
        except OutOfPages:
            return None
        return SegmentBuild(id, key, self._cache)

    def _widths(self, fidelity: Fidelity) -> Widths:
        return METHODS[fidelity].widths(self._conv_taps)

    def _key(self, seq: Request, span: Span, widths: Widths) -> SegmentKey:
        return SegmentKey(seq.namespace, seq.prompt_ids(span), widths)
