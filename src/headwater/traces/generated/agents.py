"""Agents: sessions of actions and observations, with collapsed histories, sub-agents and forks."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace

from headwater.traces.generated.conversation import LONGEST, SECOND, SPREAD, Words, asked, milliseconds
from headwater.traces.generated.dice import Dice
from headwater.traces.request import Request

LAST = 5  # observations that SWE-agent's history processor keeps (`last_n_observations`)
STUB = 12  # tokens that take the place of an older one: that it is left out, and how long it was
WIDE = 120  # percent of an octave: observations' lengths vary more than other texts'


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
            keeps=dice.pick((0, 0, LAST)),
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
            observation = dice.around(self.observation, WIDE)
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
