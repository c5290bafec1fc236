"""Costs and gains of drafts: seconds of decode steps as measured, and limits that keep drafts from costing more than
they give.

Sizes of steps are the bit lengths of their rows without drafts.
"""

from __future__ import annotations

from collections import Counter

STEP_DECAY = 0.98  # weight of a server's earlier steps with each new one
SIZE_DECAY = 0.9  # of those of one size without drafts
ROW_COST = 0.1  # of a step, until it is measured
OUTLIER_FACTOR = 2  # of the expected seconds: kernels are read, or another process computes
FASTER_STEPS = 3  # consecutive steps with drafts, much faster than expected, after which earlier ones no longer count
MIN_SPREAD = 0.01  # variance of the rows of recent steps from which their cost is learned
# PLAIN_STEPS of PLAIN_PERIOD steps of one size have no drafts, and of SHORT_PLAIN_PERIOD if drafts gain little: drafts
# are compared with their seconds. Steps with prompts are not measured, but count among MAX_PLAIN_STEPS without any.
PLAIN_STEPS, MAX_PLAIN_STEPS, PLAIN_PERIOD, SHORT_PLAIN_PERIOD = 4, 16, 512, 96

ASKING_SHARE = 0.01  # of the steps' seconds that asking may take while no draft is verified
MAX_ASKING_SECONDS = 0.010  # that are saved up
# weights of what drafts gained: of the expectation, of earlier steps at each one with drafts, at each without
TRUST_PRIOR, DRAFTED_DECAY, PLAIN_DECAY = 4.0, 0.9, 0.995
TRIAL_DRAFTED, MAX_TRIAL_STEPS, TRIAL_PERIOD = 4, 32, 512  # steps of a trial: with drafts, all, until the next one


class Sums:
    """Sums over steps: how many, their rows, rows squared, seconds, rows times seconds; recent steps weigh more."""

    def __init__(self, decay: float = STEP_DECAY) -> None:
        self._decay = decay
        self.n = self.x = self.xx = self.y = self.xy = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """Add a step; earlier ones weigh less from now on."""
        terms = 1.0, rows, rows * rows, seconds, rows * seconds
        sums = self.n, self.x, self.xx, self.y, self.xy
        self.n, self.x, self.xx, self.y, self.xy = (self._decay * s + t for s, t in zip(sums, terms, strict=True))

    @property
    def spread(self) -> tuple[float, float]:
        """Sums of squares of rows, and of rows times seconds, about their means."""
        return (self.xx - self.x * self.x / self.n, self.xy - self.x * self.y / self.n) if self.n else (0.0, 0.0)

    def line(self, rows: int, slope: float | None) -> float:
        """Return the seconds of a step on the line of this slope through the means; without one, of ROW_COST."""
        slope = ROW_COST * self.y / self.n if slope is None else slope
        return max(1e-9, self.y / self.n + slope * (rows - self.x / self.n))


class StepSeconds:
    """Seconds of a step by its rows.

    A step's seconds include its planning, with passes of the head, and its sampling. Steps without drafts have a mean
    for each size, steps with drafts have one line; the slope is that of both kinds.
    """

    def __init__(self) -> None:
        self._plain, self._drafting = Sums(), Sums()
        self._by_size: dict[int, Sums] = {}  # steps without drafts
        # by size: steps since some were measured, and those that are still to be
        self._since, self._due = Counter[int](), Counter[int]()
        self._faster = 0  # consecutive steps with drafts that were much faster than expected
        self._slope: float | None = None  # unknown until steps of different rows were measured

    @property
    def knows_plain(self) -> bool:
        """True once a step without drafts was measured; before, seconds are relative."""
        return self._plain.n > 0

    def is_to_measure(self, rows: int, often: bool) -> bool:
        """Count a step that is planned; return whether it is to have no drafts, so that its seconds are known."""
        size = rows.bit_length()
        if size not in self._due or self._since[size] >= (SHORT_PLAIN_PERIOD if often else PLAIN_PERIOD):
            self._since[size], self._due[size] = 0, PLAIN_STEPS
        self._since[size] += 1
        return self._due[size] > 0 and self._since[size] <= MAX_PLAIN_STEPS

    def note(self, rows: int, drafts: int, seconds: float) -> None:
        """Add a step, some of whose rows are drafts; it counts at most OUTLIER_FACTOR times its expected seconds."""
        if drafts:
            expected = self(rows, drafts)
            self._faster = self._faster + 1 if self._drafting.n and seconds * OUTLIER_FACTOR < expected else 0
            if self._faster == FASTER_STEPS:
                self._drafting, self._slope = Sums(), None
            seconds = min(seconds, OUTLIER_FACTOR * expected) if self._plain.n else seconds
            self._drafting.add(rows, seconds)
        else:
            size = rows.bit_length()
            self._due[size] -= 1
            of_size = self._by_size.get(size, Sums(SIZE_DECAY))
            is_faster = of_size.n and seconds * OUTLIER_FACTOR < of_size.line(rows, self._slope)
            if is_faster and of_size.n < PLAIN_STEPS / 2:
                of_size = Sums(SIZE_DECAY)  # kernels were read in the first steps
            elif of_size.n:
                seconds = min(seconds, OUTLIER_FACTOR * of_size.line(rows, self._slope))
            of_size.add(rows, seconds)
            self._by_size[size] = of_size
            self._plain.add(rows, seconds)
        (xx, xy), (its_xx, its_xy) = self._plain.spread, self._drafting.spread
        if xx + its_xx > MIN_SPREAD * (self._plain.n + self._drafting.n):  # else it keeps the slope
            self._slope = max(0.0, (xy + its_xy) / (xx + its_xx))

    def __call__(self, rows: int, drafts: int) -> float:
        """Return the seconds of a step, of the other kind until one is measured; before any, relative to one row's.

        A step with drafts takes no less than one of as many rows without; and one without takes no more than the mean
        of those with drafts, if these have more rows.
        """
        of_size = self._by_size.get(rows.bit_length(), self._plain)
        plain = of_size.line(rows, self._slope) if of_size.n else None
        drafting = self._drafting.line(rows, self._slope) if self._drafting.n else None
        if plain is None or drafting is None:
            return plain or drafting or 1 + ROW_COST * rows
        if rows * self._drafting.n <= self._drafting.x:
            plain = min(plain, self._drafting.y / self._drafting.n)
        return max(plain, drafting) if drafts else plain

    def min_chance(self, rows: int) -> float:
        """Return the chance below which a draft lowers the tokens a second of a step, which has `rows` without any."""
        return rows * (self(rows + 2, 2) - self(rows + 1, 1)) / self(rows, 0)


class AskingTime:
    """Seconds that are left to ask requests for drafts. Those of drafts that are verified are given back."""

    def __init__(self) -> None:
        self._left = MAX_ASKING_SECONDS

    @property
    def is_left(self) -> bool:
        return self._left > 0

    def spend(self, seconds: float) -> None:
        """Subtract the seconds that asking took; for a while none may be left then."""
        self._left -= seconds

    def earn(self, seconds: float) -> None:
        """Add seconds, as of drafts that are verified."""
        self._left = min(MAX_ASKING_SECONDS, self._left + seconds)

    def earn_share(self, seconds: float) -> None:
        """Add the share of a step's seconds."""
        self.earn(ASKING_SHARE * seconds)


class Trust:
    """Ratio of the gains of drafts to the expected ones, by size.

    A gain is tokens a second ÷ tokens a second of a step without drafts.
    """

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, float]] = {}  # expected, gained

    def of(self, rows: int) -> float:
        """Return the share of an expected gain that is gained; 1 until it is known."""
        expected, gained = self._sums.get(rows.bit_length(), (0.0, 0.0))
        return (TRUST_PRIOR + gained) / (TRUST_PRIOR + expected)

    def note(self, rows: int, expected: float, gained: float) -> None:
        """Add a step with drafts."""
        self._add(rows, DRAFTED_DECAY, expected, gained)

    def relax(self, rows: int) -> None:
        """Forget a part, after a step without drafts: later on they may gain more."""
        self._add(rows, PLAIN_DECAY, 0.0, 0.0)

    def _add(self, rows: int, decay: float, expected: float, gained: float) -> None:
        sums = self._sums.get(rows.bit_length(), (0.0, 0.0))
        self._sums[rows.bit_length()] = decay * sums[0] + expected, decay * sums[1] + gained


class Trials:
    """Steps that verify likely drafts even if they are not expected to pay: their cost stays known at each size.

    Without them a few slow steps, as while other processes compute, would end drafts for good.
    """

    def __init__(self) -> None:
        self._since, self._left = Counter[int](), Counter[int]()

    def is_due(self, rows: int) -> bool:
        """Count a step that is planned; return whether it is to try drafts."""
        size = rows.bit_length()
        self._since[size] += 1
        if size not in self._left or self._since[size] > TRIAL_PERIOD:
            self._since[size], self._left[size] = 0, TRIAL_DRAFTED
        return self._left[size] > 0 and self._since[size] < MAX_TRIAL_STEPS

    def note(self, rows: int) -> None:
        """Add a step with drafts that was measured: the next trial is far off."""
        size = rows.bit_length()
        self._left[size] -= 1
        if self._left[size] <= 0:
            self._since[size] = 0
