"""The comparison of policies: the file of cells, verdicts, and a run that continues where it was cut short."""

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import grid, served_cells
from benchmarks.cells import Cell, Traffic, read_cells
from benchmarks.verdict import summary, table, verdict
from headwater.cache.placement import make_placement
from headwater.config import SETTINGS
from headwater.journal import Journal

KNOWN = read_cells()
PAIRS = (*KNOWN.ours, *KNOWN.bounds, *KNOWN.rivals)
SMALL = Cell(
    Traffic("forked_chains(chains=2, tokens=4096, turn=1024, fork=2048)"), KNOWN.models[1], 0.5, 0, {}, -3, 2048
)


def test_cells_are_as_many_as_traces_models_and_sizes_make() -> None:
    names = [cell.name for cell in (*KNOWN.recorded, *map(KNOWN.drawn, (*KNOWN.development, *KNOWN.final)))]
    assert len(set(names)) == len(names)
    assert len(KNOWN.recorded) == 10 * 2 * 4 + 1 + 2 * 2 * 2 + 2
    assert {cell.size for cell in KNOWN.recorded if not cell.memory} == {0.1, 0.25, 0.5, 0.75}
    assert (KNOWN.development, KNOWN.final) == (range(100), range(600, 700))


def test_seeds_go_round_models_and_sizes() -> None:
    for seeds in (KNOWN.development, KNOWN.final):
        drawn = [KNOWN.drawn(seed) for seed in seeds]
        counts = [sum((cell.model, cell.size) == (m, s) for cell in drawn) for m in KNOWN.models for s in KNOWN.sizes]
        assert set(counts) == {12, 13}


def test_every_policy_of_the_file_can_be_made() -> None:
    assert len(set(PAIRS)) == len(PAIRS)
    for pair in PAIRS:
        for cell in (KNOWN.recorded[0], KNOWN.recorded[-1]):
            setup = cell.setup(pair, 50 * 10**9)
            make_placement(setup.placement)
            assert setup.cache(setup.profile.layout(setup.memory)).policy is not None


def test_rivals_of_drawn_traffic_are_rivals() -> None:
    assert set(KNOWN.rivals_of_drawn) < set(KNOWN.rivals)
    assert {eviction.partition("(")[0] for _, eviction in KNOWN.rivals_of_drawn} == {
        eviction.partition("(")[0] for _, eviction in KNOWN.rivals
    }


def test_ours_is_the_default_of_the_server() -> None:
    default = {one.name: one.default for one in SETTINGS}
    assert KNOWN.ours[0] == (default["placement"], default["eviction"])


def test_interrupted_cells_continue_without_replaying_finished_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "cells.json"
    runner = grid.Runner(PAIRS, tmp_path, 1, Journal(out, "code"))
    (first,) = runner.run([SMALL])
    assert set(first["rates"]) == {" / ".join(pair) for pair in PAIRS}
    assert first["requests"] == 2 * 4 + 3
    assert first["resumed_at"]["branch / clairvoyant"] == 2048
    monkeypatch.setattr(grid, "make_trace", None)  # nothing is read or replayed again
    assert list(grid.Runner(PAIRS, tmp_path, 1, Journal(out, "code")).run([SMALL])) == [first]
    with pytest.raises(TypeError):
        list(grid.Runner(PAIRS, tmp_path, 1, Journal(out, "other code")).run([SMALL]))


@pytest.mark.parametrize("script", [grid, served_cells])
def test_selection_of_no_cell_is_an_error_and_keeps_earlier_results(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    out.write_text("[]")
    monkeypatch.setattr("sys.argv", [script.__name__, "--only", "no such cell", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "'no such cell'" in said
    assert f"0 of {len(KNOWN.recorded)} cells" in said
    assert out.read_text() == "[]"


def test_rates_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    runners = [grid.Runner(PAIRS, tmp_path, jobs, Journal(None, None)) for jobs in (1, 2)]
    one, two = (next(runner.run([SMALL])) for runner in runners)
    assert (one["rates"], one["resumed_at"]) == (two["rates"], two["resumed_at"])


def test_all_sizes_are_shares_of_one_memory(tmp_path: Path) -> None:
    """No size is below twice the longest request; the ideal memory is found once."""
    runner = grid.Runner(PAIRS[:1], tmp_path, 1, Journal(None, None))
    cells = [replace(SMALL, size=size) for size in (0.01, 0.5, 1.0, 2.0)]
    least, half, whole, twice = (cell["memory"] for cell in runner.run(cells))
    assert twice == 2 * whole
    assert half == max(least, round(whole / 2))
    assert least < whole


def test_commands_can_be_run_again_and_name_no_folder_of_one_machine() -> None:
    given = ["--only", "(", "--seeds", "0-17", "--data", "/work of one/data"]
    assert grid.command_of(given) == "python -m benchmarks.grid --only '(' --seeds 0-17 --data $DATA"
    assert grid.command_of(["--data=/one/data", "--small"]) == "python -m benchmarks.grid --data=$DATA --small"


def test_results_of_other_code_are_not_kept(tmp_path: Path) -> None:
    out = tmp_path / "cells.json"
    assert grid.earlier(out) == {}
    for code, kept in ((grid.code_digest(), ["a"]), ("other", [])):
        out.write_text(json.dumps({"run": {"code": code}, "cells": [{"cell": "a"}], "commands": []}))
        assert list(grid.earlier(out).get("cells", ())) == kept


def cell(name: str, requests: int, ours: float, rival: float, clairvoyant: float = 0.9, **more: object) -> dict:
    rates = {
        "headwater / headwater": ours,
        "branch / headwater": 0.99,
        "structural / clairvoyant": clairvoyant,
        "branch / clairvoyant": clairvoyant - 0.1,
        "structural / lru": 0.4,
        "branch / gdsf": rival,
    }
    return {
        "cell": name,
        "requests": requests,
        "rates": rates,
        "memory": round(1000 * ours),
        "expected": None,
        "resumed_at": None,
        **more,
    }


def test_verdicts() -> None:
    expected = {"expected": 8192, "resumed_at": {"headwater / headwater": 4096}}
    cells = [
        cell("wins", 5000, 0.65, 0.6),
        cell("within half a point", 5000, 0.596, 0.6),
        cell("short", 5000, 0.594, 0.6),
        cell("few requests", 1999, 0.591, 0.6),
        cell("short with few", 1999, 0.589, 0.6),
        cell("as the clairvoyant; a; 10%", 5000, 0.6, 0.6, 0.604),
        cell("as the clairvoyant; a; 25%", 5000, 0.6, 0.6, 0.604),
        cell("missed", 5000, 0.7, 0.6, **expected),
    ]
    found = grid.judged(cells, KNOWN)
    short = [one.name for one in found if one.falls_short]
    assert short == ["short", "short with few", "missed"]
    assert {one.rival for one in found} == {"branch / gdsf"}
    assert found[0].closed == pytest.approx(0.5)
    assert sum(one.rival_is_clairvoyant for one in found) == 2
    lines = summary(found, cells, ["structural / lru", "branch / gdsf"])
    assert lines[0] == "8 cells, 7 of which differ in traffic, model or bytes; 3 fall short."
    assert "-1.10 points in the worst (short with few)" in lines[1]
    assert "branch / gdsf: +1.50 points on average" in lines[2]
    rows = table(found)
    assert rows[-1].endswith("| short, resumed at 4,096 of 8,192 |")
    assert "| +5.00 |" in rows[2]
    assert len(rows) == 2 + len(cells)


def test_closed_gaps_are_summarised_as_median_mean_and_sum() -> None:
    cells = [
        cell(*values) for values in (("a", 5000, 0.65, 0.6), ("b", 5000, 0.5, 0.6, 0.6), ("c", 5000, 0.8, 0.6, 0.7))
    ]
    assert summary(grid.judged(cells, KNOWN), cells, ["structural / lru"])[3] == (
        "Of the gap between LRU and the clairvoyant 50% is closed in the median of 3 cells, 78% on average, and 75% of "
        "all gaps together; in 1 of them ours is above the clairvoyant."
    )


def test_page_has_a_part_for_each_kind_of_traffic() -> None:
    run = {"code": "x", "commit": "abc", "tree": "clean", "seconds": 1234}
    names = [KNOWN.recorded[0].name, KNOWN.drawn(3).name, KNOWN.drawn(KNOWN.final[0]).name]
    cells = [cell(name, 5000, 0.6, 0.5) for name in names]
    for one in cells:
        one["rates"] = {" / ".join(pair): 0.3 for pair in KNOWN.rivals} | one["rates"]
    text = "\n".join(grid.page({"run": run, "commands": ["make cells"], "cells": cells}, KNOWN))
    assert "Commit abc; 1,234 seconds of a processor for `make cells`." in text
    parts = [line for line in text.splitlines() if line.startswith("### ")]
    assert [part.partition(", ")[0] for part in parts] == [
        "### Recorded and scripted traffic",
        *["### Drawn traffic"] * 2,
    ]
    assert all(f"| {name} |" in text for name in names)
    assert "### " not in "\n".join(grid.page({"run": run, "commands": [], "cells": cells[:0]}, KNOWN))


def test_seeds_are_a_range() -> None:
    assert (grid.seeds_of("3-5"), grid.seeds_of("7"), grid.seeds_of("")) == (range(3, 6), range(7, 8), range(0))
    assert (grid.seeds_of("development"), grid.seeds_of("final")) == (KNOWN.development, KNOWN.final)


def test_cell_without_a_gap_closes_none_of_it() -> None:
    one = verdict(cell("flat", 5000, 0.4, 0.4, 0.403), "headwater / headwater", ["branch / headwater"])
    assert one.closed is None
