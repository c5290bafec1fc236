"""A relation between a subject and a value: its statements and its questions."""

from __future__ import annotations

from dataclasses import dataclass

PERSON, FIRM, TOWN, THING, EVENT = "person", "firm", "town", "thing", "event"
SUBJECTS = (PERSON, FIRM, TOWN, THING, EVENT)


@dataclass(frozen=True, slots=True, eq=False)
class Relation:
    """{S} stands for the subject, {O} for the subject's genitive, {V} for the value."""

    name: str
    subject: str
    value: str  # what Drawer.draw takes
    facts: dict[str, tuple[str, ...]]
    questions: dict[str, tuple[str, ...]]
    sentence: str  # the answer as a sentence

    @property
    def links(self) -> bool:
        """Return whether the value is an entity with documents of its own."""
        return self.value in SUBJECTS
