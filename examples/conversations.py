"""Conversations of the demo with their right answers: a fictional town in fourteen documents, and a few tools."""

from __future__ import annotations

import json
from typing import Any

from headwater.cli.demo_documents import DOCUMENTS

FOLDERS = tuple(" ".join(DOCUMENTS[first : first + 3]) for first in range(0, len(DOCUMENTS), 3))
ORDERS = (
    ((0, 1, 2, 3, 4), "Who is the head of Selvale Glass?", "Kanor Milstead"),
    ((3, 0, 4, 2, 1), "What is the price of the small clock?", "310 crowns"),
    ((4, 2, 1, 0, 3), "Which river lies Dresdale by?", "Droter"),
)
NOT_THERE = "Not in the documents."

TOOLS = (
    ("send_letter", {"person": "string", "street": "string"}),
    ("book_table", {"date": "string"}),
    ("count_boats", {"town": "string", "number": "integer"}),
)
TASKS = (
    (
        "Please send a letter with person Berta Wesworth and street Mill Street.",
        "send_letter",
        {"person": "Berta Wesworth", "street": "Mill Street"},
    ),
    ("Please count the boats with town Dresdale and number 12.", "count_boats", {"town": "Dresdale", "number": 12}),
    ("Please book a table with date 21 June.", "book_table", {"date": "21 June"}),
)
FACTS = (
    ("My door code is VN-803.", "Noted."),
    ("My home town is called Dresdale.", "Noted."),
    ("By the way, my job is boat builder.", "Noted."),
    ("What did I say my door code is?", "VN-803"),
    ("What is the name of my home town?", "Dresdale"),
)


def folders(order: tuple[int, ...], question: str) -> list[dict[str, Any]]:
    """Return a prompt of five documents in the given order, each a segment, and a question."""
    parts = [{"type": "text", "text": f"{FOLDERS[i]}\n\n", "segment": True} for i in order]
    content = [{"type": "text", "text": "Documents:\n\n"}, *parts, {"type": "text", "text": question}]
    return [message("system", "Answer from the documents."), {"role": "user", "content": content}]


def message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def tools() -> list[dict[str, Any]]:
    return [tool(name, types) for name, types in TOOLS]


def tool(name: str, types: dict[str, str]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in types.items()},
        "required": list(types),
    }
    about = f"{name.replace('_', ' the ').capitalize()}."
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


def called(name: str, arguments: str) -> str:
    """Format a tool call for printing and comparing; arguments that are JSON are normalised."""
    try:
        arguments = json.dumps(json.loads(arguments))
    except json.JSONDecodeError:
        return f"{name}({arguments})"
    return f"{name}({arguments})"
