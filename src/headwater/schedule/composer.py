"""Requests whose prompts are made of segments: which stored ones they take, and which are to be made first."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, replace

from headwater.cache.prefix_cache import PrefixCache
from headwater.cache.segments.compose import Widths, marked, runs, usable
from headwater.cache.segments.method import METHODS, relevant
from headwater.cache.segments.store import SegmentKey, StoredSegment
from headwater.errors import OutOfPages
from headwater.plan import Composed, Making, Plan
from headwater.request import Fidelity, Span
from headwater.schedule.sequence import Composition, Sequence, key_of


@dataclass
class Composer:
    """Between scheduler and stored segments. Holds no state beside the cache."""

    cache: PrefixCache
    conv_taps: int  # of the widest convolution before a recurrence; 1: there is none

    def widths(self, fidelity: Fidelity) -> Widths:
        return METHODS[fidelity].widths(self.conv_taps)

    # -- requests

    def chosen(self, seq: Sequence) -> tuple[tuple[Span, SegmentKey], ...]:
        """The segments that `seq` would take now; sets the key under which it is cached.

        It resumes at the deepest prefix there is, exact or composed before, and takes segments of what comes after it.
        Of two that are as deep, at the exact one.
        """
        widths, exact_key = self.widths(seq.generation.fidelity), seq.exact_key
        exact = self.cache.match(exact_key, seq.n_prompt, seq.namespace).checkpoint_tokens
        seq.key, seq.marked_from = exact_key, None
        best, chosen = exact, self._usable(seq, widths, exact)
        for first in (exact, 0):
            spans = self._usable(seq, widths, first)
            if not spans:
                continue
            begin = spans[0].start + widths.head
            key = marked(exact_key, begin, seq.generation.fidelity, seq.anew or ())
            resume = self.cache.match(key, seq.n_prompt, seq.namespace).checkpoint_tokens
            if first == exact or resume > best:
                best, seq.key, seq.marked_from = resume, key, begin
                chosen = self._usable(seq, widths, resume)
        return tuple((span, self._key(seq, span, widths)) for span in chosen)

    def _usable(self, seq: Sequence, widths: Widths, first: int) -> tuple[Span, ...]:
        if seq.anew is None:
            segments = seq.generation.segments
            most = METHODS[seq.generation.fidelity].whole_of(len(segments))
            seq.anew = relevant(seq.prompt_ids, segments, most)
        reused = (span for span in seq.generation.segments if span not in seq.anew)
        return usable(reused, widths, first, seq.n_prompt - 1)

    def _key(self, seq: Sequence, span: Span, widths: Widths) -> SegmentKey:
        return SegmentKey(seq.namespace, seq.segment_ids(span), widths)

    def missing(self, seq: Sequence) -> tuple[list[SegmentKey], bool]:
        """Segments to be made for `seq`, and whether it waits for some that are being made.

        With nothing missing and nothing to wait for, what there is is pinned, and `seq` is ready to begin; else it is
        not, but younger than before, so that making the rest does not cost it. A segment
        that was made for it and is gone again, or could not be made, is plain text to it.
        """
        chosen = self.chosen(seq)
        missing, waits = [], False
        taken: list[tuple[Span, StoredSegment]] = []
        for span, key in chosen:
            stored = self.cache.segments.find(key)
            if stored is None:
                if key not in seq.asked and key not in missing:
                    missing.append(key)
            elif stored.ready:
                taken.append((span, stored))
            else:
                seq.asked.add(key)
                waits = True
        if not missing and not waits:
            self._take(seq, taken)
        elif missing:
            for _, stored in taken:
                self.cache.expect_segment(stored)
        return missing, waits

    def unused(self, seq: Sequence) -> list[SegmentKey]:
        """A segment at the end of a prompt is computed with it, and stored beside that: so a client warms one."""
        widths = self.widths(seq.generation.fidelity)
        last = (span for span in seq.generation.segments[-1:] if span.end == seq.n_prompt)
        keys = [self._key(seq, span, widths) for span in usable(last, widths, 0, seq.n_prompt)]
        return [key for key in keys if key not in seq.asked and self.cache.segments.find(key) is None]

    def _take(self, seq: Sequence, taken: list[tuple[Span, StoredSegment]]) -> None:
        if not taken:
            return
        for _, stored in taken:
            self.cache.segments.pin(stored)
        seq.composition = Composition(
            tuple(span for span, _ in taken), tuple(stored for _, stored in taken), self.widths(seq.generation.fidelity)
        )

    def leave(self, seq: Sequence) -> None:
        """It needs its segments no more; one that it was to make and that is not complete will not be made."""
        if seq.composition is not None:
            for stored in seq.composition.stored:
                self.cache.segments.unpin(stored)
            seq.composition = None
        if seq.made is not None and not seq.made.ready:
            self.cache.segments.drop(seq.made)

    def give_up(self, seq: Sequence) -> None:
        """It begins without segments: exactly, and as such cached."""
        self.leave(seq)
        seq.key, seq.marked_from, seq.plain = seq.exact_key, None, True

    def go_on_without(self, seq: Sequence) -> None:
        """It has begun, and there is no memory for it beside its segments: all of it is computed."""
        self.leave(seq)
        seq.plain = True
        if seq.account is not None:
            seq.account = replace(
                seq.account,
                cached_tokens=seq.account.resumed_at,
                segments=0,
                composed_tokens=0,
                cold_tokens=0,
                recomputed_tokens=seq.account.recomputed_tokens + seq.account.composed_tokens,
            )

    def composed_plan(self, seq: Sequence, plan: Plan) -> Plan:
        """The plan of the leg from before the first segment until after the last one."""
        composition = seq.composition
        assert composition is not None, "only who has segments composes"
        carries = METHODS[seq.generation.fidelity].carries
        parts = tuple(
            Composed(
                at=span.start,
                start=composition.widths.head,
                end=span.end - span.start - composition.widths.tail,
                table=stored.kv,
                state=stored.state,
                transition=stored.transition if carries else (),
            )
            for span, stored in zip(composition.spans, composition.stored, strict=True)
        )
        return replace(plan, composed=parts, runs=runs(composition.spans, composition.widths, plan.start, plan.end))

    def finished(self, seq: Sequence) -> None:
        """The composed leg ran: its segments were used, and are needed no more."""
        assert seq.composition is not None, "only who has segments composes"
        for stored in seq.composition.stored:
            self.cache.use_segment(stored)
        self.leave(seq)

    def wanted(self, ids: Sequence_[int], namespace: str) -> SegmentKey | None:
        """The key of a text as a segment of a request with the usual fidelity; None where it is too short."""
        widths = self.widths(Fidelity.BALANCED)
        return SegmentKey(namespace, key_of(tuple(ids)), widths) if widths.interior(len(ids)) > 0 else None

    # -- making

    def begin(self, key: SegmentKey) -> StoredSegment | None:
        """Pages for a segment that is to be made; None where there is no room."""
        try:
            return self.cache.open_segment(key)
        except OutOfPages:
            return None

    def making_plan(self, seq: Sequence, tokens: int) -> Plan | None:
        """The next leg of a segment that is being made: at most so many tokens, None for fewer than a page."""
        made = seq.made
        assert made is not None, "only segments are made"
        end, page = made.key.tokens - made.key.widths.tail, self.cache.layout.page_size
        start = seq.computed
        if end - start > tokens:
            end = (start + tokens) // page * page
        if end <= start:
            return None
        seq.planned = end
        last = end == made.key.tokens - made.key.widths.tail
        return Plan(
            id=0,
            request=seq.id,
            start=start,
            end=end,
            restore=(),
            table=made.kv,
            write_from=start // page,
            saves=(),
            lent=made.lent if start == 0 else (),
            making=Making(made.key.widths.head, made.state, made.transition, last),
        )
