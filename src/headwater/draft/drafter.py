"""Protocol of drafters: one follows one sequence, and proposes what may come next.

A wrong draft costs rows of a step and no bit of the answer: a drafter may be wrong, but not slow. Each states what a
proposal costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

MOST_DRAFTS = 16  # tokens of a draft
MTP_DRAFTS = 4  # tokens of a draft of the model's head of multi-token prediction
MAX_AGREED = 64  # of a head's draft


class Source(StrEnum):
    """Origin of a draft; drafts of different ones are right with different chances."""

    COPIED = "copied"  # from the prompt or an answer
    PREDICTED = "predicted"  # by the client
    FORCED = "forced"  # by the answer's constraint
    HEAD = "head"  # by the model's head of multi-token prediction


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may follow, one after the other; none where a drafter has no idea."""

    tokens: list[int]
    agreed: int = 0  # last tokens of the sequence that stood before the ones that were copied: more promise more
    source: Source = Source.COPIED


NO_DRAFT = Draft([])


def draft_of(tokens: Sequence[int], first_chance: float) -> Draft:
    """Return a head's draft, whose first token it gives the probability `first_chance`.

    That counts as if about 2 / (1 − p) tokens agreed.
    """
    if not tokens:
        return NO_DRAFT
    return Draft(list(tokens), min(MAX_AGREED, int(2 / max(1e-9, 1 - first_chance))), Source.HEAD)


class Drafter(Protocol):
    """Drafter of one sequence. It is given every token that the sequence has, in order, and no guess."""

    def take(self, tokens: Iterable[int]) -> None:
        """Add tokens that the sequence has now."""

    def propose(self, most: int) -> Draft:
        """Return a draft of at most so many tokens."""


def accepted(draft: Sequence[int], true: Sequence[int]) -> int:
    """Return how many leading tokens of a draft are those that came."""
    n = 0
    while n < len(draft) and n < len(true) and draft[n] == true[n]:
        n += 1
    return n


def steps_of(drafter: Drafter, answer: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Decode an answer that is known with a drafter; return (tokens drafted, drafted tokens accepted) of each step.

    A step yields one token more than it accepts: the one that the model itself gives after them.
    """
    steps, at = [], 0
    while at < len(answer):
        left = answer[at:]
        draft = drafter.propose(min(most, len(left) - 1)).tokens
        right = accepted(draft, left)
        steps.append((len(draft), right))
        drafter.take(left[: right + 1])
        at += right + 1
    return steps
