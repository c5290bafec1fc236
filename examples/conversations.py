"""What the demo asks, and what is right: a made-up town in fourteen documents, and a few things to call."""

from __future__ import annotations

import json
from typing import Any

DOCUMENTS = (
    "Marta Ellwood lives in Farholm. Marta Ellwood works at Oldmere Glass. Her telephone extension is 4471.",
    "Oldmere Glass was founded in 1874. The head of Oldmere Glass is Jon Barrow. It sells blue bottles.",
    "Farholm lies by the river Senn. The mayor of Farholm is Ada Colver. Farholm has its yearly fair on 9 May.",
    "The small clock stands in the upper hall. The small clock bears the number TR-508. Its price is 310 crowns.",
    "Jon Barrow lives in Wickdale. The badge of Jon Barrow has the code MK-227. He was born on 3 August.",
    "Wickdale was given the postal code 7315. The mayor of Wickdale is Piet Hallow. The summer was dry that year.",
    "The spring concert is to come to Farholm this year. 240 seats were printed for the spring concert.",
    "Ada Colver owns the old lantern. The old lantern stands in the back barn. It weighs 14 kilos.",
    "Lena Orchard works as a harbour guard. Lena Orchard has one sister called Ruth Orchard. Many people know this.",
    "Ruth Orchard lives in Brayton. The telephone extension of Ruth Orchard is 6920. The weather stayed wet.",
    "Brayton lies by the river Ull. Brayton has its yearly fair on 21 June. The mayor of Brayton is Nils Tarrow.",
    "Tarrow Works sells iron gates. Tarrow Works was founded in 1931. The head of Tarrow Works is Nils Tarrow.",
    "The winter market is to come to Brayton this year. Lena Orchard opens the winter market.",
    "Piet Hallow owns the silver drum. The silver drum stands in the lower cellar. It bears the number QS-664.",
)
FOLDERS = tuple(" ".join(DOCUMENTS[first : first + 3]) for first in range(0, len(DOCUMENTS), 3))
ORDERS = (
    ((0, 1, 2, 3, 4), "Who is the head of Oldmere Glass?", "Jon Barrow"),
    ((3, 0, 4, 2, 1), "What is the price of the small clock?", "310 crowns"),
    ((4, 2, 1, 0, 3), "Which river lies Brayton by?", "Ull"),
)
NOT_THERE = "Not in the documents."

TOOLS = (
    ("send_letter", {"person": "string", "street": "string"}),
    ("book_table", {"date": "string"}),
    ("count_boats", {"town": "string", "number": "integer"}),
)
TASKS = (
    (
        "Please send a letter with person Ada Colver and street Mill Street.",
        "send_letter",
        {"person": "Ada Colver", "street": "Mill Street"},
    ),
    ("Please count the boats with town Brayton and number 12.", "count_boats", {"town": "Brayton", "number": 12}),
    ("Please book a table with date 21 June.", "book_table", {"date": "21 June"}),
)
FACTS = (
    ("My door code is VN-803.", "Noted."),
    ("My home town is called Brayton.", "Noted."),
    ("By the way, my job is boat builder.", "Noted."),
    ("What did I say my door code is?", "VN-803"),
    ("What is the name of my home town?", "Brayton"),
)


def library(first: int) -> dict[str, Any]:
    """A system prompt with all documents, another one in front for each conversation."""
    shown = "\n\n".join(DOCUMENTS[first:] + DOCUMENTS[:first])
    return message("system", f"Answer each question from the documents. Give the bare value.\n\nDocuments:\n\n{shown}")


def folders(order: tuple[int, ...], question: str) -> list[dict[str, Any]]:
    """Five documents in some order, each a segment that is cached by itself, and a question."""
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


def called(name: str, arguments: dict[str, Any]) -> str:
    """A call as the demo prints and compares it."""
    return f"{name}({json.dumps(arguments)})"
