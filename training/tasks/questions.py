"""Questions about a world's facts, with their one answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from training.tasks.documents import answer_sentence, question
from training.tasks.example import ABSENT, NOT_IN_DOCUMENTS, SINGLE, TWO_HOP
from training.tasks.words import Drawer
from training.tasks.world import World, absent_chain, absent_facts

ABSENT_CHAINS = 0.25  # of questions without an answer: those that would need two facts


@dataclass(frozen=True, slots=True)
class Question:
    kind: str
    text: str
    answer: str
    sentence: str  # the answer in a full sentence, where the question is single; else the answer


class Questioner:
    """Draws questions of a world, none of them twice."""

    def __init__(self, drawer: Drawer, world: World) -> None:
        self._drawer, self._rng, self._split, self._world = drawer, drawer.rng, drawer.split, world
        self._singles = list(world.facts)
        self._chains = world.chains()
        self._broken = absent_chain(world)
        for pool in (self._singles, self._chains, self._broken):
            self._rng.shuffle(pool)
        self._asked: set[tuple[str, str]] = set()  # of absent ones, by subject and relation

    def draw(self, number: int, weights: Mapping[str, float]) -> list[Question]:
        """At most `number` questions, fewer where the world has no more of the kinds with a weight."""
        makers = {SINGLE: self._single, TWO_HOP: self._two_hop, ABSENT: self._absent}
        kinds = [kind for kind, weight in weights.items() if weight > 0 and kind in makers]
        questions: list[Question] = []
        while kinds and len(questions) < number:
            kind = self._rng.choices(kinds, [weights[kind] for kind in kinds])[0]
            if made := makers[kind]():
                questions.append(made)
            else:
                kinds.remove(kind)
        return questions

    def _single(self) -> Question | None:
        if not self._singles:
            return None
        fact = self._singles.pop()
        text = question(self._rng, fact.relation.questions[self._split], fact.subject)
        return Question(SINGLE, text, fact.value, answer_sentence(fact.relation, fact.subject, fact.value))

    def _two_hop(self) -> Question | None:
        if not self._chains:
            return None
        chain, subject, value = self._chains.pop()
        return Question(TWO_HOP, question(self._rng, chain.questions[self._split], subject), value, value)

    def _absent(self) -> Question | None:
        if self._broken and self._rng.random() < ABSENT_CHAINS:
            chain, subject = self._broken.pop()
            text = question(self._rng, chain.questions[self._split], subject)
        else:
            subject, relation = absent_facts(self._rng, self._world, self._drawer)
            if (subject.name, relation.name) in self._asked:
                return self._absent()
            self._asked.add((subject.name, relation.name))
            text = question(self._rng, relation.questions[self._split], subject)
        return Question(ABSENT, text, NOT_IN_DOCUMENTS, NOT_IN_DOCUMENTS)
