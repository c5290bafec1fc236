"""Templates with slots: prompts of fixed parts, with a value between each two of them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from headwater.traces.generated.conversation import SPREAD, Words, asked
from headwater.traces.generated.dice import Dice, zipf
from headwater.traces.request import Request

SLOTS = 1_000_000  # more than any template has: numbers of values continue from here


@dataclass(frozen=True, slots=True)
class Templates:
    """Requests of one of `templates` templates, the r-th in proportion to 1/r; no session has two.

    Each of the `parts` fixed parts is followed by a slot, which takes the r-th of its `values` in proportion to 1/r,
    and the last one a new value.
    """

    templates: int = 10
    parts: int = 4
    part: int = 512  # tokens of a part in the median
    slot: int = 32
    values: int = 4
    answer: int = 128

    @classmethod
    def drawn(cls, dice: Dice) -> Templates:
        return cls(
            templates=dice.pick((1, 5, 20, 100)),
            parts=dice.between(2, 6),
            part=dice.pick((128, 512, 1536)),
            slot=dice.pick((8, 32, 256)),
            values=dice.pick((2, 4, 16, 100)),
            answer=dice.pick((16, 128, 512)),
        )

    def session(self, name: str, at: int, end: int, dice: Dice, words: Words) -> list[Request]:
        template, text = dice.choose(zipf(self.templates, 100)), array("i")
        sums, system, start = zipf(self.values, 100), 0, 0
        for part in range(self.parts):
            text += words.named(template, part, median=self.part)
            system = system or len(text)
            start = len(text)
            last = part == self.parts - 1
            value = SLOTS + part, dice.choose(sums)
            text += words.new(self.slot) if last else words.named(template, *value, median=self.slot)
        answer = words.new(dice.around(self.answer, SPREAD))
        return [asked(name, (text + answer).tobytes(), at, (system, start, len(text)), len(answer))]
