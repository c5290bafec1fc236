"""Departures: the depths at which requests were the first to leave a prompt, by the prompt's length."""

from __future__ import annotations

from math import log2

OCTAVE = 8  # classes of lengths in an octave
NEAR = 1  # classes of lengths on either side that count as alike
UNIT_LIMIT = 1e100  # weight of a request at which all are scaled down
FAINT = 0.01  # of the newest request's weight: smaller weights are dropped from large tables
MANY = 128  # entries that a table may have before its faint ones are dropped

Weights = dict[int, float]  # by pages from the prompt's beginning, or -1 less the pages before its last page
Chance = tuple[int, float]  # of a depth, or of a place


class Departures:
    """Chances that a prompt is left at a depth at which no request left it before.

    They are shares of the prompts of about this length that left the tree above that depth, so that they computed it.
    Depths in the first half of a prompt count from its beginning, as do system prompts and parts of templates; those in
    the second half from its last page, as does the end of a document before a question. A request weighs `beta` times
    as much for each later one, and `prior` prompts are added that nobody left. Chances are renewed every `every`
    requests.
    """

    def __init__(self, beta: float, prior: float, every: int) -> None:
        self._beta, self._prior, self._every = beta, prior, every
        self._unit, self._seen = 1.0, 0  # weight of the next request
        self._begun: dict[int, Weights] = {}  # by class: where prompts left the tree, from where on they were computed
        self._left: dict[int, Weights] = {}  # where they were the first to do so
        self._chances: dict[int, tuple[int, list[Chance]]] = {}  # by class, with the time at which they are stale

    def add(self, depth: int, is_first: bool, last: int, page: int) -> bool:
        """Count a request whose prompt, with its last page at `last`, left the tree at `depth`.

        Returns whether it was the first to do so, at a place where no prompt of about its length was left before.
        """
        kind, at = class_of(last), _place(depth, last, page)
        self._seen += 1
        self._unit /= self._beta
        _count(self._begun.setdefault(kind, {}), at, self._unit)
        is_new = is_first and at not in self._left.get(kind, ())
        if is_first:
            _count(self._left.setdefault(kind, {}), at, self._unit)
        if self._unit > UNIT_LIMIT:
            self._scale_down()
        return is_new

    def of(self, last: int, page: int) -> list[Chance]:
        """Return the depths at which such a prompt may be left, ascending, and their chances."""
        if not self._left:
            return []
        kind = class_of(last)
        stale, chances = self._chances.get(kind, (0, []))
        if self._seen >= stale:
            chances = self._renewed(kind)
            self._chances[kind] = self._seen + self._every, chances
        return sorted((at * page if at >= 0 else last + (at + 1) * page, chance) for at, chance in chances)

    def _renewed(self, kind: int) -> list[Chance]:
        near = range(kind - NEAR, kind + NEAR + 1)
        left = _sum([self._left[one] for one in near if one in self._left])
        begun = _sum([self._begun[one] for one in near if one in self._begun]) if left else {}
        total, chances = self._prior * self._unit, []
        for at in sorted({*left, *begun}, key=_order):
            if at in left:
                chances.append((at, min(1.0, left[at] / total)))
            total += begun.get(at, 0.0)
        return chances

    def _scale_down(self) -> None:
        for tables in (self._begun, self._left):
            for kind, table in tables.items():
                scaled = {at: weight / self._unit for at, weight in table.items()}
                tables[kind] = {at: weight for at, weight in scaled.items() if weight >= FAINT}
        self._unit = 1.0


def class_of(last: int) -> int:
    """Return the class of a prompt's length, by its last page."""
    return int(OCTAVE * log2(max(1, last)))


def _place(depth: int, last: int, page: int) -> int:
    return depth // page if 2 * depth < last else -1 - (last - depth) // page


def _order(at: int) -> tuple[bool, int]:
    """Return the key by which places are in the order of a prompt."""
    return at < 0, at


def _count(table: Weights, at: int, unit: float) -> None:
    if len(table) > MANY:
        for faint in [one for one, weight in table.items() if weight < FAINT * unit]:
            del table[faint]
    table[at] = table.get(at, 0.0) + unit


def _sum(tables: list[Weights]) -> Weights:
    found = dict(tables[0]) if tables else {}
    for table in tables[1:]:
        for at, weight in table.items():
            found[at] = found.get(at, 0.0) + weight
    return found
