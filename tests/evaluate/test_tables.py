"""Tables as they are read."""

from __future__ import annotations

import io

from rich.console import Console

from headwater.evaluate.asking import Score, Scored
from headwater.evaluate.summary import Summary, sliced
from headwater.evaluate.tables import faults, kinds_by_context, sliced_table
from tests.evaluate.items import answered, item, scored, tool_item


def printed(table, width=140):
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


def rows(table):
    """The cells of each line that has some."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed(table).splitlines() if "│" in line]


COLUMN = [
    Scored(item(group=0, tokens=256, n_documents=3), answered("x", prompt_tokens=100, cached_tokens=60), Score(1, 1)),
    Scored(item(group=1, tokens=1000, n_documents=0), answered(outcome="refused", detail="too long"), Score(0, 0)),
    Scored(tool_item(group=1, tokens=1000), answered(prompt_tokens=100, cached_tokens=0), Score(0, None, 1)),
]


def test_a_row_is_its_slice_s_figures():
    found = rows(sliced_table("served", sliced(COLUMN, 0)))
    assert found[0] == ["all", "", "3", "33.3 [0.0,100.0]", "50.0 [0.0,100.0]", "100.0", "200", "60 (30%)", "1"]
    assert found[1] == ["kind", "single", "2", "50.0 [0.0,100.0]", "50.0 [0.0,100.0]", "–", "100", "60 (60%)", "1"]
    assert found[2] == ["", "tool", "1", "0.0", "–", "100.0", "100", "0 (0%)", "–"]
    assert [row[:3] for row in found[3:]] == [
        ["documents", "0", "1"],
        ["", "3 to 4", "2"],
        ["context", "about 256", "1"],
        ["", "about 1,024", "2"],
    ]


def test_kinds_are_columns_and_lengths_are_rows():
    assert rows(kinds_by_context(COLUMN, 0)) == [["about 256", "100.0", "–"], ["about 1,024", "0.0", "0.0"]]


def test_a_narrow_terminal_loses_no_figure():
    slices = sliced(COLUMN, 0)
    assert "…" not in printed(sliced_table("served", slices), 80)
    assert "[0.0,100.0]" in printed(sliced_table("served", slices), 110)


def test_unreported_cached_tokens_are_not_shown_as_zero():
    column = [scored(1, prompt_tokens=10)]
    assert Summary.of(column, 0).cached_tokens is None
    assert rows(sliced_table("served", sliced(column, 0)))[0][-2] == "not reported"


def test_faults_are_counted_by_message():
    column = [*COLUMN, *[scored(0, outcome="error", detail=detail) for detail in ("boom", "boom")]]
    assert faults(column) == ["2 x error: boom", "1 x refused: too long"]


def test_most_frequent_faults_are_shown():
    column = [scored(0, outcome="error", detail=f"boom {i}") for i in range(20)]
    assert len(faults(column)) == 5
