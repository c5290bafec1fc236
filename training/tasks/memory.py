"""Facts told in a chat and asked for later."""

from __future__ import annotations

import random

from training.tasks import smalltalk
from training.tasks.budget import TURN, Count
from training.tasks.conversation import Turn, assembled, said
from training.tasks.documents import answer_sentence, fact_sentence, question
from training.tasks.example import MEMORY, NOT_TOLD, NOTED, Example
from training.tasks.split import wordings
from training.tasks.words import Drawer
from training.tasks.world import Fact, draw_facts

OWN = {
    "locker code": "code",
    "door code": "code",
    "flight number": "code",
    "room number": "number",
    "telephone extension": "number",
    "home town": "town",
    "street": "street",
    "birthday": "date",
    "next meeting": "date",
    "favourite colour": "colour",
    "favourite drink": "drink",
    "job": "job",
    "employer": "firm",
    "sister": "person",
    "brother": "person",
    "teacher": "person",
    "dog": "first",
    "cat": "first",
}
# "my dog is called X" for what has a name
NAMED = {"sister", "brother", "teacher", "dog", "cat", "street", "home town", "employer"}
TELL = wordings(
    "[|By the way, |Please remember: |Just so you know, |One more thing: ][my {T} is {V}|I have {V} as my {T}]."
)
TELL_NAMED = wordings("[|By the way, |Please remember: |Just so you know, ]my {T} is [called|named] {V}.")
ASK = wordings(
    "[|Now, |One more thing: ][what is my {T}|what did I say my {T} is|tell me what my {T} is]?",
    "[|Now, ][which|what] {T} did I tell you of?",
)
ASK_NAMED = wordings(
    "[|Now, |One more thing: ]what is my {T} [called|named]?",
    "[|Now, |One more thing: ]what is the name of my {T}?",
    "[|Now, ]how is my {T} called?",
)
SYSTEMS = ("You are a helpful assistant.", "You remember what the user tells you.", "")
TELLING, ASKING = 0.4, 0.42  # of turns; the rest is small talk
UNTOLD = 0.12  # of questions


class Talk:
    """Facts that the user has told so far, and the questions about them."""

    def __init__(self, drawer: Drawer, others: list[Fact]) -> None:
        self._drawer, self._rng, self._split = drawer, drawer.rng, drawer.split
        self._untold = list(OWN)
        self._rng.shuffle(self._untold)
        self._others = others
        self._open: list[tuple[str, str, str]] = []  # a mentioned fact: the question, its answer, the answer's sentence
        self._known: list[tuple[str, str, str]] = []  # asked once already

    def tell(self) -> Turn | None:
        if self._untold and (not self._others or self._rng.random() < 0.5):
            thing = self._untold.pop()
            value = self._drawer.draw(OWN[thing])
            self._open.append((self._question(thing), value, f"Your {thing} is {value}."))
            tell = TELL_NAMED if thing in NAMED and self._rng.random() < 0.5 else TELL
            return said(_started(self._rng.choice(tell[self._split]), thing, value), NOTED)
        if not self._others:
            return None
        fact = self._others.pop()
        asked = question(self._rng, fact.relation.questions[self._split], fact.subject)
        self._open.append((asked, fact.value, answer_sentence(fact.relation, fact.subject, fact.value)))
        return said(fact_sentence(self._rng, fact, self._split), NOTED)

    def ask(self) -> tuple[str, str, str] | None:
        """A question, its answer, and the answer as a sentence."""
        if self._untold and self._rng.random() < UNTOLD:
            return self._question(self._rng.choice(self._untold)), NOT_TOLD, NOT_TOLD
        if self._open:
            self._known.append(self._open.pop(self._rng.randrange(len(self._open))))
            return self._known[-1]
        if self._known and self._rng.random() < 0.2:
            return self._rng.choice(self._known)
        return None

    def _question(self, thing: str) -> str:
        ask = ASK_NAMED if thing in NAMED and self._rng.random() < 0.5 else ASK
        return _started(self._rng.choice(ask[self._split]), thing)


def _started(template: str, thing: str, value: str = "") -> str:
    text = template.replace("{T}", thing).replace("{V}", value)
    return text[:1].upper() + text[1:]


def draw(rng: random.Random, tokens: int, split: str, count: Count) -> Example:
    drawer = Drawer(rng, split)
    facts = [fact for group in draw_facts(drawer, tokens // 60, (1, 2), False) for fact in group]
    rng.shuffle(facts)
    talk = Talk(drawer, facts)
    turns: list[Turn] = []
    left = tokens
    while left > 0:
        turn = _turn(rng, talk, first=not turns) or smalltalk.draw(drawer)
        left -= count(turn.user) + 2 * TURN + 3
        turns.append(turn)
    return assembled(MEMORY, rng.choice(SYSTEMS), turns, (tokens, count))


def _turn(rng: random.Random, talk: Talk, first: bool) -> Turn | None:
    which = rng.random()
    if first or which < TELLING:
        return talk.tell()
    if which < TELLING + ASKING and (asked := talk.ask()):
        return said(asked[0], asked[1], MEMORY)
    return None
