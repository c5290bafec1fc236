"""Finished answers whose prefill, which lets the next turn resume after them, has not begun."""

from __future__ import annotations

from collections import deque

from headwater.schedule.sequence import Sequence


class Answers(deque[Sequence]):
    """The one that ended first is first."""

    def add(self, answer: Sequence, most: int) -> None:
        """Queue it; of more than `most` the first are let go."""
        self.append(answer)
        while len(self) > most:
            self.popleft()

    def drop_covered_by(self, seq: Sequence) -> None:
        """What this request's own prefill will cover is not needed any more."""
        if seq.scores_prompt:
            return
        for answer in tuple(self):
            if answer.namespace == seq.namespace and seq.key.startswith(answer.key):
                self.remove(answer)
