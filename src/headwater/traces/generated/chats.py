"""Chats: sessions that end or live on, return after hours, go back to an earlier turn, or are compacted."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.traces.generated.conversation import HOUR, LONGEST, SECOND, SPREAD, Conversation, Words
from headwater.traces.generated.dice import Dice, zipf
from headwater.traces.request import Request

LIVING = 1_000  # turns: more than any session has before the traffic ends


@dataclass(frozen=True, slots=True)
class Chats:
    """Sessions with one of `systems` system prompts, the r-th in proportion to 1/r.

    A session ends after `turns` turns on average (a geometric distribution), or lives on as long as the traffic does;
    in both cases its history is compacted once the prompt would have `limit` tokens: a summary takes its place.
    Shares are permille.
    """

    systems: int = 1
    system: int = 512  # tokens in the median, as the next two
    query: int = 64
    answer: int = 256
    turns: int = 4
    living: int = 0  # sessions that live on
    pause: int = 30 * SECOND  # between turns, on average
    returns: int = 0  # pauses that last `absence`
    absence: int = 4 * HOUR  # in the median
    edits: int = 0  # turns that take the place of an earlier one
    limit: int = LONGEST

    @classmethod
    def drawn(cls, dice: Dice) -> Chats:
        return cls(
            systems=dice.pick((1, 1, 3, 10, 50)),
            system=dice.pick((128, 512, 2048, 6144)),
            query=dice.pick((32, 64, 256)),
            answer=dice.pick((64, 256, 768)),
            turns=dice.between(1, 12),
            living=dice.pick((0, 0, 100, 400)),
            pause=dice.between(10, 300) * SECOND,
            returns=dice.pick((0, 0, 50, 200)),
            absence=dice.between(1, 8) * HOUR,
            edits=dice.pick((0, 0, 50, 150)),
            limit=dice.pick((LONGEST, LONGEST, 8192)),
        )

    def session(self, name: str, at: int, end: int, dice: Dice, words: Words) -> list[Request]:
        system = words.named(0, dice.choose(zipf(self.systems, 100)), median=self.system, spread=SPREAD)
        talk, made = Conversation(name, system), list[Request]()
        turns = LIVING if dice.happens(self.living) else dice.turns(self.turns)
        for _ in range(turns):
            if at >= end:
                break
            query, answer = (words.new(dice.around(median, SPREAD)) for median in (self.query, self.answer))
            if len(talk.text) + len(query) > self.limit:
                made += talk.requests()
                talk = Conversation(name, system, system + words.new(len(talk.text) // 8))
            talk.ask(at, query, answer)
            ends = talk.ends()
            if dice.happens(self.edits) and len(ends) > 1:
                made += talk.requests()
                talk = talk.until(ends[dice.below(len(ends) - 1)])
            away = dice.happens(self.returns)
            at += dice.around(self.absence, SPREAD) if away else dice.exponential(self.pause)
        return made + list(talk.requests())
