"""Items by hand, and answers to them that no server gave."""

from typing import Any

from headwater.evaluate.asking import Score, Scored
from headwater.evaluate.items import Item, item_of
from headwater.evaluate.server import Answer

LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string"}, "count": {"type": "integer"}},
            "required": ["code"],
        },
    },
}


def fields(**changed: Any) -> dict[str, Any]:
    """An item as a file has it."""
    return {
        "kind": "single",
        "n_documents": 4,
        "tokens": 1000,
        "messages": [{"role": "system", "content": "D1 D2"}, {"role": "user", "content": "who?"}],
        "tools": None,
        "documents": ["D1", "D2"],
        "answers": ["Ada"],
        "call": None,
        "group": 0,
        **changed,
    }


def item(**changed: Any) -> Item:
    return item_of(fields(**changed))


def tool_item(**changed: Any) -> Item:
    call = {"name": "look_up", "arguments": {"code": "K1"}}
    return item(**{"kind": "tool", "tools": [LOOK_UP], "answers": [], "call": call, **changed})


def answered(text: str = "", *calls: tuple[str, str], **changed: Any) -> Answer:
    made = tuple({"name": name, "arguments": arguments} for name, arguments in calls)
    return Answer(**{"item": 0, "column": "served", "outcome": "ok", "text": text, "calls": made, **changed})


def scored(exact: float, group: int = 0, text: str = "x", **changed: Any) -> Scored:
    return Scored(item(group=group), answered(text, **changed), Score(exact, exact))
