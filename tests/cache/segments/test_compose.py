"""Runs of tokens that are computed around stored segments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.cache.segments.compose import Widths, computed_tokens, runs, usable
from headwater.plan import Run
from headwater.request import Span

W8 = Widths(8, 8)


def test_runs_around_two_adjacent_segments() -> None:
    spans = [Span(70, 170), Span(170, 300)]
    assert runs(spans, W8, 64, 310) == (Run(64, 78, ()), Run(162, 178, (0,)), Run(292, 310, (1,)))


def test_text_between_segments_is_computed() -> None:
    assert runs([Span(0, 50), Span(60, 100)], W8, 0, 100) == (Run(0, 8, ()), Run(42, 68, (0,)), Run(92, 100, (1,)))


def test_without_seams_several_segments_are_composed_at_once() -> None:
    spans = [Span(4, 10), Span(10, 20)]
    assert runs(spans, Widths(0, 0), 4, 25) == (Run(20, 25, (0, 1)),)
    assert runs(spans, Widths(0, 0), 4, 20) == (Run(20, 20, (0, 1)),)


def test_no_segment_is_one_run() -> None:
    assert runs([], W8, 5, 9) == (Run(5, 9, ()),)
    assert runs([], W8, 5, 5) == ()


def test_head_covers_the_taps_of_the_convolution() -> None:
    """HYPIC, section 4.2: at w < k − 1 the leading k − 1 tokens are not stored."""
    assert Widths.of(0, 4) == Widths(3, 0)
    assert Widths.of(2, 4) == Widths(3, 2)
    assert Widths.of(8, 4) == W8
    assert Widths.of(0, 1) == Widths(0, 0)


def test_a_segment_without_an_interior_is_plain_text() -> None:
    short, long = Span(0, 16), Span(16, 33)
    assert usable([short, long], W8, 0, 33) == (long,)


def test_segment_that_crosses_an_end_is_plain_text() -> None:
    assert usable([Span(0, 100), Span(100, 200)], W8, 64, 190) == ()


def test_overlapping_spans_are_refused() -> None:
    with pytest.raises(ValueError, match="span 1 begins at 40"):
        runs([Span(0, 50), Span(40, 100)], W8, 0, 100)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 90)), max_size=8),
    st.integers(0, 16),
    st.integers(1, 5),
    st.integers(0, 40),
)
def test_runs_and_interiors_cover_every_token_once(
    parts: list[tuple[int, int]], seam: int, taps: int, after: int
) -> None:
    spans, at = [], 3
    for gap, length in parts:
        spans.append(Span(at + gap, at + gap + length))
        at += gap + length
    widths = Widths.of(seam, taps)
    used = usable(spans, widths, 3, at + after)
    found = runs(used, widths, 3, at + after)
    covered = [token for run in found for token in range(run.start, run.end)]
    interiors = [token for s in used for token in range(s.start + widths.head, s.end - widths.tail)]
    assert sorted(covered + interiors) == list(range(3, at + after))
    assert [i for run in found for i in run.composed] == list(range(len(used)))
    assert computed_tokens(found) == len(covered)
    for run in found:
        for i in run.composed:
            assert used[i].end - widths.tail <= run.start
