"""Evaluation items: questions whose right answers are known, read from files of JSON lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.errors import TraceError
from headwater.traces.source import Source

Json = dict[str, Any]

KINDS = ("single", "two_hop", "absent", "memory", "persona", "tool")
DEFAULT_TASKS = Path(__file__).parent.parent / "assets" / "held-out.jsonl.zst"


@dataclass(frozen=True, slots=True)
class Call:
    """The right tool call of an item."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Item:
    """A question with its documents and right answers.

    Items of one group share their documents, so they are not independent observations.
    """

    kind: str  # of KINDS
    n_documents: int
    tokens: int  # of the context, as counted by the file's author
    messages: tuple[Json, ...]  # with the documents; the last one is the question
    tools: tuple[Json, ...]
    documents: tuple[str, ...]
    answers: tuple[str, ...]  # each of them is right
    call: Call | None
    group: int


def read_items(path: Path) -> list[Item]:
    """Read the items of a file of JSON lines, plain or packed, in its order.

    Raises TraceError, which names the line, for a malformed item, and for a file without items.
    """
    if not path.is_file():
        why = "the package has no held-out set: name a file with --tasks" if path == DEFAULT_TASKS else "is not a file"
        raise TraceError(f"{path}: {why}")
    source = Source(path)
    items = []
    for line in source.lines():
        value = source.parsed(line)
        try:
            items.append(item_of(value))
        except ValueError as error:
            raise source.error(str(error)) from error
    if not items:
        raise TraceError(f"{path} has 0 items, at least 1 is needed")
    return items


def drawn(items: Sequence[Item], limit: int | None) -> list[Item]:
    """Return at most `limit` items in their order: equally many of each kind, if it has them, evenly spaced."""
    if limit is None or limit >= len(items):
        return list(items)
    by_kind: dict[str, list[int]] = {}
    for number, item in enumerate(items):
        by_kind.setdefault(item.kind, []).append(number)
    chosen: list[int] = []
    for left, numbers in enumerate(sorted(by_kind.values(), key=len)):
        share = min(len(numbers), (limit - len(chosen)) // (len(by_kind) - left))
        chosen += (numbers[at * len(numbers) // share] for at in range(share))
    return [items[number] for number in sorted(chosen)]


def item_of(value: Any) -> Item:
    """Build an item from a line's JSON. Raises ValueError, which names the field, if it is malformed."""
    if not isinstance(value, dict):
        raise ValueError(f"is {_kind_of(value)}, must be an object")
    kind = _field(value, "kind", str)
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}, must be one of {', '.join(KINDS)}")
    item = Item(
        kind=kind,
        n_documents=_field(value, "n_documents", int),
        tokens=_field(value, "tokens", int),
        messages=_all(value, "messages", dict),
        tools=_all(value, "tools", dict, optional=True),
        documents=_all(value, "documents", str, optional=True),
        answers=_all(value, "answers", str, optional=True),
        call=_call(value.get("call")),
        group=_field(value, "group", int),
    )
    _check(item)
    return item


def _check(item: Item) -> None:
    if not item.messages:
        raise ValueError("messages has 0 entries, at least 1 is needed")
    if item.tokens < 1:
        raise ValueError(f"tokens is {item.tokens:,}, at least 1 is needed")
    for tool in item.tools:
        if not isinstance(tool.get("function"), dict) or not isinstance(tool["function"].get("name"), str):
            raise ValueError(f"tools has {str(tool)[:80]}, must have a function with a name in each place")
        if not isinstance(tool["function"].get("parameters") or {}, dict):
            raise ValueError(f"tools has {str(tool)[:80]}, whose parameters must be an object")
    if item.kind == "tool" and (item.call is None or not item.tools):
        raise ValueError(f"kind is 'tool' with {len(item.tools)} tools and call {item.call}: it needs both")
    if item.kind != "tool" and not item.answers:
        raise ValueError("answers has 0 entries, at least 1 is needed")


def _call(value: Any) -> Call | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"call is {_kind_of(value)}, must be an object")
    return Call(_field(value, "name", str), _field(value, "arguments", dict))


def _field(value: Json, name: str, kind: type) -> Any:
    if name not in value:
        raise ValueError(f"{name} is missing")
    found = value[name]
    if not isinstance(found, kind) or isinstance(found, bool):
        raise ValueError(f"{name} is {_kind_of(found)}, must be {NAMES[kind]}")
    return found


def _all(value: Json, name: str, kind: type, optional: bool = False) -> tuple[Any, ...]:
    if optional and value.get(name) is None:
        return ()
    for entry in _field(value, name, list):
        if not isinstance(entry, kind):
            raise ValueError(f"{name} has {_kind_of(entry)}, must have {NAMES[kind]} in each place")
    return tuple(value[name])


NAMES = {str: "a text", int: "an integer", dict: "an object", list: "a list"}


def _kind_of(value: Any) -> str:
    return "null" if value is None else NAMES.get(type(value), type(value).__name__)
