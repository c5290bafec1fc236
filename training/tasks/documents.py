"""Facts as short English documents."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from training.tasks.relation import Relation
from training.tasks.split import wordings
from training.tasks.world import Entity, Fact

PRONOUN = 0.35  # of later sentences about the same subject
ASIDE = 0.12  # of sentences: one that says nothing
LEAD = 0.15

ASIDES = wordings(
    "The [weather|wind|summer|winter] [was|stayed] [mild|cold|dry|wet] that [week|month|year].",
    "[Many people|Most people|Few people] [know|remember|have heard of] this.",
    "[This page|This note|The list] was [checked|written|copied] [last week|last month|last year].",
    "There is [little|nothing] [more|else] to [say|report|tell] [here|about it].",
)
LEADS = {
    "train": ("As the list says, ", "It is known that ", "According to the records, ", "As far as we know, "),
    "test": ("As we know, ", "According to the list, "),
}


@dataclass(frozen=True, slots=True)
class Document:
    text: str  # a paragraph, with the empty line after it
    facts: tuple[Fact, ...]


def worded(template: str, subject: str, genitive: str, value: str = "") -> str:
    return template.replace("{S}", subject).replace("{O}", genitive).replace("{V}", value)


def genitive(name: str) -> str:
    return f"{name}'" if name.endswith("s") else f"{name}'s"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def question(rng: random.Random, wordings: Sequence[str], subject: Entity) -> str:
    return worded(rng.choice(wordings), subject.name, genitive(subject.name))


def answer_sentence(relation: Relation, subject: Entity, value: str) -> str:
    return capital(worded(relation.sentence, subject.name, genitive(subject.name), value))


def fact_sentence(rng: random.Random, fact: Fact, split: str, before: Entity | None = None) -> str:
    """`before`: whom the sentence before was about, so that a pronoun may stand for the name."""
    template = rng.choice(fact.relation.facts[split])
    name, of_name = fact.subject.name, genitive(fact.subject.name)
    if before == fact.subject and template.startswith(("{S}", "{O}")) and rng.random() < PRONOUN:
        name, of_name = fact.subject.pronouns
    if rng.random() < LEAD:  # a template does not begin with a name
        template = rng.choice(LEADS[split]) + template[:1].lower() + template[1:]
    text = worded(template, name, of_name, fact.value)
    return capital(text) + "."


def document(rng: random.Random, groups: Sequence[Sequence[Fact]], split: str) -> Document:
    """One paragraph with the facts of each group, group by group."""
    sentences, before = [], None
    for facts in groups:
        for fact in facts:
            sentences.append(fact_sentence(rng, fact, split, before))
            before = fact.subject
            if rng.random() < ASIDE:
                sentences.append(rng.choice(ASIDES[split]))
                before = None
    return Document(" ".join(sentences) + "\n\n", tuple(fact for facts in groups for fact in facts))


def grouped(rng: random.Random, facts: list[list[Fact]], sizes: Callable[[], int]) -> list[list[list[Fact]]]:
    """Groups of facts, taken together until a document has as many facts as `sizes` draws."""
    documents: list[list[list[Fact]]] = []
    room = 0
    for group in facts:
        if room <= 0:
            documents.append([])
            room = sizes()
        documents[-1].append(group)
        room -= len(group)
    rng.shuffle(documents)
    return documents
