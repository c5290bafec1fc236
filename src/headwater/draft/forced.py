"""Forced tokens: where a constraint leaves one continuation, that is the draft.

Cost of a proposal: one question to the constraint, some microseconds of the library's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from headwater.draft.drafter import NO_DRAFT, Draft, Source
from headwater.errors import ConstraintError


class Grammar(Protocol):
    """The constraint of one answer, at the answer's end."""

    def forced(self) -> list[int]:
        """Return the tokens of the only text that may follow, in the tokenizer's usual form. Raises ConstraintError."""

    def allowed_length(self, tokens: Sequence[int]) -> int:
        """Return how many leading tokens are allowed to follow. Raises ConstraintError."""


class ForcedTokens:
    """Drafter of one constrained sequence. The constraint is given the sequence's tokens by the sampler."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar

    def take(self, tokens: Iterable[int]) -> None:
        """Do nothing: the constraint knows them."""

    def propose(self, most: int) -> Draft:
        """Return the forced tokens. A model may write the same text in other tokens: the draft is wrong then."""
        try:
            tokens = self._grammar.forced()[:most]
        except ConstraintError:  # sampling raises it again, and ends the request
            return NO_DRAFT
        return Draft(tokens, len(tokens), Source.FORCED)


def allowed(grammar: Grammar, draft: Draft) -> Draft:
    """Cut a draft where a constraint forbids it."""
    try:
        return Draft(draft.tokens[: grammar.allowed_length(draft.tokens)], draft.agreed, draft.source)
    except ConstraintError:
        return NO_DRAFT
