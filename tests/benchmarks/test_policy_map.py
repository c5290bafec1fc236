"""The map of policies: boundaries are where gains fall to 0, cells name the best published policy."""

import json
from pathlib import Path

import pytest

from benchmarks import policies
from benchmarks.policy_map import AXES, SIZES, Traffic, best, boundary, draw, page, scan, scanned, table
from headwater.journal import Journal

ROW = {
    "axis": "think times",
    "value": "0.3",
    "trace": "a",
    "arrival": "even",
    "memories": [1, 2, 3, 4],
    "rates": {
        "lru": [10.0, 30.0, 50.0, 60.0],
        "gdsf": [12.0, 29.0, 40.0, 60.0],
        "seglen": [20.0, 34.0, 48.0, 55.0],
        "flop_aware(1.0)": [15.0, 36.0, 52.0, 61.0],
        "headwater": [25.0, 30.0, 49.0, 60.5],
    },
    "seconds": 3.2,
}
POLICY_ROWS = [{"placement": "branch", "eviction": "lru", "memory": 1e9, "token_hit_rate": 0.25, "ideal_hit_rate": 0.5}]


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
def test_boundary_is_where_the_gain_last_falls_to_0(gains: list[float], shown: str) -> None:
    assert boundary(SIZES, gains) == shown


def test_best_published_policy_is_named_and_never_ours() -> None:
    assert [best(ROW, at) for at in range(4)] == [
        ("seglen", 10.0, 15.0),
        ("flop_aware(1.0)", 6.0, 0.0),
        ("flop_aware(1.0)", 2.0, -1.0),
        ("flop_aware(1.0)", 1.0, 0.5),
    ]


def test_policy_map_page_has_every_row_and_a_figure(tmp_path: Path) -> None:
    scanned = [{**ROW, "seed": 0, "cv": 0.3}, {**ROW, "seed": 0, "cv": 0.9, "rates": {**ROW["rates"], "lru": [25.0]}}]
    document = {
        "run": {"commit": "abc", "tree": "clean"},
        "sizes": SIZES,
        "rows": [ROW, {**ROW, "axis": "another"}],
        "scan": scanned,
    }
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


def test_interrupted_policy_map_continues_where_it_stopped(tmp_path: Path) -> None:
    measured = []

    def measure(traffic: Traffic, sizes: object, seed: int) -> dict[str, object]:
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append((traffic.cv, seed))
        return {"cv": traffic.cv}

    out = tmp_path / "map.json"
    with pytest.raises(KeyboardInterrupt):
        scanned(Journal(out, "code"), measure)
    del measured[:2]
    with pytest.raises(KeyboardInterrupt):
        scanned(Journal(out, "code"), measure)
    assert measured == [(cv, 0) for cv in (0.7, 0.8, 0.9)]


def test_table_of_policies_keeps_the_traces_that_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured = []

    def measure(name: str, data: Path, seed: int, small: bool) -> dict[str, object]:
        measured.append((name, seed))
        about = {"trace": name, "requests": 1, "notes": [], "commit": "abc", "tree": "clean"}
        return {**about, **policies.run_of(seed), "rows": POLICY_ROWS}

    def run(*arguments: str) -> list[tuple[str, int]]:
        measured.clear()
        monkeypatch.setattr("sys.argv", ["policies", *arguments])
        policies.main()
        return list(measured)

    monkeypatch.setattr(policies, "OUT", tmp_path / "policies.json")
    monkeypatch.setattr(policies, "measured", measure)
    monkeypatch.setattr(policies, "write_page", lambda: None)
    assert run("--traces", "mtbench101") == [("mtbench101", 0)]
    assert run("--traces", "mtbench101,mini_swe_agent") == [("mini_swe_agent", 0)]
    assert run("--traces", "mtbench101", "--seed", "1") == [("mtbench101", 1)]
    monkeypatch.setattr(policies, "package_digest", lambda *more: "other code")
    assert run("--traces", "mini_swe_agent") == [("mini_swe_agent", 0)]
    assert json.loads(policies.OUT.read_text())["traces"][0]["code"] == "other code"
