"""New places: chances that a prompt is left where none of its length was left before."""

from __future__ import annotations

from headwater.cache.placement.headwater.departures import NEAR, UNIT_LIMIT, Chance, class_of

EIGHTHS = 8
POINTS = 2  # depths that stand for an eighth
Counts = list[float]  # of an eighth each, and of all requests


class NewPlaces:
    """Chances by eighth of a prompt; the last eighth has none.

    Prompts that share more or less of a template are left anywhere: at each single depth too seldom to take a
    checkpoint there, and yet half of them may be left somewhere. So departures at places where none of a length was
    before are counted by eighth of the prompt, whatever the depth, and their chance is spread evenly over the eighth.
    The more places are known, the fewer are new. In the last eighth depths that count from the last page say more.

    Requests of about this length count, and as many of all lengths as weigh `pooled` together, and as many that left
    nowhere: a few documents are new places, too, until their ends are known. A request weighs `beta` times as much for
    each later one.
    """

    def __init__(self, beta: float, pooled: float) -> None:
        self._beta, self._pooled = beta, pooled
        self._unit = 1.0  # weight of the next request
        self._counts: dict[int, Counts] = {}  # by class of lengths
        self._all: Counts = [0.0] * EIGHTHS

    def add(self, depth: int, is_new: bool, last: int) -> None:
        """Count a request whose prompt, with its last page at `last`, left the tree at `depth`, a new place or not."""
        self._unit /= self._beta
        eighth = min(EIGHTHS - 1, max(0, depth - 1) * EIGHTHS // max(1, last))
        for counts in (self._counts.setdefault(class_of(last), [0.0] * EIGHTHS), self._all):
            counts[-1] += self._unit
            if is_new and eighth < EIGHTHS - 1:
                counts[eighth] += self._unit
        if self._unit > UNIT_LIMIT:
            self._scale_down()

    def of(self, last: int, page: int) -> list[Chance]:
        """Return depths of such a prompt, ascending, and the chances that they stand for."""
        if not any(self._all[:-1]):
            return []
        kind = class_of(last)
        alike = [self._counts[one] for one in range(kind - NEAR, kind + NEAR + 1) if one in self._counts]
        pooled = self._pooled * self._unit
        share = min(1.0, pooled / self._all[-1])
        weights = [share * self._all[i] + sum(counts[i] for counts in alike) for i in range(EIGHTHS)]
        total = weights.pop() + pooled
        return [
            (last * (POINTS * eighth + point) // (POINTS * EIGHTHS) // page * page, weight / total / POINTS)
            for eighth, weight in enumerate(weights)
            for point in range(1, POINTS + 1)
            if weight
        ]

    def _scale_down(self) -> None:
        self._counts = {kind: [one / self._unit for one in counts] for kind, counts in self._counts.items()}
        self._all = [one / self._unit for one in self._all]
        self._unit = 1.0
