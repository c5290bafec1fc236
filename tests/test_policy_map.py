"""The map of policies: boundaries are where gains fall to 0, cells name the best published policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.policy_map import AXES, SIZES, best, boundary, draw, page, scan, table

ROW = {
    "axis": "think times",
    "value": "0.3",
    "rates": {
        "lru": [10.0, 30.0, 50.0, 60.0],
        "gdsf": [12.0, 29.0, 40.0, 60.0],
        "seglen": [20.0, 34.0, 48.0, 55.0],
        "flop_aware(1.0)": [15.0, 36.0, 52.0, 61.0],
        "headwater": [25.0, 30.0, 49.0, 60.5],
    },
    "seconds": 3.2,
}


@pytest.mark.parametrize(
    ("gains", "shown"),
    [
        ([3.0, 2.0, 1.0, 0.5], "> 70%"),
        ([-3.0, -2.0, -1.0, 0.0], "< 10%"),
        ([4.0, 2.0, -2.0, -5.0], "30%"),  # half of the way from 20% to 40%
        ([-1.0, 3.0, -1.0, -2.0], "35%"),
        ([1.0, -1.0, 1.0, 0.0], "70%"),  # the last fall counts
    ],
)
def test_a_boundary_is_where_the_gain_last_falls_to_0(gains: list[float], shown: str) -> None:
    assert boundary(SIZES, gains) == shown


def test_the_best_published_policy_is_named_and_never_ours() -> None:
    assert [best(ROW, at) for at in range(4)] == [
        ("seglen", 10.0, 15.0),
        ("flop_aware(1.0)", 6.0, 0.0),
        ("flop_aware(1.0)", 2.0, -1.0),
        ("flop_aware(1.0)", 1.0, 0.5),
    ]


def test_the_page_has_a_line_for_each_row_and_the_figure_is_drawn(tmp_path: Path) -> None:
    scanned = [{**ROW, "seed": 0, "cv": 0.3}, {**ROW, "seed": 0, "cv": 0.9, "rates": {**ROW["rates"], "lru": [25.0]}}]
    document = {"commit": "abc", "sizes": SIZES, "rows": [ROW, {**ROW, "axis": "another"}], "scan": scanned}
    lines = list(table(document["rows"], SIZES))
    assert lines[2].startswith("| think times: 0.3 | seglen +10.0, +15.0 | flop_aware +6.0, +0.0 |")
    assert lines[2].endswith("| 33% | > 70% |")
    assert list(scan(document))[2] == "| 0 | 0.38 | 0.70 | 0.50 | 0.90 |"
    assert all(line in page(document)[0] for line in lines)
    draw(document, tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 1000


def test_traffic_of_a_panel_differs_in_one_thing() -> None:
    for rows in AXES.values():
        spelled = {(one.trace, one.arrival) for one in rows}
        assert len(spelled) == len(rows)
        assert len({one.trace for one in rows}) == 1 or len({one.arrival for one in rows}) == 1
