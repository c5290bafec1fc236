"""Promises of every placement policy. A policy is tested once it is in the table."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.account import Reason
from headwater.cache.placement import PLACEMENT, make_placement
from headwater.cache.placement.base import Edge, Path, Placement, PlacementQuery
from headwater.plan import Match
from headwater.request import Boundaries
from tests.cache.toy import example
from tests.support import examples

OPTIONS = {  # more telling than 1
    "every_block": "every_block(3)",
    "balanced": "balanced(5)",
    "logarithmic": "logarithmic(5)",
    "optimal": "optimal(5, every=2)",
}
VARIANTS = ["branch(cut='chunk', chunk=48)", "balanced(3, end=False)", "sqrt(end=False)", "optimal(3, end=False)"]
SPELLINGS = [OPTIONS.get(name, example(name, PLACEMENT[name])) for name in sorted(PLACEMENT)] + VARIANTS
BY_PROMPT = [policy for policy in SPELLINGS if not policy.startswith(("headwater", "structural", "branch", "optimal"))]
positions = st.none() | st.integers(0, 5000)


@st.composite
def queries(draw: st.DrawFn, page: int | None = None) -> PlacementQuery:
    page = page or draw(st.sampled_from([1, 16, 64]))
    length = draw(st.integers(0, 5000))
    last = max(0, length - 1) // page
    branch = draw(st.integers(0, last))
    kv = draw(st.just(branch) | st.integers(0, branch))
    match = Match(kv * page, draw(st.integers(0, kv)) * page, branch * page, Reason.DIVERGED)
    extra = tuple(draw(st.lists(st.integers(0, 5000), max_size=4)))
    boundaries = Boundaries(draw(positions), draw(positions), draw(positions), extra)
    path = draw(paths(kv, page))
    return PlacementQuery(
        length, match, draw(st.sampled_from([boundaries, Boundaries()])), page, draw(st.booleans()), lambda: path
    )


@st.composite
def paths(draw: st.DrawFn, kv: int, page: int) -> Path:
    """Edges of a prompt whose KV is cached for `kv` pages. Few ids, so that prompts share some."""
    if not kv:
        return ()
    joints = [*sorted(draw(st.sets(st.integers(1, kv), max_size=4)) - {kv}), kv + draw(st.integers(0, 3))]
    ids = draw(st.permutations(range(8)))
    origins = draw(st.lists(st.tuples(st.integers(0, 8)) | st.just(()), min_size=5, max_size=5))
    return tuple(Edge(name, end * page, origin) for name, end, origin in zip(ids, joints, origins, strict=False))


def taught(policy: str, lessons: list[PlacementQuery]) -> Placement:
    placement = make_placement(policy)
    for query in lessons:
        placement.learn(query)
    return placement


def lessons_and_query(pages: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[list[PlacementQuery], PlacementQuery]]:
    return pages.flatmap(lambda page: st.tuples(st.lists(queries(page), max_size=6), queries(page)))


GRIDS = st.sampled_from([1, 16, 64])


@pytest.mark.parametrize("policy", SPELLINGS)
@settings(max_examples=examples(25))
@given(case=lessons_and_query(GRIDS))
def test_positions_ascend_on_the_grid_within_the_new_part(
    policy: str, case: tuple[list[PlacementQuery], PlacementQuery]
) -> None:
    lessons, query = case
    placed = taught(policy, lessons).place(query)
    for run in (placed.checkpoints, placed.speculative):
        assert list(run) == sorted(set(run))
        assert all(type(at) is int and at % query.page_size == 0 for at in run)
        assert all(query.match.checkpoint_tokens < at < query.length for at in run)
    assert not set(placed.checkpoints) & set(placed.speculative)


@pytest.mark.parametrize("policy", SPELLINGS)
@settings(max_examples=examples(25))
@given(case=lessons_and_query(GRIDS))
def test_placing_changes_nothing(policy: str, case: tuple[list[PlacementQuery], PlacementQuery]) -> None:
    """One that was asked after each lesson, and twice, answers as one that was not asked before."""
    lessons, query = case
    asked = make_placement(policy)
    for lesson in lessons:
        asked.place(query)
        asked.learn(lesson)
        asked.place(lesson)
    assert asked.place(query) == asked.place(query) == taught(policy, lessons).place(query)


@pytest.mark.parametrize("policy", BY_PROMPT)
@settings(max_examples=examples(25))
@given(query=queries())
def test_deeper_match_only_removes_positions_of_stateless_policies(policy: str, query: PlacementQuery) -> None:
    whole = make_placement(policy).place(replace(query, match=Match(0, 0, 0, Reason.COLD)))
    rest = make_placement(policy).place(query)
    assert rest.checkpoints == tuple(at for at in whole.checkpoints if at > query.match.checkpoint_tokens)


def test_learning_changes_positions() -> None:
    optimal = make_placement("optimal(2, every=1, end=False, pooled=True)")
    cold = PlacementQuery(1000, Match(0, 0, 0, Reason.COLD), Boundaries(), 10)
    before = optimal.place(cold)
    optimal.learn(replace(cold, match=Match(70, 0, 70, Reason.NO_CHECKPOINT), path=lambda: (Edge(1, 100),)))
    assert before.checkpoints == (330, 660)
    assert optimal.place(cold).checkpoints == (70,)
