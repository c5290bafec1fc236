"""Reads documents and answers questions by rules only: by the text, not by the intent of its generator."""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import product
from typing import TypeVar

from training.tasks.chains import CHAINS, Chain
from training.tasks.documents import ASIDES, LEADS
from training.tasks.example import NOT_IN_DOCUMENTS
from training.tasks.relation import Relation
from training.tasks.relations import RELATIONS
from training.tasks.words import FIRMS, POOLS, TOWNS

T = TypeVar("T")
Known = dict[tuple[str, str], set[str]]

PRONOUN = re.compile(r"(she|he|it|her|his|its)\b", re.IGNORECASE)
GENITIVES = ("her", "his", "its")
NUMBERS = {
    "code": re.compile(r"[A-Z]{2}-\d{3}"),
    "number": re.compile(r"\d{4}"),
    "price": re.compile(r"\d+ crowns"),
    "weight": re.compile(r"\d+ kilos"),
    "small": re.compile(r"\d+"),
}


@cache
def pool(what: str, split: str) -> frozenset[str]:
    if what == "town":
        return frozenset(town.format(place) for town, place in product(TOWNS, POOLS["place"][split]))
    if what == "firm":
        return frozenset(firm.format(last) for firm, last in product(FIRMS, POOLS["last"][split]))
    if what == "person":
        return frozenset(map(" ".join, product(POOLS["first"][split], POOLS["last"][split])))
    return frozenset(POOLS[what][split])


def is_a(text: str, what: str, split: str) -> bool:
    return bool(NUMBERS[what].fullmatch(text)) if what in NUMBERS else text in pool(what, split)


class Reader:
    """Facts of a split's documents, by its wordings."""

    def __init__(self, split: str) -> None:
        self._split = split
        self._facts = [(r, _pattern(wording)) for r in RELATIONS.values() for wording in r.facts[split]]
        self._questions: list[tuple[Relation | Chain, re.Pattern[str]]] = [
            *((r, _pattern(wording)) for r in RELATIONS.values() for wording in r.questions[split]),
            *((chain, _pattern(wording)) for chain in CHAINS for wording in chain.questions[split]),
        ]

    def facts(self, documents: Iterable[str]) -> Known:
        """Values by subject and relation. Raises ValueError for a sentence that says nothing, or two things."""
        known: Known = {}
        for document in documents:
            subject = ""
            for sentence in document.strip().removesuffix(".").split(". "):
                if f"{sentence}." not in ASIDES[self._split]:
                    subject, relation, value = self._fact(sentence, subject)
                    known.setdefault((subject, relation.name), set()).add(value)
        return known

    def answer(self, question: str, known: Known) -> str:
        """Raises ValueError for text other than a question, and for a question with two answers."""
        question = question.removeprefix("Question: ")
        found = {
            answer
            for asked, pattern in self._questions
            if (match := pattern.fullmatch(question))
            for answer in self._answers(asked, _subject(match), known)
        }
        return _only(found, question)

    def _fact(self, sentence: str, before: str) -> tuple[str, Relation, str]:
        text = sentence
        for lead in LEADS[self._split]:
            text = text.removeprefix(lead)
        if match := PRONOUN.match(text):
            owned = match[0].lower() in GENITIVES
            text = (f"{before}'s" if owned else before) + text[match.end() :]
        found = {
            (_subject(match), relation, match["V"])
            for spelled in {text, text[:1].lower() + text[1:], text[:1].upper() + text[1:]}
            for relation, pattern in self._facts
            if (match := pattern.fullmatch(spelled))
            and is_a(match["V"], relation.value, self._split)
            and is_a(_subject(match), relation.subject, self._split)
        }
        return _only(found, sentence)

    def _answers(self, asked: Relation | Chain, subject: str, known: Known) -> Iterator[str]:
        first = asked if isinstance(asked, Relation) else asked.first
        if not is_a(subject, first.subject, self._split):
            return
        values = known.get((subject, first.name), set())
        if isinstance(asked, Chain):
            values = {value for bridge in values for value in known.get((bridge, asked.second.name), ())}
        yield from values or (NOT_IN_DOCUMENTS,)


def _pattern(wording: str) -> re.Pattern[str]:
    parts = {"{S}": "(?P<S>.+)", "{O}": "(?:(?P<O>.+)'s|(?P<P>.+s)')", "{V}": "(?P<V>.+)"}
    return re.compile("".join(parts.get(part) or re.escape(part) for part in re.split(r"(\{[SOV]\})", wording)))


def _subject(match: re.Match[str]) -> str:
    groups = match.groupdict()
    return str(groups.get("S") or groups.get("O") or groups.get("P"))


def _only(found: set[T], text: str) -> T:
    if len(found) != 1:
        raise ValueError(f"{text!r} has {len(found)} readings, must have 1")
    return found.pop()
