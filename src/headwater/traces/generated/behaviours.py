"""Behaviours: ways in which the sessions of drawn traffic send requests, each with parameters that a seed draws."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import Any, Protocol

from headwater.traces.generated.conversation import (
    HOUR,
    LONGEST,
    SECOND,
    SPREAD,
    Conversation,
    Words,
    asked,
    milliseconds,
)
from headwater.traces.generated.dice import Dice, zipf
from headwater.traces.request import Request

LAST_OBSERVATIONS = 5  # that SWE-agent's history processor keeps (`last_n_observations`)
STUB = 12  # tokens that take the place of an older one: that it is left out, and how long it was
WIDE_SPREAD = 120  # percent of an octave: observations' lengths vary more than other texts'
SLOTS = 1_000_000  # more than any template has: numbers of values continue from here
LIVING_TURNS = 1_000  # more than any session has before the traffic ends


@dataclass(slots=True)
class History:
    """Task, actions and observations of an agent, as they are prompted."""

    session: str
    system: array[int]
    task: array[int]
    actions: list[array[int]]
    observations: list[array[int]]  # one after each action
    stubs: list[array[int]]  # in their place, later

    def prompt(self, keeps: int) -> tuple[array[int], int]:
        """Return the prompt, of which the last `keeps` observations are whole (0: all), and where the last begins.

        The task, which SWE-agent counts as the first observation, is always whole.
        """
        text = self.system + self.task
        start, shown = len(self.system), len(self.observations) - (keeps or len(self.observations))
        for number, (action, observation) in enumerate(zip(self.actions, self.observations, strict=True)):
            text += action
            start = len(text)
            text += self.stubs[number] if number < shown else observation
        return text, start

    def forked(self, session: str) -> History:
        return replace(
            self, session=session, actions=self.actions[:], observations=self.observations[:], stubs=self.stubs[:]
        )


@dataclass(frozen=True, slots=True)
class Agents:
    """Sessions of `steps` steps on average, each an action (the answer) and the observation that it leads to.

    All share a system prompt with tools. `keeps` observations stay in the prompt, all of them if it is 0. A sub-agent
    has a prompt of its own, and its report is the observation. A fork tries `branches` ways from one history on; the
    first one is the session's. Shares are permille of steps.
    """

    system: int = 4096  # tokens in the median, as the next three
    task: int = 512
    action: int = 128
    observation: int = 512
    steps: int = 15
    keeps: int = 0
    subagents: int = 0
    forks: int = 0
    branches: int = 2
    pause: int = 10 * SECOND

    @classmethod
    def drawn(cls, dice: Dice) -> Agents:
        return cls(
            system=dice.pick((1024, 4096, 12_288)),
            task=dice.pick((128, 512, 2048)),
            action=dice.pick((48, 128, 384)),
            observation=dice.pick((128, 512, 1536)),
            steps=dice.between(5, 40),
            keeps=dice.pick((0, 0, LAST_OBSERVATIONS)),
            subagents=dice.pick((0, 0, 30, 100)),
            forks=dice.pick((0, 0, 20, 60)),
            branches=dice.between(2, 4),
            pause=dice.between(2, 60) * SECOND,
        )

    def session(self, name: str, at: int, end: int, dice: Dice, words: Words) -> list[Request]:
        system = words.named(0, median=self.system, spread=0)
        history = History(name, system, words.new(dice.around(self.task, SPREAD)), [], [], [])
        return self._steps(history, dice.turns(self.steps), at, end, dice, words)

    def _steps(
        self, history: History, steps: int, at: int, end: int, dice: Dice, words: Words, deep: int = 0
    ) -> list[Request]:
        """Go on from a history; sub-agents and forks (`deep` above 0) have none of their own."""
        made = list[Request]()
        for step in range(steps):
            prompt, start = history.prompt(self.keeps)
            if at >= end or len(prompt) > LONGEST:
                break
            action = words.new(dice.around(self.action, SPREAD))
            parts = len(history.system), start, len(prompt)
            made.append(asked(history.session, (prompt + action).tobytes(), at, parts, len(action)))
            at += dice.exponential(self.pause)
            observation = dice.around(self.observation, WIDE_SPREAD)
            if not deep and dice.happens(self.subagents):
                helper = self._helper(f"{history.session}/{step}", at, end, dice, words)
                made += helper
                if helper:
                    at = milliseconds(helper[-1]) + dice.exponential(self.pause)
            elif not deep and dice.happens(self.forks):
                for branch in range(1, self.branches):
                    fork = _observed(history.forked(f"{history.session}/{step}.{branch}"), action, observation, words)
                    made += self._steps(fork, dice.turns(max(1, self.steps // 3)), at, end, dice, words, 1)
            _observed(history, action, observation, words)
        return made

    def _helper(self, name: str, at: int, end: int, dice: Dice, words: Words) -> list[Request]:
        system = words.named(1, median=max(1, self.system // 2), spread=0)
        history = History(name, system, words.new(dice.around(self.task, SPREAD)), [], [], [])
        return self._steps(history, dice.turns(max(1, self.steps // 2)), at, end, dice, words, 1)


def _observed(history: History, action: array[int], tokens: int, words: Words) -> History:
    """Add an action and a new observation of that length to a history."""
    history.actions.append(action)
    history.observations.append(words.new(tokens))
    history.stubs.append(words.new(STUB))
    return history


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
        turns = LIVING_TURNS if dice.happens(self.living) else dice.turns(self.turns)
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


class Behaviour(Protocol):
    """A way in which sessions behave, with parameters that were drawn."""

    @classmethod
    def drawn(cls, dice: Dice) -> Any:
        """Draw the parameters."""

    def session(self, name: str, at: int, end: int, dice: Dice, words: Words) -> list[Request]:
        """Draw a session that begins at `at` and makes no request from `end` on. Milliseconds."""


BEHAVIOURS: dict[str, type[Behaviour]] = {
    "chats": Chats,
    "documents": Documents,
    "templates": Templates,
    "agents": Agents,
    "scans": Scans,
}
