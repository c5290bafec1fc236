"""Documents of the demo, about a fictional town, and questions with their right answers."""

from __future__ import annotations

from headwater.load.session import Message

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
QUESTIONS = (
    ("Who is the head of Selvale Glass?", "Kanor Milstead"),
    ("What is the price of the small clock?", "310 crowns"),
    ("In which year was Lanby Works founded?", "1931"),
    ("Where does Simnor Palworth live?", "Dresdale"),
    ("What does Lanby Works sell?", "iron gates"),
    ("Which number does the silver drum bear?", "QS-664"),
    ("Who is the mayor of Ravkeld?", "Berta Wesworth"),
    ("On which day was Kanor Milstead born?", "3 August"),
    ("What is the postal code of Melport?", "7315"),
    ("Where does the old lantern stand?", "back barn"),
)
INSTRUCTION = "Answer each question from the documents. Give the bare value."


def system(documents: str) -> Message:
    """Return a system prompt with documents."""
    return {"role": "system", "content": f"{INSTRUCTION}\n\nDocuments:\n\n{documents}"}


def library(first: int = 0) -> Message:
    """Return a system prompt with all documents, which starts with document `first`."""
    return system("\n\n".join(DOCUMENTS[first:] + DOCUMENTS[:first]))


def archive(entries: int, first: int = 1) -> Message:
    """Return a system prompt with entries from day `first` on, and all documents after them: one of any length."""
    lines = (f"Day {day}: the harbour counted {day * 37 % 91} boats." for day in range(first, first + entries))
    return system("\n\n".join((*lines, *DOCUMENTS)))
