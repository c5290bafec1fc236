"""Conversations of the demo with their right answers: a fictional town in fourteen documents, and a few tools."""

from __future__ import annotations

import json
from typing import Any

DOCUMENTS = (
    "Polmira Palmore lives in Ravkeld. Polmira Palmore works at Selvale Glass. Her telephone extension is 4471.",
    "Selvale Glass was founded in 1874. The head of Selvale Glass is Kanor Milstead. It sells blue bottles.",
    "Ravkeld lies by the river Narnon. The mayor of Ravkeld is Berta Wesworth. Ravkeld has its yearly fair on 9 May.",
    "The small clock stands in the upper hall. The small clock bears the number TR-508. Its price is 310 crowns.",
    "Kanor Milstead lives in Melport. The badge of Kanor Milstead has the code MK-227. He was born on 3 August.",
    "Melport was given the postal code 7315. The mayor of Melport is Samon Nelson. The summer was dry that year.",
    "The spring concert is to come to Ravkeld this year. 240 seats were printed for the spring concert.",
    "Berta Wesworth owns the old lantern. The old lantern stands in the back barn. It weighs 14 kilos.",
    "Havin Stenstead works as a harbour guard. Havin Stenstead has one sister called Simnor Palworth.",
    "Simnor Palworth lives in Dresdale. The telephone extension of Simnor Palworth is 6920. The weather stayed wet.",
    "Dresdale lies by the river Droter. Its yearly fair is on 21 June. The mayor of Dresdale is Eldor Erworth.",
    "Lanby Works sells iron gates. Lanby Works was founded in 1931. The head of Lanby Works is Eldor Erworth.",
    "The winter market is to come to Dresdale this year. Havin Stenstead opens the winter market.",
    "Samon Nelson owns the silver drum. The silver drum stands in the lower cellar. It bears the number QS-664.",
)
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


def library(first: int) -> dict[str, Any]:
    """Return a system prompt with all documents, which starts with document `first`."""
    shown = "\n\n".join(DOCUMENTS[first:] + DOCUMENTS[:first])
    return message("system", f"Answer each question from the documents. Give the bare value.\n\nDocuments:\n\n{shown}")


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
