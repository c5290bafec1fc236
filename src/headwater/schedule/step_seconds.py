"""Seconds of decode steps by their rows, without drafts and with them, as measured."""

from __future__ import annotations

from collections import Counter

FORGETS = 0.98  # weight of a server's earlier steps with each new one
FORGETS_SIZE = 0.9  # of those of one size without drafts
ROW_COST = 0.1  # of a step, until it is measured
OUTLIER = 2  # times what is expected: kernels are read, or another process computes
FASTER = 3  # steps with drafts, each much faster than expected, after which earlier ones no longer count
LEAST_SPREAD = 0.01  # variance of the rows of recent steps from which their cost is learned
# MEASURED of OF_STEPS steps of one size have no drafts, and of OFTEN where drafts gain little: their seconds are what
# drafts are compared with. Steps in which prompts are computed, too, do not tell; they may be among the TRIED for which
# no drafts are asked
MEASURED, TRIED, OF_STEPS, OFTEN = 4, 16, 512, 96


class Sums:
    """Sums over steps: how many, their rows, rows squared, seconds, rows times seconds; recent steps weigh more."""

    def __init__(self, forgets: float = FORGETS) -> None:
        self._forgets = forgets
        self.n = self.x = self.xx = self.y = self.xy = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """Add a step; earlier ones weigh less from now on."""
        terms = 1.0, rows, rows * rows, seconds, rows * seconds
        sums = self.n, self.x, self.xx, self.y, self.xy
        self.n, self.x, self.xx, self.y, self.xy = (self._forgets * s + t for s, t in zip(sums, terms, strict=True))

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
    for each power of two of rows, steps with drafts have one line; the slope is that of both kinds.
    """

    def __init__(self) -> None:
        self._plain, self._drafting = Sums(), Sums()
        self._by_size: dict[int, Sums] = {}  # steps without drafts, by the bit length of their rows
        # by the bit length of rows without drafts: steps since some were measured, and those that are still to be
        self._since, self._due = Counter[int](), Counter[int]()
        self._faster = 0  # steps with drafts, one after the other, that were much faster than was expected
        self._slope: float | None = None  # unknown until steps of different rows were measured

    @property
    def knows_plain(self) -> bool:
        """True once a step without drafts was measured; before, seconds are relative."""
        return self._plain.n > 0

    def is_to_measure(self, rows: int, often: bool) -> bool:
        """Count a step that is planned; return whether it is to have no drafts, so that its seconds are known."""
        size = rows.bit_length()
        if size not in self._due or self._since[size] >= (OFTEN if often else OF_STEPS):
            self._since[size], self._due[size] = 0, MEASURED
        self._since[size] += 1
        return self._due[size] > 0 and self._since[size] <= TRIED

    def note(self, rows: int, drafts: int, seconds: float) -> None:
        """Add a step, some of whose rows are drafts; it counts at most OUTLIER times what is expected of its kind."""
        if drafts:
            expected = self(rows, drafts)
            self._faster = self._faster + 1 if self._drafting.n and seconds * OUTLIER < expected else 0
            if self._faster == FASTER:
                self._drafting, self._slope = Sums(), None
            seconds = min(seconds, OUTLIER * expected) if self._plain.n else seconds
            self._drafting.add(rows, seconds)
        else:
            size = rows.bit_length()
            self._due[size] -= 1
            of_size = self._by_size.get(size, Sums(FORGETS_SIZE))
            if of_size.n and seconds * OUTLIER < of_size.line(rows, self._slope) and of_size.n < MEASURED / 2:
                of_size = Sums(FORGETS_SIZE)  # kernels were read in the first steps
            elif of_size.n:
                seconds = min(seconds, OUTLIER * of_size.line(rows, self._slope))
            of_size.add(rows, seconds)
            self._by_size[size] = of_size
            self._plain.add(rows, seconds)
        (xx, xy), (its_xx, its_xy) = self._plain.spread, self._drafting.spread
        if xx + its_xx > LEAST_SPREAD * (self._plain.n + self._drafting.n):  # else it keeps the slope
            self._slope = max(0.0, (xy + its_xy) / (xx + its_xx))

    def __call__(self, rows: int, drafts: int) -> float:
        """Return the seconds of a step, of the other kind until one is measured; before any, beside one row's.

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

    def least_chance(self, rows: int) -> float:
        """Return the chance below which a draft lowers the tokens a second of a step, which has `rows` without any."""
        return rows * (self(rows + 2, 2) - self(rows + 1, 1)) / self(rows, 0)
