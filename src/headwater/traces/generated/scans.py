"""Scans: batches of long prompts, one after the other, that never come back."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.traces.generated.conversation import LONGEST, SECOND, SPREAD, Words, asked
from headwater.traces.generated.dice import Dice
from headwater.traces.request import Request


@dataclass(frozen=True, slots=True)
class Scans:
    """Batches of `run` prompts on average, each a session of its own, which share no token with any other prompt."""

    tokens: int = 4096  # in the median
    run: int = 50
    pause: int = SECOND
    answer: int = 64

    @classmethod
    def drawn(cls, dice: Dice) -> Scans:
        return cls(
            tokens=dice.pick((512, 2048, 8192, 16_384)),
            run=dice.pick((5, 30, 150)),
            pause=dice.pick((1, 5, 30)) * SECOND,
            answer=dice.pick((1, 64, 256)),
        )

    def session(self, name: str, at: int, end: int, dice: Dice, words: Words) -> list[Request]:
        made = list[Request]()
        for number in range(dice.turns(self.run)):
            if at >= end:
                break
            tokens, answer = min(LONGEST, dice.around(self.tokens, SPREAD)), dice.around(self.answer, SPREAD)
            text = words.new(tokens + answer).tobytes()
            made.append(asked(f"{name}/{number}", text, at, (0, 0, tokens), answer))
            at += dice.exponential(self.pause)
        return made
