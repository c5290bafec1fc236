"""Prompts assembled from stored segments: the tokens that are recomputed, and the key of an approximate prefix.

HYPIC (2026), sections 4.2 and 4.3: the interior of each stored segment is skipped; some tokens at both ends are
recomputed, with full attention to everything before them. Three methods are for use, the others are measured against
them (section 6.1 and figure 13). Integers only.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from headwater.plan import Run
from headwater.request import Fidelity, Span

LEVELS = {fidelity: level for level, fidelity in enumerate(Fidelity, 1)}
WHOLE_LEVEL = 15  # of segments recomputed whole between others: so their choice is part of the key
ID_BITS = 28  # of a token in a key; its level stands above them
MAX_TOKEN_ID = (1 << ID_BITS) - 1


@dataclass(frozen=True, slots=True)
class Widths:
    """Numbers of tokens at a segment's ends that are recomputed at each use, and so are not stored."""

    head: int
    tail: int

    @classmethod
    def of(cls, seam: int, conv_taps: int) -> Widths:
        """Return `seam` tokens at each end; at the head at least as many as the convolution looks back.

        Section 4.2: with a seam of at least the taps less one, recomputing the head also warms up the convolution.
        """
        return cls(max(seam, conv_taps - 1), seam)

    def interior(self, tokens: int) -> int:
        """Return the number of a segment's stored tokens; with 0 or fewer it is too short to be a segment."""
        return tokens - self.head - self.tail


@dataclass(frozen=True, slots=True)
class Method:
    """Composition with seams, and with transitions or without.

    Without transitions (S ← S + S_{C|0}, section 3.1) nothing is recomputed, not even to warm up the convolution. This
    concerns recurrent states: keys and values, in pages or in windows, are composed by position in all methods.
    """

    seam: int  # tokens recomputed at each end of a segment
    whole: int = 0  # at most N segments are recomputed whole: those most relevant to the question
    one_in: int = 1  # and at most one in N of the segments, rounded up; but never all of them
    carries: bool = True  # whether a segment's transition is applied to the state before it

    def whole_of(self, segments: int) -> int:
        """Return the number of a prompt's segments that are recomputed whole."""
        return max(0, min(self.whole, -(-segments // self.one_in), segments - 1))

    def widths(self, conv_taps: int) -> Widths:
        """Return the widths of seams in a model whose widest convolution has `conv_taps` taps."""
        return Widths.of(self.seam, conv_taps) if self.carries else Widths(0, 0)


METHODS = {
    Fidelity.FAST: Method(8),
    Fidelity.BALANCED: Method(8, whole=2, one_in=4),
    Fidelity.HIGH: Method(16, whole=4, one_in=2),
    Fidelity.NAIVE: Method(0, carries=False),
    Fidelity.W0: Method(0),
    Fidelity.W4: Method(4),
    Fidelity.W16: Method(16),
    Fidelity.W32: Method(32),
}


def composed_key(key: bytes, segments: Sequence[Span], fidelity: Fidelity, conv_taps: int) -> bytes | None:
    """Return the key of a prompt that is composed from its first usable segment on; None if it has none.

    `key`: of the exact prompt; `conv_taps`: taps of the widest convolution before a recurrence.
    """
    widths = METHODS[fidelity].widths(conv_taps)
    whole = whole_segments(key, segments, fidelity)
    spans = usable((span for span in segments if span not in whole), widths, 0, len(np.frombuffer(key, np.uint32)) - 1)
    return marked(key, spans[0].start + widths.head, fidelity, whole) if spans else None


def usable(spans: Iterable[Span], widths: Widths, start: int, end: int) -> tuple[Span, ...]:
    """Return the spans that lie wholly in [start, end) and have an interior. Others are computed as plain text."""
    return tuple(
        span for span in spans if start <= span.start and span.end <= end and widths.interior(span.end - span.start) > 0
    )


def runs(spans: Sequence[Span], widths: Widths, start: int, end: int) -> tuple[Run, ...]:
    """Return the runs of tokens of [start, end) that are computed around the interiors of `spans` (usable ones).

    Together with the interiors the runs cover every token once. Only the first run can be without composed segments. A
    last run of no tokens is left out only if nothing is composed before it. Raises ValueError for spans that overlap.
    """
    found: list[Run] = []
    begin = start
    composed: list[int] = []
    for i, span in enumerate(spans):
        if span.start < (spans[i - 1].end if i else start):
            raise ValueError(f"span {i} begins at {span.start}, before the end of the span or prefix before it")
        inner = span.start + widths.head
        if inner > begin:
            found.append(Run(begin, inner, tuple(composed)))
            composed = []
        composed.append(i)
        begin = span.end - widths.tail
    if end > begin or composed:
        found.append(Run(begin, end, tuple(composed)))
    return tuple(found)


def computed_tokens(found: Iterable[Run]) -> int:
    """Return the number of tokens in all runs."""
    return sum(run.end - run.start for run in found)


def marked(key: bytes, start: int, fidelity: Fidelity, recomputed: Iterable[Span] = ()) -> bytes:
    """Return the key of an approximate prefix: all tokens from `start` on are marked, so that no exact request matches.

    A token id takes 28 of a key's 32 bits; the four above hold the level of fidelity, or WHOLE_LEVEL for the tokens of
    segments that are recomputed whole. So one tree holds both: approximate branches share the exact prefix that they
    continue, and one eviction policy serves all. Raises ValueError for a token that is marked already.
    """
    ids = np.frombuffer(key, np.uint32).copy()
    behind = ids[start:]
    if len(behind) and behind.max() > MAX_TOKEN_ID:
        raise ValueError(f"token {start + int((behind > MAX_TOKEN_ID).argmax())} of the key is marked already")
    levels = np.full(len(ids), LEVELS[fidelity] << ID_BITS, np.uint32)
    for span in recomputed:
        levels[span.start : span.end] = WHOLE_LEVEL << ID_BITS
    behind |= levels[start:]
    return ids.tobytes()


def is_marked(key: bytes) -> bool:
    """Return whether a key has a marked token: its prefix is approximate."""
    ids = np.frombuffer(key, np.uint32)
    return bool(len(ids) and ids.max() > MAX_TOKEN_ID)


def whole_segments(key: bytes, segments: Sequence[Span], fidelity: Fidelity) -> tuple[Span, ...]:
    """Return the segments of a prompt that are recomputed whole. `key`: its token ids, four bytes each."""
    return relevant(key, segments, METHODS[fidelity].whole_of(len(segments)))


def relevant(key: bytes, segments: Sequence[Span], count: int) -> tuple[Span, ...]:
    """Return the at most `count` segments that share the rarest tokens with the question, in order of position.

    The question is the text after the last segment. Each of its tokens counts 1/n in the n segments that contain it,
    however often they do, and nothing if all contain it, as a separator; a segment's sum is divided by the root of its
    length, so that long ones are not preferred. Segments that share none are left out; ties go to the first.
    No model runs. key: token ids of the prompt, four bytes each.
    """
    if not count or not segments:
        return ()
    ids = array("I", key)
    asked = set(ids[segments[-1].end :])
    shared = [sorted(asked.intersection(ids[span.start : span.end])) for span in segments]
    held_by = Counter(token for tokens in shared for token in tokens)
    scores = [
        sum(1 / held_by[token] for token in tokens if held_by[token] < len(segments)) / math.sqrt(span.end - span.start)
        for tokens, span in zip(shared, segments, strict=True)
    ]
    best = sorted(range(len(segments)), key=lambda i: -scores[i])[:count]
    return tuple(segments[i] for i in sorted(best) if scores[i])
