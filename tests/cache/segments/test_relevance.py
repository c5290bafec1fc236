"""Segments most relevant to the question."""

from __future__ import annotations

from array import array

from headwater.cache.segments.compose import METHODS, relevant
from headwater.request import Fidelity, Span

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
