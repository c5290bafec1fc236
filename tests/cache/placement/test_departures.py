"""Chances that a prompt is left at a depth, from where prompts of its length were left."""

import pytest

from headwater.cache.placement import headwater
from headwater.cache.placement.headwater import Departures

PAGE = 10


def begun(prior: float = 1.0, beta: float = 1.0, every: int = 1) -> Departures:
    return Departures(beta, prior, every)


def test_no_chances_before_the_first_departure() -> None:
    known = begun()
    for _ in range(20):
        known.add(300, False, 1000, PAGE)
    assert known.of(1000, PAGE) == []


def test_chance_is_the_share_of_prompts_that_computed_the_page_before() -> None:
    """Two of four cold prompts are left at 300; six that begin below do not count. One more is assumed."""
    known = begun()
    for depth in (0, 0, 0, 0, 600, 600, 600, 600):
        known.add(depth, False, 1000, PAGE)
    for _ in range(2):
        known.add(300, True, 1000, PAGE)
    assert known.of(1000, PAGE) == [(300, 2 / 5)]
    known.add(300, False, 1000, PAGE)
    assert known.of(1000, PAGE) == [(300, 2 / 5)]
    known.add(200, False, 1000, PAGE)
    assert known.of(1000, PAGE) == [(300, 2 / 6)]


def test_chance_is_at_most_1_with_prompts_of_other_lengths() -> None:
    known = begun()
    for _ in range(9):
        known.add(300, True, 1000, PAGE)
    assert known.of(1000, PAGE) == [(300, 1.0)]


def test_depths_of_second_half_count_from_the_last_page() -> None:
    known = begun()
    for depth in (400, 940):
        known.add(depth, True, 1000, PAGE)
    assert [depth for depth, _ in known.of(1000, PAGE)] == [400, 940]
    assert [depth for depth, _ in known.of(1050, PAGE)] == [400, 990]


@pytest.mark.parametrize(("length", "is_alike"), [(1000, True), (1070, True), (940, True), (1300, False), (700, False)])
def test_departures_count_for_prompts_of_like_lengths(length: int, is_alike: bool) -> None:
    known = begun()
    known.add(400, True, 1000, PAGE)
    assert bool(known.of(length, PAGE)) is is_alike


def test_later_requests_weigh_more() -> None:
    known = begun(beta=0.5)
    known.add(300, True, 1000, PAGE)
    known.add(400, True, 1000, PAGE)
    known.add(0, False, 1000, PAGE)
    (_, early), (_, late) = known.of(1000, PAGE)
    assert late * (1 + 1 + 0.25) == pytest.approx(0.5)  # next to the assumed one, one that began at 0, and one at 300
    assert early * (1 + 1) == pytest.approx(0.25)


def test_chances_are_renewed_every_few_requests() -> None:
    known = begun(every=4)
    known.add(300, True, 1000, PAGE)
    before = known.of(1000, PAGE)
    for _ in range(3):
        known.add(400, True, 1000, PAGE)
        assert known.of(1000, PAGE) == before
    known.add(400, True, 1000, PAGE)
    assert [depth for depth, _ in known.of(1000, PAGE)] == [300, 400]


def test_weights_are_scaled_down_before_they_overflow() -> None:
    known, same = begun(beta=0.5), begun(beta=0.5)
    for turn in range(1200):  # 2 ** 1200 is not a float
        known.add(300 if turn % 2 else 400, True, 1000, PAGE)
    for turn in range(30):
        same.add(300 if turn % 2 else 400, True, 1000, PAGE)
    assert known.of(1000, PAGE) == [(depth, pytest.approx(chance)) for depth, chance in same.of(1000, PAGE)]


def test_a_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headwater, "MAX_ENTRIES", 8)
    known = begun(beta=0.5)
    for turn in range(100):
        known.add(10 * turn, True, 1000, PAGE)
    assert len(known.of(1000, PAGE)) <= 2 * (8 + 1)  # of the half before 500, which is old, and of that beyond
