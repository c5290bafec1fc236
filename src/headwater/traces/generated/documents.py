"""Documents that are asked about: popular ones more often, and which ones are popular drifts."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.traces.generated.conversation import HOUR, LONGEST, SECOND, SPREAD, Conversation, Words
from headwater.traces.generated.dice import Dice, zipf
from headwater.traces.request import Request


@dataclass(frozen=True, slots=True)
class Documents:
    """Sessions about one of `count` documents, that of rank r in proportion to 1/r^(exponent/100).

    Every `drift` a document enters at rank 1, and all others sink by one rank. Questions follow each other, or each
    follows the document.
    """

    count: int = 100
    tokens: int = 4096  # in the median
    exponent: int = 100
    drift: int = 0  # milliseconds; 0: ranks stay
    questions: int = 2  # of a session, on average
    follow: bool = False
    query: int = 64
    answer: int = 256
    system: int = 256
    pause: int = 60 * SECOND
    returns: int = 0  # permille of pauses that last `absence`
    absence: int = 4 * HOUR

    @classmethod
    def drawn(cls, dice: Dice) -> Documents:
        return cls(
            count=dice.pick((10, 50, 200, 1000)),
            tokens=dice.pick((1024, 3072, 8192, 16_384)),
            exponent=dice.between(50, 140),
            drift=dice.pick((0, 0, 60, 600)) * SECOND,
            questions=dice.between(1, 5),
            follow=dice.happens(500),
            system=dice.pick((0, 256, 2048)),
            pause=dice.between(20, 600) * SECOND,
            returns=dice.pick((0, 0, 100, 500)),
            absence=dice.between(1, 8) * HOUR,
        )

    def at_rank(self, rank: int, at: int) -> int:
        """Return the document that has a rank, counted from 0, at that time."""
        return (rank - (at // self.drift if self.drift else 0)) % self.count

    def session(self, name: str, at: int, end: int, dice: Dice, words: Words) -> list[Request]:
        system = words.named(0, median=self.system, spread=0) if self.system else words.new(0)
        number = self.at_rank(dice.choose(zipf(self.count, self.exponent)), at)
        begin = system + words.named(1, number, median=self.tokens)[:LONGEST]
        talk, made = Conversation(name, system, begin), list[Request]()
        for _ in range(dice.turns(self.questions)):
            query, answer = (words.new(dice.around(median, SPREAD)) for median in (self.query, self.answer))
            if at >= end:
                break
            talk.ask(at, query, answer)
            if not self.follow:
                made += talk.requests()
                talk = Conversation(name, system, begin)
            away = dice.happens(self.returns)
            at += dice.around(self.absence, SPREAD) if away else dice.exponential(self.pause)
        return made + list(talk.requests())
