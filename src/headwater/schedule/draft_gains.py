"""Limits that keep drafts from costing more than they give: of asking for them, and by what they have gained."""

from __future__ import annotations

from collections import Counter

SHARE = 0.01  # of the steps' seconds that asking may take while no draft is verified
MOST_SAVED = 0.010  # seconds of asking that are saved up
# weights of what drafts gained: of trust in the expectation, of earlier steps at each one with drafts, at each without
PRIOR, FORGETS, RELAXES = 4.0, 0.9, 0.995
MEASURED, LONGEST, EVERY = 4, 32, 512  # steps with drafts of a trial, all its steps, and those between trials


class AskingTime:
    """Seconds that are left to ask requests for drafts. What drafts that are verified took is given back."""

    def __init__(self) -> None:
        self._left = MOST_SAVED

    @property
    def is_left(self) -> bool:
        return self._left > 0

    def spend(self, seconds: float) -> None:
        """Take the seconds that asking took; there may be none left for a while then."""
        self._left -= seconds

    def earn(self, seconds: float) -> None:
        """Add seconds, as of drafts that are verified."""
        self._left = min(MOST_SAVED, self._left + seconds)

    def earn_share(self, seconds: float) -> None:
        """Add the share of a step's seconds."""
        self.earn(SHARE * seconds)


class Trust:
    """Gains of drafts beside those that were expected, by the bit length of a step's rows without drafts.

    A gain is tokens a second ÷ tokens a second of a step without drafts.
    """

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, float]] = {}

    def of(self, rows: int) -> float:
        """Return what share of an expected gain is gained; 1 until it is known."""
        expected, gained = self._sums.get(rows.bit_length(), (0.0, 0.0))
        return (PRIOR + gained) / (PRIOR + expected)

    def note(self, rows: int, expected: float, gained: float) -> None:
        """Add a step with drafts."""
        sums = self._sums.get(rows.bit_length(), (0.0, 0.0))
        self._sums[rows.bit_length()] = FORGETS * sums[0] + expected, FORGETS * sums[1] + gained

    def relax(self, rows: int) -> None:
        """Forget some of what is known, after a step without drafts: later on they may gain more."""
        expected, gained = self._sums.get(rows.bit_length(), (0.0, 0.0))
        self._sums[rows.bit_length()] = RELAXES * expected, RELAXES * gained


class Trials:
    """Steps that verify likely drafts even if they are not expected to pay: their cost stays known at each size.

    Without them a few slow steps, as while others compute, would end drafts for good.
    """

    def __init__(self) -> None:
        self._since, self._left = Counter[int](), Counter[int]()

    def is_due(self, rows: int) -> bool:
        """Count a step that is planned; return whether it is to try drafts."""
        size = rows.bit_length()
        self._since[size] += 1
        if size not in self._left or self._since[size] > EVERY:
            self._since[size], self._left[size] = 0, MEASURED
        return self._left[size] > 0 and self._since[size] < LONGEST

    def note(self, rows: int) -> None:
        """Add a step with drafts that was measured: the next trial is far off."""
        size = rows.bit_length()
        self._left[size] -= 1
        if self._left[size] <= 0:
            self._since[size] = 0
