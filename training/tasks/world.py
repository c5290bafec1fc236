"""Entities and their facts, drawn for one example."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from training.tasks.chains import CHAINS, Chain
from training.tasks.relation import EVENT, FIRM, PERSON, THING, TOWN, Relation
from training.tasks.relations import SUBJECT_RELATIONS
from training.tasks.words import Drawer

FREQUENCY = {PERSON: 9, FIRM: 4, TOWN: 4, THING: 3, EVENT: 2}
LINKED = 0.75  # of values that name an entity: one which documents say more of
CHAINED = 0.8  # of entities, where two-hop questions are wanted: those with the facts that these go through
# who runs a firm works there, in a way; a mayor lives in the town; a sister has a sister or a brother
SUGGESTED_BY = {"works_at": "director", "lives_in": "mayor", "sister": "sister"}
STARTS = (PERSON, EVENT)
CHAIN_RELATIONS = ({chain.second for chain in CHAINS}, {chain.first for chain in CHAINS})
NEUTER = ("it", "its")
PRONOUNS = (("she", "her"), ("he", "his"))


@dataclass(frozen=True, slots=True)
class Entity:
    kind: str
    name: str
    pronouns: tuple[str, str]  # subject and genitive


@dataclass(frozen=True, slots=True)
class Fact:
    subject: Entity
    relation: Relation
    value: str


def new_entity(drawer: Drawer, kind: str) -> Entity:
    return Entity(kind, drawer.draw(kind), drawer.rng.choice(PRONOUNS) if kind == PERSON else NEUTER)


def draw_facts(drawer: Drawer, count: int, per_entity: tuple[int, int], chained: bool) -> list[list[Fact]]:
    """About `count` facts, grouped by entity. `chained`: prefer what two-hop questions go through."""
    rng = drawer.rng
    planned: list[tuple[Entity, int]] = []
    left = count
    while left > 0:
        kind = rng.choices(list(FREQUENCY), list(FREQUENCY.values()))[0]
        facts = min(left, rng.randint(*per_entity), len(SUBJECT_RELATIONS[kind]))
        planned.append((new_entity(drawer, kind), facts))
        left -= facts
    entities: dict[str, list[Entity]] = {}
    for entity, _ in planned:
        entities.setdefault(entity.kind, []).append(entity)
    owned: set[str] = set()
    return [_facts_of(drawer, entity, number, entities, owned, chained) for entity, number in planned]


def _facts_of(
    drawer: Drawer, entity: Entity, number: int, entities: dict[str, list[Entity]], taken: set[str], chained: bool
) -> list[Fact]:
    relations = list(SUBJECT_RELATIONS[entity.kind])
    drawer.rng.shuffle(relations)
    if chained and drawer.rng.random() < CHAINED:
        relations.sort(key=lambda relation: relation not in CHAIN_RELATIONS[entity.kind in STARTS])
    facts = []
    for relation in relations[:number]:
        others = [e.name for e in entities.get(relation.value, ()) if e is not entity and e.name not in taken]
        value = drawer.rng.choice(others) if others and drawer.rng.random() < LINKED else drawer.draw(relation.value)
        if relation.value in (THING, PERSON):
            taken.add(value)  # no thing has two owners, no person two offices
        facts.append(Fact(entity, relation, value))
    drawer.rng.shuffle(facts)
    return facts


class World:
    """Knowledge that follows from facts."""

    def __init__(self, facts: Iterable[Fact]) -> None:
        self.facts = tuple(facts)
        self.value = {(fact.subject.name, fact.relation.name): fact.value for fact in self.facts}
        self.subjects = {fact.subject.name: fact.subject for fact in self.facts}
        self.named = {(fact.relation.value, fact.value) for fact in self.facts if fact.relation.links}
        self._offices = {(fact.relation.name, fact.value) for fact in self.facts}

    def chains(self) -> list[tuple[Chain, Entity, str]]:
        """Two-hop questions that have an answer: the chain, its subject, the answer."""
        found = []
        for fact in self.facts:
            for chain in CHAINS:
                if chain.first is fact.relation and (value := self.value.get((fact.value, chain.second.name))):
                    found.append((chain, fact.subject, value))
        return found

    def could_know(self, name: str, relation: Relation) -> bool:
        """Return whether the facts state the relation, or imply it for a reader."""
        if (name, relation.name) in self.value:
            return True
        return (SUGGESTED_BY.get(relation.name), name) in self._offices


def absent_facts(rng: random.Random, world: World, drawer: Drawer) -> tuple[Entity, Relation]:
    """A subject and a relation that the facts say nothing of: of a subject they name, or of one they do not."""
    while True:
        entity = _somebody(rng, world, drawer)
        relation = rng.choice(SUBJECT_RELATIONS[entity.kind])
        if not world.could_know(entity.name, relation):
            return entity, relation


def _somebody(rng: random.Random, world: World, drawer: Drawer) -> Entity:
    where = rng.random()
    if where < 0.55:
        return world.subjects[rng.choice(list(world.subjects))]
    kind = rng.choice(list(FREQUENCY))
    if where < 0.7:
        named = sorted(name for of_kind, name in world.named if of_kind == kind and name not in world.subjects)
        if named:
            return Entity(kind, rng.choice(named), NEUTER)
    return new_entity(drawer, kind)


def absent_chain(world: World) -> list[tuple[Chain, Entity]]:
    """Two-hop questions whose first or second fact is missing, for subjects that the facts name."""
    found = []
    for entity in world.subjects.values():
        for chain in CHAINS:
            if chain.first.subject != entity.kind:
                continue
            bridge = world.value.get((entity.name, chain.first.name))
            missing = bridge is None and not world.could_know(entity.name, chain.first)
            if missing or (bridge is not None and not world.could_know(bridge, chain.second)):
                found.append((chain, entity))
    return found
