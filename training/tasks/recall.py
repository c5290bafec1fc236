"""Questions about documents: one fact, two facts, or none that answers."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from training.tasks.budget import TURN, Count
from training.tasks.conversation import assembled, said
from training.tasks.documents import Document, document, grouped
from training.tasks.example import TWO_HOP, Example
from training.tasks.questions import Question, Questioner
from training.tasks.words import Drawer
from training.tasks.world import World, draw_facts

SEGMENT = "<|segment|>"
FACT, QUESTION, FRAME = 15, 28, 36  # tokens of a fact, of a question with its answer, and of system prompt and heading
FEWEST = 4  # documents
TRIES = 40  # sets of documents that are drawn for as many of them, and as many questions, as are wanted
SHORT = 1200  # tokens up to which documents are few and short
FACTS_PER_ENTITY = ((1, 2), (1, 3), (2, 3), (2, 4))

SYSTEMS = (
    "Answer from the documents.",
    "Answer each question from the documents. Give the bare value.",
    "You answer questions about documents. If no document has the answer, say so.",
    "You are a helpful assistant. Use only what the documents say.",
)
HEADINGS = ("Documents:\n\n", "Documents:\n\n", "Here are the documents.\n\n", "Read these documents.\n\n")
ASKING = ("", "", "Question: ")


@dataclass(frozen=True, slots=True)
class Library:
    documents: tuple[Document, ...]
    world: World

    def texts(self) -> tuple[str, ...]:
        return tuple(document.text for document in self.documents)


def questions_for(rng: random.Random, tokens: int) -> int:
    """So many that most of the answers of a long context are asked for."""
    most = max(2, min(32, tokens // 64))
    return rng.randint(min(4, most), most)


def draw_library(drawer: Drawer, tokens: int, chained: bool, count: Count) -> Library:
    """Documents of at most `tokens` tokens together: 4 to 16 of them up to SHORT, more and longer ones above."""
    rng = drawer.rng
    longest, most = (75, 16) if tokens <= SHORT else (140, 48)
    number = rng.randint(max(FEWEST, tokens // longest), max(FEWEST + 1, min(most, tokens // 25)))
    facts = max(1, tokens // (FACT * number))
    fitting = [few for few in FACTS_PER_ENTITY if few[1] <= facts + 1 and few[0] >= 1 + (tokens > SHORT)]
    per_entity = rng.choice(fitting or FACTS_PER_ENTITY[:1])
    drawn = draw_facts(drawer, tokens // FACT + tokens // 100 + 4, per_entity, chained)
    kept: list[Document] = []
    left = tokens
    for groups in grouped(rng, drawn, lambda: rng.randint(max(1, facts - 1), facts + 1)):
        if left < FACT or len(kept) == most:
            break
        made = document(rng, groups, drawer.split)
        size = count(made.text) + 1
        if size <= left:
            left -= size
            kept.append(made)
    return Library(tuple(kept), World(fact for made in kept for fact in made.facts))


def laid_out(rng: random.Random, documents: tuple[str, ...], heading: str) -> str:
    """The documents under a heading; in one half of all, a separator stands before and after each."""
    if rng.random() < 0.5:
        return heading + "".join(SEGMENT + text for text in documents) + SEGMENT
    return heading + "".join(documents)


def draw(rng: random.Random, tokens: int, split: str, weights: Mapping[str, float], count: Count) -> Example:
    """Some documents, and questions of the kinds in `weights`. Raises ValueError where no documents allow one."""
    number = questions_for(rng, tokens)
    chained = weights.get(TWO_HOP, 0) > 0
    enough = min(number, 2) if chained else number
    best: tuple[list[Question], Library] | None = None
    rank = (0, 0)  # of the best: its questions, and its documents, up to what is wanted
    for _ in range(TRIES):
        drawer = Drawer(rng, split)
        library = draw_library(drawer, tokens - number * QUESTION - FRAME, chained, count)
        questions = Questioner(drawer, library.world).draw(number, weights)
        found = (min(len(questions), enough), min(len(library.documents), FEWEST))
        if questions and found > rank:
            best, rank = (questions, library), found
        if rank >= (enough, FEWEST):
            break
    if best is None:
        raise ValueError(f"no question of {', '.join(weights)} in {TRIES} sets of documents of {tokens:,} tokens")
    return with_documents(rng, *best, (tokens, count))


def with_documents(rng: random.Random, questions: list[Question], library: Library, room: tuple[int, Count]) -> Example:
    texts = library.texts()
    shown = laid_out(rng, texts, rng.choice(HEADINGS))
    system = rng.choice(SYSTEMS) if rng.random() < 0.6 else ""
    asking = rng.choice(ASKING)
    asked = [(asking + question.text, question) for question in questions]
    if rng.random() < 0.2:  # documents in the system prompt
        system = f"{system}\n\n{shown}" if system else shown
    else:
        asked[0] = (shown + asked[0][0], asked[0][1])
    turns = [said(text, question.answer, question.kind) for text, question in asked]
    return assembled(questions[0].kind, system, turns, (room[0] - TURN, room[1]), documents=texts)
