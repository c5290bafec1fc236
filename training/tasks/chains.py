"""Questions that need two facts: of a subject, and of what the first fact names."""

from __future__ import annotations

from dataclasses import dataclass

from training.tasks.relation import Relation
from training.tasks.relations import RELATIONS
from training.tasks.split import wordings


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    first: Relation
    second: Relation
    questions: dict[str, tuple[str, ...]]


HOME = "[town where {S} lives|home town of {S}|town in which {S} lives]"
EMPLOYER = "[firm|employer]"


def _chain(first: str, second: str, *patterns: str) -> Chain:
    return Chain(RELATIONS[first], RELATIONS[second], wordings(*patterns))


CHAINS = (
    _chain(
        "works_at",
        "based_in",
        "In [which|what] town is the [firm|employer|office] of {S}?",
        "In [which|what] town is the firm based [where {S} works|that employs {S}]?",
        "[Where|In which town] is the employer of {S} based?",
    ),
    _chain("works_at", "makes", f"[What|What goods|Which goods] does the {EMPLOYER} of {{S}} [make|sell]?"),
    _chain("works_at", "director", "Who [runs|leads|directs] the firm [of {S}|that employs {S}|where {S} works]?"),
    _chain("works_at", "founded", f"[When|In which year|In what year] was the {EMPLOYER} of {{S}} [founded|set up]?"),
    _chain("lives_in", "mayor", f"Who is [the mayor|the new mayor] of the {HOME}?", f"Who leads the {HOME} as mayor?"),
    _chain("lives_in", "river", f"[Which|What] river [runs through|flows past] the {HOME}?"),
    _chain("lives_in", "fair", f"[When|On which day] is the [fair|yearly fair] of the {HOME}?"),
    _chain(
        "sister",
        "job",
        "What is [the job|the trade|the work] of [{O} sister|the sister of {S}]?",
        "What does [{O} sister|the sister of {S}] [do for a living|work as]?",
    ),
    _chain(
        "sister",
        "lives_in",
        "[Where|In which town|In what town] does [{O} sister|the sister of {S}] [live|have a house]?",
    ),
    _chain(
        "owns",
        "kept_in",
        "[Where|In which room] is the thing [kept|stored] that {S} [owns|bought|inherited]?",
    ),
    _chain(
        "owns",
        "serial",
        "[What|Which] is the [serial number|number] of the thing that {S} [owns|bought|inherited]?",
    ),
    _chain(
        "director",
        "lives_in",
        "[Where|In which town] does the [director|head|manager] of {S} [live|have a house]?",
    ),
    _chain(
        "held_in",
        "mayor",
        "Who is [the mayor|mayor|the new mayor] of the town [where|in which] {S} [is held|takes place]?",
    ),
    _chain(
        "held_in",
        "river",
        "[Which|What] river [runs through|flows through|flows past] the town where {S} [is held|takes place]?",
    ),
    _chain(
        "host",
        "job",
        "What is [the job|the trade|the work] of the [host|leader] of {S}?",
        "What does the [host|leader] of {S} [do for a living|work as]?",
    ),
)
