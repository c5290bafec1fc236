"""Chances that a prompt is left where none of its length was left before."""

from __future__ import annotations

import pytest

from headwater.cache.placement.headwater import new_places
from headwater.cache.placement.headwater.new_places import NewPlaces

PAGE, LAST = 10, 1600  # an eighth has 200 tokens


def begun(beta: float = 1.0, pooled: float = 1.0) -> NewPlaces:
    return NewPlaces(beta, pooled)


def test_nothing_is_expected_before_a_prompt_was_left_at_a_new_place() -> None:
    known = begun()
    for _ in range(20):
        known.add(300, False, LAST)
    assert known.of(LAST, PAGE) == []


def test_a_departure_is_spread_over_its_eighth() -> None:
    """One of three prompts was left in the second eighth, 200 to 400; as many of a third are added, and one more."""
    known = begun()
    for depth, is_new in ((300, True), (0, False), (900, False)):
        known.add(depth, is_new, LAST)
    each = pytest.approx((1 + 1 / 3) / (3 + 1 + 1) / 2)
    assert known.of(LAST, PAGE) == [(300, each), (400, each)]
    assert known.of(LAST + 87, PAGE) == [(310, each), (420, each)]


@pytest.mark.parametrize(
    ("depth", "found"), [(0, [100, 200]), (200, [100, 200]), (201, [300, 400]), (1400, [1300, 1400]), (1401, [])]
)
def test_the_last_eighth_counts_from_the_last_page_elsewhere(depth: int, found: list[int]) -> None:
    known = begun()
    known.add(depth, True, LAST)
    assert [one for one, _ in known.of(LAST, PAGE)] == found


def test_prompts_of_other_lengths_count_as_much_as_is_pooled() -> None:
    known, alone = begun(pooled=2.0), begun(pooled=1e-9)
    for one in (known, alone):
        for _ in range(8):
            one.add(300, True, 4 * LAST)
            one.add(0, False, LAST)
    assert sum(chance for _, chance in alone.of(LAST, PAGE)) < 1e-9
    # half of all are left in the first eighth of their prompts: of two that are pooled one, beside 8 + 2 that are not
    assert known.of(LAST, PAGE) == [(100, 1 / 12 / 2), (200, 1 / 12 / 2)]


def test_few_requests_weigh_little() -> None:
    known = begun(pooled=1000.0)
    known.add(300, True, LAST)
    assert known.of(LAST, PAGE) == [(300, 2 / 1002 / 2), (400, 2 / 1002 / 2)]


def test_later_requests_weigh_more() -> None:
    known = begun(beta=0.5)
    known.add(300, True, LAST)
    known.add(700, True, LAST)
    early, *_, late = (chance for _, chance in known.of(LAST, PAGE))
    assert late == pytest.approx(2 * early)


def test_weights_are_scaled_down_before_they_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    known, same = begun(beta=0.5, pooled=4.0), begun(beta=0.5, pooled=4.0)
    for turn in range(1200):  # 2 ** 1200 is no number
        known.add(300 if turn % 2 else 700, True, LAST)
    monkeypatch.setattr(new_places, "UNIT_LIMIT", 1e300)
    for turn in range(200):
        same.add(300 if turn % 2 else 700, True, LAST)
    assert known.of(LAST, PAGE) == [(depth, pytest.approx(chance)) for depth, chance in same.of(LAST, PAGE)]
