"""Items of an evaluation, and tables of their results."""

import io
import json
from collections import Counter

import pytest
import zstandard
from rich.console import Console

from headwater.errors import TraceError
from headwater.evaluate.asking import Score, Scored
from headwater.evaluate.items import DEFAULT_TASKS, KINDS, Call, drawn, read_items
from headwater.evaluate.summary import Summary, sliced
from headwater.evaluate.tables import faults, kinds_by_context, sliced_table
from tests.evaluate.items import LOOK_UP, answered, fields, item, scored, tool_item


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


@pytest.mark.parametrize("packed", [False, True])
def test_items_come_in_the_order_of_the_file_plain_or_packed(tmp_path, packed):
    lines = "\n".join(json.dumps(fields(group=group)) for group in (2, 0, 1)).encode()
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(zstandard.compress(lines) if packed else lines)
    items = read_items(path)
    assert [one.group for one in items] == [2, 0, 1]
    assert items[0].documents == ("D1", "D2")
    assert items[0].tools == ()


def test_a_tool_item_has_its_call():
    assert tool_item().call == Call("look_up", {"code": "K1"})
    assert tool_item().tools == (LOOK_UP,)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{", "no JSON"),
        ("[]", "is a list"),
        ({}, "kind is missing"),
        (fields(kind="riddle"), "'riddle'"),
        (fields(tokens="many"), "tokens is a text, must be an integer"),
        (fields(tokens=True), "tokens is bool"),
        (fields(tokens=0), "tokens is 0"),
        (fields(messages=[]), "messages has 0"),
        (fields(messages=["hello"]), "messages has a text"),
        (fields(answers=[]), "answers has 0"),
        (fields(answers="Ada"), "answers is a text, must be a list"),
        (fields(group=None), "group is null"),
        (fields(kind="tool"), "needs both"),
        (fields(tools=[{"name": "look_up"}]), "a function with a name"),
        (fields(tools=[{"function": {"name": "look_up", "parameters": "code"}}]), "parameters must be an object"),
        (fields(call=["look_up"]), "call is a list"),
        (fields(call={"name": "look_up"}), "arguments is missing"),
    ],
)
def test_malformed_item_is_an_error_with_its_line(tmp_path, line, part):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(fields()) + "\n\n" + (line if isinstance(line, str) else json.dumps(line)) + "\n")
    with pytest.raises(TraceError, match=r"tasks\.jsonl, line 3: ") as caught:
        read_items(path)
    assert part in str(caught.value)


def test_missing_file_and_missing_items_are_errors(tmp_path):
    with pytest.raises(TraceError, match="is not a file"):
        read_items(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(TraceError, match="0 items"):
        read_items(tmp_path / "empty.jsonl")


def test_a_limit_draws_from_every_kind():
    many = {"single": 50, "absent": 3, "memory": 10}
    items = [item(kind=kind, group=n) for kind in many for n in range(many[kind])]
    kinds = Counter(one.kind for one in drawn(items, 12))
    assert kinds == {"single": 5, "absent": 3, "memory": 4}
    of_one = [one.group for one in drawn(items, 12) if one.kind == "single"]
    assert of_one == [0, 10, 20, 30, 40], "spread over the file"
    assert drawn(items, 12) == [one for one in items if one in drawn(items, 12)]
    assert len(drawn(items, 1)) == 1
    assert drawn(items, None) == drawn(items, 1000) == items
    assert {one.kind for one in drawn(read_items(DEFAULT_TASKS), 12)} == set(KINDS)
