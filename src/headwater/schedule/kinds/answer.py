"""Caching an answer: the prefill of a finished answer, so that the next turn resumes after it (decision 002)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from headwater.cache.placement.base import Placed, Placement, PlacementQuery
from headwater.request import Generation
from headwater.schedule.sequence import Purpose, Sequence


@dataclass(eq=False)
class FinishedAnswer(Sequence):
    """Prompt and output of an answered request, to be prefilled. No token is sampled."""

    purpose = Purpose.ANSWER

    @classmethod
    def of(cls, id: int, asked: Generation, tokens: tuple[int, ...]) -> FinishedAnswer:
        """Return the prefill of `tokens`, which are prompt and output of a request, as it was asked."""
        named = asked.namespace
        return cls(id, Generation(tokens, asked.params, named, fidelity=asked.fidelity, priority=asked.priority))

    def place(self, placement: Placement, query: PlacementQuery) -> Placed:
        return placement.place_answer(query)


class Answers(deque[FinishedAnswer]):
    """Finished answers whose prefill has not begun, in order of their ends."""

    def add(self, answer: FinishedAnswer, most: int) -> None:
        """Queue an answer; beyond `most` the oldest are dropped."""
        self.append(answer)
        while len(self) > most:
            self.popleft()

    def drop_covered_by(self, seq: Sequence) -> None:
        """Drop the answers that the prefill of `seq` covers."""
        if seq.scores_prompt:
            return
        for answer in tuple(self):
            if answer.namespace == seq.namespace and seq.key.startswith(answer.key):
                self.remove(answer)
