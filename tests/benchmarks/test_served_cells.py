"""The comparison of times to the first token: arrivals at one load, rivals, verdicts, and a run that continues."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import grid, served_cells
from benchmarks.cells import Cell, Traffic, read_cells
from benchmarks.served_cells import Stretched, Times
from headwater.journal import Journal
from headwater.lab.cost import Load, StepCost, load_device
from headwater.lab.replay import replay
from headwater.lab.serving import Engine
from headwater.lab.tally import Outcome
from headwater.models.profiles import load_profile
from headwater.traces.arrivals import in_order
from headwater.traces.loads import make_arrivals
from headwater.traces.read import make_trace
from headwater.traces.request import Trace

KNOWN = read_cells()
OURS = " / ".join(KNOWN.ours[0])
CELL = Cell(Traffic("forked_chains(chains=2, tokens=4096, turn=1024, fork=2048)"), KNOWN.models[1], 0.5)
COST = StepCost(load_profile(CELL.model), load_device(served_cells.DEVICE))
COMPARED = {CELL.name: {"memory": 10**9, "rates": {" / ".join(pair): 0.5 for pair in KNOWN.rivals}}}


def chains() -> Trace:
    return make_trace(CELL.traffic.trace, None)


def test_stretched_arrivals_keep_their_order_and_take_that_much_longer() -> None:
    trace = chains()
    usual, slow = (list(in_order(one)) for one in (make_arrivals(trace), Stretched(make_arrivals(trace), 3.0)))
    assert [request for _, request in slow] == [request for _, request in usual]
    assert [at for at, _ in slow] == pytest.approx([3 * at for at, _ in usual])


def test_pause_after_an_answer_is_stretched_and_the_answer_is_not() -> None:
    trace = chains()
    usual, slow = make_arrivals(trace), Stretched(make_arrivals(trace), 3.0)
    first = usual.take()
    assert slow.take() is first
    usual.answered(first, 1000.0)
    slow.answered(first, 3000.0)
    while (due := usual.due()) is not None and usual.take().session != first.session:
        slow.take()
    assert slow.due() == pytest.approx(3 * due)
    assert len(slow) == len(usual) + 1


def outcome(at: float, prompt_tokens: int = 4096, resumed_at: int = 0, output_tokens: int = 1) -> Outcome:
    return Outcome(0, "s", prompt_tokens, output_tokens, resumed_at, 0, "", 0, at=at)


def test_traffic_is_stretched_to_the_stated_load_at_its_median() -> None:
    one = served_cells.seconds(outcome(0), COST)
    outcomes = [outcome(at * one) for at in (0.5, 1, 90, 100)]  # half has come at 1
    assert served_cells.stretch(outcomes, COST) == pytest.approx(2 / served_cells.LOAD)
    idle = [replace(one, at=100 * one.at) for one in outcomes]
    assert served_cells.stretch(idle, COST) == 1


def test_request_takes_the_time_of_its_prompt_and_of_its_answer() -> None:
    trace, setup = chains(), CELL.setup(served_cells.LOADED_BY, 10**9)
    arrivals = Stretched(make_arrivals(trace), 1000.0)
    alone = replay(trace, setup, arrivals, Engine(COST)).outcomes
    assert any(one.resumed_at for one in alone)
    for one in alone:
        assert served_cells.seconds(replace(one, output_tokens=1), COST) == pytest.approx(one.ttft, rel=1e-3)
    row = Load(rows=1, kv_tokens=4096, states=1, logits=1)
    answered = served_cells.seconds(outcome(0, output_tokens=11), COST) - served_cells.seconds(outcome(0), COST)
    assert answered == pytest.approx(COST.seconds(row, 10))


def test_rivals_are_the_published_ones_and_the_best_of_the_cell() -> None:
    rates = {" / ".join(pair): number / 100 for number, pair in enumerate(KNOWN.rivals)}
    rates["branch / gdsf"] = 0.9  # published, and one of the best
    pairs = served_cells.pairs_of(rates, KNOWN.ours[0], KNOWN.rivals)
    assert pairs == [KNOWN.ours[0], *served_cells.PUBLISHED, KNOWN.rivals[-1], KNOWN.rivals[-2]]
    assert set(served_cells.PUBLISHED) < set(KNOWN.rivals)


def cell(name: str, mean: float, p95: float) -> grid.Finished:
    """Return a cell with our times, and two rivals of which each is the best in one."""
    policies = {
        OURS: {"mean": mean, "p95": p95},
        "branch / lru": {"mean": 100.0, "p95": 900.0},
        "branch / gdsf": {"mean": 200.0, "p95": 500.0},
    }
    return {"cell": name, "stretch": 2.5, "seconds": 1.0, "policies": policies}


def test_verdicts() -> None:
    cells = [cell("wins", 50, 250), cell("at the limit", 102, 510), cell("mean", 102.1, 510), cell("both", 104, 1000)]
    means, p95s = ([Times.of(one, statistic) for one in cells] for statistic in served_cells.STATISTICS)
    assert {one.rival for one in means} == {"branch / lru"}
    assert {one.rival for one in p95s} == {"branch / gdsf"}
    assert [one.cell for one in means if one.missed] == ["mean", "both"]
    assert [one.cell for one in p95s if one.missed] == ["both"]
    lines = served_cells.summary(cells)
    assert "mean: at most 1.02 x the best rival's in 2 of 4 cells" in lines[0]
    assert "worst 1.040 (both)" in lines[0]
    assert "p95: at most 1.02 x the best rival's in 3 of 4 cells; geometric mean of the ratios 1.010" in lines[1]
    assert lines[2] == "2 of 4 cells are within it in both; 2 are not."
    assert lines[3:] == [
        "Missed: mean: mean 102 ms, 1.021 x branch / lru.",
        "Missed: both: mean 104 ms, 1.040 x branch / lru; p95 1,000 ms, 2.000 x branch / gdsf.",
    ]


def test_page_marks_the_cells_that_are_missed() -> None:
    cells = [cell("wins", 50, 250), cell("one", 104, 250), cell("both", 104, 1000)]
    lines = served_cells.page({"run": {"commit": "abc", "tree": "clean", "seconds": 1234}, "cells": cells})
    said = f"3 of {len(KNOWN.recorded)} cells have been run. Commit abc; 1,234 seconds of a processor."
    assert said in "\n".join(lines)
    rows = [line for line in lines if line.startswith(("| wins", "| one", "| both"))]
    assert [row.split(" | ")[-2:] for row in rows] == [["0.500", " |"], ["0.500", "missed |"], ["2.000", "missed |"]]


def test_interrupted_served_cells_continue_without_replaying_finished_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def runner() -> served_cells.ServedRunner:
        return served_cells.ServedRunner(KNOWN, COMPARED, tmp_path, 1, Journal(tmp_path / "served.json", "code"))

    (first,) = runner().run([CELL])
    assert next(iter(first["policies"])) == OURS
    assert len(first["policies"]) == 1 + len(served_cells.PUBLISHED) + served_cells.BEST
    assert all(0 < of["mean"] <= of["p95"] for of in first["policies"].values())
    monkeypatch.setattr(grid, "make_trace", None)  # nothing is read or replayed again
    assert list(runner().run([CELL])) == [first]
    with pytest.raises(TypeError):
        list(runner().run([replace(CELL, size=0.7)]))
