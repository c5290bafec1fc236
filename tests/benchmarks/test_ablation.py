"""The ablation of the default policy: each part that it leaves out is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.ablation import ALL, PARTS, rates_of, table
from benchmarks.cells import Cell, Traffic

CELL = Cell(Traffic("generated(9, requests=400)"), "granite-4.0-h-small", 0.1)
MEMORY = {CELL.name: 5 * 10**9}


@pytest.fixture(scope="module")
def whole() -> float:
    return rates_of(ALL, [CELL], MEMORY, Path())[CELL.name]


@pytest.mark.parametrize("part", [part for part in PARTS if part != ALL])
def test_without_a_part_other_checkpoints_are_kept(part: str, whole: float) -> None:
    assert rates_of(part, [CELL], MEMORY, Path())[CELL.name] != whole


def test_parts_left_out_by_an_ablation_are_restored(whole: float) -> None:
    assert rates_of(ALL, [CELL], MEMORY, Path())[CELL.name] == whole


def test_table_has_means_and_differences() -> None:
    rates = {ALL: {"a": 0.5, "generated(0)": 0.2, "b": 0.6}, "one": {"a": 0.6, "generated(0)": 0.1, "b": 0.58}}
    assert list(table(rates)) == [
        "| without | recorded cells (2) | drawn cells (1) |",
        "| --- | ---: | ---: |",
        "| nothing | 55.00 | 20.00 |",
        "| one | 59.00 (+4.00; -2.0 to +10.0) | 10.00 (-10.00; -10.0 to -10.0) |",
    ]
