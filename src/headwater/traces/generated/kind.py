"""Kinds of traffic: which behaviours, in what shares, phases and tenants."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Protocol

from headwater.traces.generated.agents import Agents
from headwater.traces.generated.chats import Chats
from headwater.traces.generated.conversation import HOUR, Words
from headwater.traces.generated.dice import Dice, zipf
from headwater.traces.generated.documents import Documents
from headwater.traces.generated.scans import Scans
from headwater.traces.generated.templates import Templates
from headwater.traces.request import Request


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


@dataclass(frozen=True, slots=True)
class Source:
    """A behaviour and its part of the traffic."""

    name: str
    behaviour: Behaviour
    share: int  # permille of the requests
    phases: tuple[int, ...]  # numbers of the phases in which it is active
    boundaries: bool  # whether the parts of its prompts are known

    def __str__(self) -> str:
        """Share, name and parameters, in one line."""
        parameters = ", ".join(f"{one.name} {getattr(self.behaviour, one.name)}" for one in fields(self.behaviour))  # type: ignore[arg-type]
        phases = ", ".join(str(phase + 1) for phase in self.phases)
        known = "" if self.boundaries else "; parts of prompts unknown"
        return f"{self.share / 10:g}% {self.name} in phase {phases}: {parameters}{known}"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of traffic. Milliseconds, permille.

    Phases change at once: their ends are `phases`. Tenants share no prefix; the r-th has a part in proportion to 1/r².
    """

    sources: tuple[Source, ...]
    phases: tuple[int, ...]
    tenants: int = 1
    retries: int = 0  # requests that are sent again, within seconds

    @classmethod
    def drawn(cls, dice: Dice) -> Kind:
        """Draw one to four behaviours, one to three phases, and one to eight tenants."""
        horizon, count = dice.pick((1, 4, 12, 24)) * HOUR, dice.pick((1, 1, 2, 3))
        inner = sorted(dice.between(horizon // 5, horizon * 4 // 5) for _ in range(count - 1))
        names = [dice.pick(tuple(BEHAVIOURS)) for _ in range(dice.between(1, 4))]
        if set(names) == {"scans"}:
            names[0] = "chats"  # scans share nothing
        weights = [dice.between(1, 8) for _ in names]
        sources = []
        for number, name in enumerate(names):
            phases = tuple(phase for phase in range(count) if dice.happens(600)) or (number % count,)
            share = 1000 * sum(weights[: number + 1]) // sum(weights) - 1000 * sum(weights[:number]) // sum(weights)
            sources.append(Source(name, BEHAVIOURS[name].drawn(dice), share, phases, dice.happens(700)))
        return cls(tuple(sources), (*inner, horizon), dice.pick((1, 1, 2, 4, 8)), dice.pick((0, 0, 10, 50)))

    def windows(self, source: Source) -> list[tuple[int, int]]:
        """Return begin and end of the phases in which a source is active."""
        return [(self.phases[phase - 1] if phase else 0, self.phases[phase]) for phase in source.phases]

    def tenant(self, dice: Dice) -> str:
        """Draw the namespace of a session."""
        return "" if self.tenants == 1 else f"tenant {dice.choose(zipf(self.tenants, 200))}"
