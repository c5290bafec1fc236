"""What every placement policy promises. A new one is in it by being in the table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.cache.placement import PLACEMENT, PlacementQuery, make_placement
from headwater.types import Boundaries, Match, Reason

OPTIONS = {"every_block": "(3)"}  # of those that need some
SPELLINGS = [name + OPTIONS.get(name, "") for name in sorted(PLACEMENT)]
positions = st.none() | st.integers(0, 5000)


@st.composite
def queries(draw: st.DrawFn) -> PlacementQuery:
    page = draw(st.sampled_from([1, 16, 64]))
    length = draw(st.integers(0, 5000))
    last = max(0, length - 1) // page
    kv = draw(st.integers(0, last))
    match = Match(kv * page, draw(st.integers(0, kv)) * page, kv * page, Reason.DIVERGED)
    extra = tuple(draw(st.lists(st.integers(0, 5000), max_size=4)))
    boundaries = Boundaries(draw(positions), draw(positions), draw(positions), extra)
    return PlacementQuery(length, match, draw(st.sampled_from([boundaries, Boundaries()])), page)


@pytest.mark.parametrize("policy", SPELLINGS)
@given(query=queries())
def test_positions_ascend_on_the_grid_beyond_the_match_and_before_the_last_token(
    policy: str, query: PlacementQuery
) -> None:
    placed = make_placement(policy).place(query)
    for run in (placed.checkpoints, placed.speculative):
        assert list(run) == sorted(set(run))
        assert all(at % query.page_size == 0 for at in run)
        assert all(query.match.checkpoint_tokens < at < query.length for at in run)
    assert not set(placed.checkpoints) & set(placed.speculative)


@pytest.mark.parametrize("policy", SPELLINGS)
@given(query=queries())
def test_the_same_query_gives_the_same_answer(policy: str, query: PlacementQuery) -> None:
    placement = make_placement(policy)
    assert placement.place(query) == placement.place(query) == make_placement(policy).place(query)
