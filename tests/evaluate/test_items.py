"""Files of items: read whole, and refused by line."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import zstandard

from headwater.errors import TraceError
from headwater.evaluate.items import DEFAULT_TASKS, KINDS, Call, drawn, read_items
from tests.evaluate.items import LOOK_UP, fields, item, tool_item


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
