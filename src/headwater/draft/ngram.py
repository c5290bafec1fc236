"""Prompt lookup: a draft is what followed an earlier occurrence of the last tokens (Saxena 2023).

Cost of a proposal: at most 8 occurrences are looked at, 32 tokens of each.
"""

from __future__ import annotations

from collections.abc import Iterable

from headwater.draft.drafter import NO_DRAFT, Draft
from headwater.draft.runs import WIDTH, Runs, key_of

PLACES = 8  # occurrences that are looked at
LONGEST = 32  # tokens of context beyond which one occurrence is no better than another


class PromptLookup:
    """Drafter that copies from the prompt and the answer so far, from where most of the last tokens agree."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._runs = Runs(tokens)

    def take(self, tokens: Iterable[int]) -> None:
        """Add tokens that the sequence has now."""
        self._runs.extend(tokens)

    def propose(self, most: int) -> Draft:
        """Return what followed the occurrence with the longest context, of equal ones the last; periods go on."""
        runs, text = self._runs, self._runs.tokens
        if len(text) < WIDTH or most < 1:
            return NO_DRAFT
        places = runs.places(key_of(text[-WIDTH:]), PLACES)
        agreed, end = max(((runs.agreement(end, text, LONGEST), end) for end in places), default=(0, 0))
        if not agreed:
            return NO_DRAFT
        period = len(text) - end
        return Draft([text[end + i % period] for i in range(most)], agreed)
