"""Speculation under a virtual clock: the server chooses the number of drafts, and a law decides which are right.

A draft is right with a fixed chance if those before it are. The draw belongs to the position in an answer and not to
the step, so that a run's answers do not depend on the division into steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast

from headwater.draft.drafter import MOST_DRAFTS, Draft
from headwater.draft.runs import WIDTH
from headwater.errors import ConfigError
from headwater.models.profiles import Profile
from headwater.schedule.speculation import Speculation
from headwater.setting import OFF
from headwater.traces.generated.dice import GOLDEN, MASK, mixed

Kept = Literal["replay", "slots", "mtp"]
SPELLED = re.compile(r"(\d+)@(\d*\.?\d+)(?:/(replay|slots|mtp))?")


@dataclass(frozen=True, slots=True)
class Law:
    """Most drafts of a step, and the chance that one is right if those before it are.

    `kept`: the use of memory. `replay` keeps the inputs of each draft's state updates, `slots` keep the states
    themselves; `mtp` is replay, and with each page the entries of an MTP head of one attention layer.
    """

    drafts: int
    chance: float
    kept: Kept = "replay"

    @classmethod
    def read(cls, text: str) -> Law | None:
        """Read off, DRAFTS@CHANCE, DRAFTS@CHANCE/slots or DRAFTS@CHANCE/mtp. Raises ConfigError for anything else."""
        if text == OFF:
            return None
        found = SPELLED.fullmatch(text)
        if found is None:
            raise ConfigError(f"speculation is {text!r}, must be off, or like 4@0.7, 4@0.7/slots or 4@0.7/mtp")
        law = cls(int(found[1]), float(found[2]), cast(Kept, found[3] or "replay"))
        if not 0 < law.drafts <= MOST_DRAFTS:
            raise ConfigError(f"speculation is {text!r}: a step has 1 to {MOST_DRAFTS} drafts of a request")
        if law.chance > 1:
            raise ConfigError(f"speculation is {text!r}: a chance is at most 1")
        return law

    def __str__(self) -> str:
        return f"{self.drafts}@{self.chance:g}" + ("" if self.kept == "replay" else f"/{self.kept}")

    def bytes(self, profile: Profile, running: int) -> int:
        """Return the bytes of drafts of `running` requests in addition to states: none with slots, which are states."""
        return 0 if self.kept == "slots" else running * self.drafts * profile.draft_bytes

    def bytes_per_page(self, profile: Profile, page_size: int) -> int:
        """Return the bytes of a head's entries with each page. Raises ConfigError for a model without attention."""
        if self.kept != "mtp":
            return 0
        if not profile.kv_bytes_per_token:
            raise ConfigError(f"speculation is {self}: {profile.name} has no attention, and no MTP head")
        return profile.mtp_bytes_of_page(page_size)

    @property
    def states(self) -> int:
        """States that a running request takes."""
        return 1 + (self.drafts if self.kept == "slots" else 0)

    def right(self, seed: int, request: int, first: int, most: int) -> int:
        """Return the number of leading right drafts of a request, of at most `most` from output position `first` on."""
        n = 0
        while n < most and uniform(seed, request, first + n) < self.chance:
            n += 1
        return n

    def speculation(self) -> Speculation:
        """Return the server's speculation, whose drafters propose as many tokens as the law has drafts."""
        return Speculation(lambda namespace: [Unknown(self.drafts)], kind=str(self))


class Unknown:
    """Drafter of placeholder tokens: a trace has no token ids."""

    def __init__(self, most: int) -> None:
        self._most = most

    def take(self, tokens: Iterable[int]) -> None:
        """Do nothing."""

    def propose(self, most: int) -> Draft:
        """Return a draft of the largest permitted length."""
        return Draft([0] * min(most, self._most), WIDTH)


def uniform(*counter: int) -> float:
    """Return a number in [0, 1) of a counter: each part is mixed in by splitmix64 (Steele, Lea and Flood 2014)."""
    state = 0
    for part in counter:
        state = mixed((state ^ (part & MASK)) + GOLDEN & MASK)
    return state / (MASK + 1)
