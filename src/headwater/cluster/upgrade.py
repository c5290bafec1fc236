"""Rolling upgrade: every worker of a cluster is replaced by one with other settings, one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headwater.cluster.cost import Role
from headwater.config import ServeConfig


@dataclass(frozen=True, slots=True)
class Member:
    """State of a worker during an upgrade."""

    name: str
    role: Role
    is_new: bool  # has the settings of the upgrade
    is_draining: bool
    serves: bool  # every router gives it requests


@dataclass(frozen=True, slots=True)
class Start:
    """Step: start a worker with the new settings."""

    role: Role


@dataclass(frozen=True, slots=True)
class Drain:
    """Step: drain a worker with the earlier settings."""

    name: str


@dataclass(eq=False)
class Upgrade:
    """One upgrade: its settings and its progress."""

    id: str
    config: ServeConfig  # of the whole host
    drain_first: bool = False  # drain each worker before its replacement starts, not after that one serves
    said: list[str] = field(default_factory=list)  # the steps, as text
    error: str = ""  # why it was given up
    ended: bool = False

    def step(self, members: Sequence[Member], wanted: Mapping[Role, int]) -> Start | Drain | None:
        """Return the next step; None: wait, or nothing is left to do, and it has ended.

        A new worker serves before an earlier one is drained, and one is drained at a time. So the wanted number serves,
        or one less with `drain_first` if more than one is wanted. A worker that is lost meanwhile is replaced by a
        new one.
        """
        there = Counter(one.role for one in members if not one.is_draining)
        draining = any(one.is_draining for one in members)
        together = sum(wanted.values())
        drain_first = self.drain_first and together > 1
        for role, number in wanted.items():
            if there[role] < number and not (drain_first and len(members) >= together):
                return Start(role)
        if draining or not all(one.serves for one in members):
            return None
        earlier = [one for one in members if not one.is_new]
        if not earlier:
            self.said.append(f"all {len(members)} workers have the new settings")
            self.ended = True
            return None
        first = earlier[0]
        if drain_first or there[first.role] > wanted[first.role]:
            return Drain(first.name)
        return Start(first.role)

    def abort(self, why: str) -> None:
        """Abort the upgrade; workers stay as they are."""
        self.error = f"{why}; the upgrade was aborted, and the serving workers continue"
        self.ended = True  # last: another thread looks

    def shown(self) -> dict[str, object]:
        """Return its progress, for `headwater cluster upgrade`."""
        ended = self.ended  # first: then all earlier steps are listed
        return {"id": self.id, "said": list(self.said), "error": self.error, "ended": ended}
