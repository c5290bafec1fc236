"""Which tokens of a prompt made of segments are computed, and what is composed in between. Integers only.

HYPIC (2026), sections 4.2 and 4.3: of each stored segment all but some tokens at both ends are skipped; those at the
ends are computed anew, with full attention to everything before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headwater.plan import Run
from headwater.request import Span


@dataclass(frozen=True, slots=True)
class Widths:
    """How many tokens at a segment's ends are computed at each use, and so are no part of what is stored of it."""

    head: int
    tail: int

    @classmethod
    def of(cls, seam: int, conv_taps: int) -> Widths:
        """`seam` tokens at each end; at the head as many as the convolution looks back, if those are more.

        Section 4.2: with a seam of at least the taps less one, what is recomputed there warms the convolution up, too.
        """
        return cls(max(seam, conv_taps - 1), seam)

    def interior(self, tokens: int) -> int:
        """How many of so many tokens are stored; none or fewer: the segment is too short to be one."""
        return tokens - self.head - self.tail


def usable(spans: Iterable[Span], widths: Widths, start: int, end: int) -> tuple[Span, ...]:
    """The spans that lie wholly in [start, end) and have an interior: all others are computed as plain text."""
    return tuple(
        span for span in spans if start <= span.start and span.end <= end and widths.interior(span.end - span.start) > 0
    )


def runs(spans: Sequence[Span], widths: Widths, start: int, end: int) -> tuple[Run, ...]:
    """What is computed of tokens [start, end) around the interiors of `spans` (usable ones).

    Together with the interiors the runs cover every token once. Only the first can be without composed segments. A last
    run of no tokens is left out only if nothing is composed before it. Raises ValueError for spans that overlap.
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
    return sum(run.end - run.start for run in found)
