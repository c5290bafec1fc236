"""Predicted answer: a draft is what follows in the answer that the client expects, as in OpenAI's `prediction`.

Cost of a proposal: a slice; after a token that is not predicted, at most 8 places of the last three tokens are tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from headwater.draft.drafter import NO_DRAFT, Draft, Source
from headwater.draft.runs import WIDTH, Runs, key_of

PLACES = 8  # occurrences that are looked at


class PredictedAnswer:
    """Drafter of one sequence whose answer is predicted: it follows the prediction, and finds its place again."""

    def __init__(self, prediction: Sequence[int], n_prompt: int) -> None:
        self._runs = Runs(prediction)
        self._skip = n_prompt  # tokens that are no part of the answer
        self._at = 0  # of the prediction: the token that follows, if the last one was predicted
        self._follows = True
        self._agreed = 0  # tokens that were predicted, one after the other
        self._last: list[int] = []  # tokens of the answer

    def take(self, tokens: Iterable[int]) -> None:
        """Add tokens that the sequence has now: those of the prompt first."""
        predicted = self._runs.tokens
        taken = iter(tokens)
        self._skip -= sum(1 for _ in islice(taken, self._skip))
        for token in taken:
            self._last = [*self._last[1 - WIDTH :], token]
            self._follows = self._follows and self._at < len(predicted) and predicted[self._at] == token
            self._at += self._follows
            self._agreed = self._agreed + 1 if self._follows else 0
            if not self._follows and len(self._last) == WIDTH:
                self._find()

    def _find(self) -> None:
        """Go on after the last tokens: the first place behind the one where the answer left the prediction."""
        places = sorted(self._runs.places(key_of(self._last), PLACES))
        if places:
            self._at = next((place for place in places if place >= self._at), places[-1])
            self._follows, self._agreed = True, WIDTH

    def propose(self, most: int) -> Draft:
        """Return what follows in the prediction."""
        tokens = self._runs.tokens[self._at : self._at + most] if self._follows else ()
        return Draft(list(tokens), self._agreed, Source.PREDICTED) if tokens else NO_DRAFT
