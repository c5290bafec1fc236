"""Approximate keys never match exact ones, nor those of another fidelity."""

from __future__ import annotations

from array import array

import pytest

from headwater.cache.segments.compose import LEVELS, MAX_TOKEN_ID, WHOLE_LEVEL, composed_key, marked
from headwater.request import Fidelity, Span


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
