"""Prompts assembled from stored segments: the tokens that are recomputed, and the key of an approximate prefix.

HYPIC (2026), sections 4.2 and 4.3: of each stored segment all but some tokens at both ends are skipped; those at the
ends are recomputed, with full attention to everything before them. Integers only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from headwater.plan import Run
from headwater.request import Fidelity, Span

LEVELS = {fidelity: level for level, fidelity in enumerate(Fidelity, 1)}
RECOMPUTED = 15  # the level of segments recomputed whole between others: so their choice is part of the key
SHIFT = 28
LARGEST_ID = (1 << SHIFT) - 1


@dataclass(frozen=True, slots=True)
class Widths:
    """Numbers of tokens at a segment's ends that are recomputed at each use, and so are not stored."""

    head: int
    tail: int

    @classmethod
    def of(cls, seam: int, conv_taps: int) -> Widths:
        """Return `seam` tokens at each end; at the head as many as the convolution looks back, if those are more.

        Section 4.2: with a seam of at least the taps less one, recomputing the head warms the convolution up, too.
        """
        return cls(max(seam, conv_taps - 1), seam)

    def interior(self, tokens: int) -> int:
        """Return how many of a segment's tokens are stored; with 0 or fewer it is too short to be a segment."""
        return tokens - self.head - self.tail


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
            raise ValueError(f"span {i} begins at {span.start}, what is before it ends later")
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
    """Return the key of an approximate prefix: all tokens from `start` on marked, so that no exact request matches it.

    A token id takes 28 of a key's 32 bits; the four above hold the level of fidelity, or RECOMPUTED for the tokens of
    segments that are recomputed whole. So one tree holds both: approximate branches share the exact prefix that they
    continue, and one eviction policy serves all. Raises ValueError for a token that is marked already.
    """
    ids = np.frombuffer(key, np.uint32).copy()
    behind = ids[start:]
    if len(behind) and behind.max() > LARGEST_ID:
        raise ValueError(f"token {start + int((behind > LARGEST_ID).argmax())} of the key is marked already")
    levels = np.full(len(ids), LEVELS[fidelity] << SHIFT, np.uint32)
    for span in recomputed:
        levels[span.start : span.end] = RECOMPUTED << SHIFT
    behind |= levels[start:]
    return ids.tobytes()
