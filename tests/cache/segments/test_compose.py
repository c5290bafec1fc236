"""Composition of prompts: recipes, marks of keys, and segments relevant to the question."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.cache.segments.compose import (
    LEVELS,
    MAX_TOKEN_ID,
    METHODS,
    WHOLE_LEVEL,
    Widths,
    composed_key,
    computed_tokens,
    marked,
    relevant,
    runs,
    usable,
)
from headwater.plan import Run
from headwater.request import Fidelity, Span

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


def key(*ids: int) -> bytes:
    return array("i", ids).tobytes()


def test_marks_begin_at_the_given_position() -> None:
    exact = key(1, 2, 3, MAX_TOKEN_ID)
    fast = marked(exact, 2, Fidelity.FAST)
    assert fast[:8] == exact[:8]
    assert all(fast[i : i + 4] != exact[i : i + 4] for i in (8, 12))
    assert len(fast) == len(exact)


def test_no_two_fidelities_have_the_same_key() -> None:
    keys = {marked(key(0, 0), 0, fidelity) for fidelity in Fidelity}
    assert len(keys | {key(0, 0)}) == 1 + len(Fidelity) == 1 + len(LEVELS)
    assert max(LEVELS.values()) < WHOLE_LEVEL < 16


def test_key_has_the_segments_computed_whole() -> None:
    exact, spans = key(*range(8)), (Span(1, 3), Span(4, 6))
    keys = {marked(exact, 2, Fidelity.FAST, anew) for anew in ((), spans[:1], spans[1:], spans)}
    assert len(keys) == 4
    assert marked(exact, 6, Fidelity.FAST, spans) == marked(exact, 6, Fidelity.FAST)
    assert marked(exact[:20], 2, Fidelity.FAST, spans) == marked(exact, 2, Fidelity.FAST, spans)[:20]


def test_marking_twice_is_refused() -> None:
    once = marked(key(1, 2), 1, Fidelity.HIGH)
    assert marked(once, 2, Fidelity.FAST) == once
    with pytest.raises(ValueError, match="token 1"):
        marked(once, 0, Fidelity.FAST)


def test_segment_with_the_last_token_is_not_composed() -> None:
    exact = key(*range(8))
    assert composed_key(exact, [Span(4, 7)], Fidelity.W0, 1) == marked(exact, 4, Fidelity.W0)
    assert composed_key(exact, [Span(4, 8)], Fidelity.W0, 1) is None


SEGMENTS = (Span(1, 3), Span(3, 5), Span(5, 7))


def asked(*ids: int, count: int = 1) -> tuple[Span, ...]:
    return relevant(array("i", ids).tobytes(), SEGMENTS, count)


def test_rare_tokens_of_the_question_count_more_than_common_ones() -> None:
    assert asked(9, 1, 2, 1, 3, 1, 4, 1, 3) == (SEGMENTS[1],)
    assert asked(9, 1, 2, 1, 3, 5, 4, 1, 4) == (SEGMENTS[2],)


def test_a_token_counts_once_however_often_it_is_there() -> None:
    assert asked(9, 2, 2, 2, 3, 4, 5, 2, 3, 2) == (SEGMENTS[1],)


def test_token_of_all_segments_has_no_weight() -> None:
    assert asked(9, 7, 2, 7, 3, 7, 4, 7) == ()
    assert asked(9, 7, 2, 7, 3, 7, 4, 7, 4) == (SEGMENTS[2],)


def test_relevant_segments_share_tokens_and_ties_go_to_the_first() -> None:
    assert asked(9, 1, 2, 3, 4, 5, 6, 3, 7, count=3) == (SEGMENTS[1],)
    assert asked(9, 1, 2, 3, 4, 5, 6, 1, 5, 3, count=2) == SEGMENTS[:2]
    assert asked(9, 1, 2, 3, 4, 5, 6, 5, 3, count=2) == SEGMENTS[1:]


def test_long_segments_are_not_preferred() -> None:
    """Two tokens in common of sixteen are less than one of two."""
    spans = (Span(0, 16), Span(16, 18))
    ids = [*range(16), 20, 21, 3, 4, 20]
    assert relevant(array("i", ids).tobytes(), spans, 1) == spans[1:]


def test_without_a_question_or_segments_there_are_none() -> None:
    assert asked(9, 1, 2, 3, 4, 5, 6) == ()
    assert relevant(b"", (), 2) == ()


def test_number_computed_whole_depends_on_number_of_segments() -> None:
    counts = {way: [METHODS[way].whole_of(n) for n in (0, 1, 2, 4, 5, 8, 40)] for way in Fidelity}
    assert counts[Fidelity.BALANCED] == [0, 0, 1, 1, 2, 2, 2]
    assert counts[Fidelity.HIGH] == [0, 0, 1, 2, 3, 4, 4]
    assert all(counts[way] == [0] * 7 for way in Fidelity if way not in (Fidelity.BALANCED, Fidelity.HIGH))
