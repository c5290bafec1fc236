"""Headwater, the default: positions of `structural` and `optimal`, and those where prompts are likely to diverge."""

from __future__ import annotations

from dataclasses import replace
from math import log2

from headwater.cache.placement.base import Placed, Placement, PlacementQuery
from headwater.cache.placement.optimal import Optimal
from headwater.cache.placement.structural import Structural

CLASSES_PER_OCTAVE = 8  # classes of prompts' lengths
MAX_CLASS_DISTANCE = 1  # between two lengths that count as alike
MAX_WEIGHT = 1e100  # of a request; beyond it all are scaled down
MIN_WEIGHT = 0.01  # of the newest request's weight: smaller ones are dropped from large tables
MAX_ENTRIES = 128  # of a table before small weights are dropped

Weights = dict[int, float]  # by pages from the prompt's beginning, or -1 less the pages before its last page
Chance = tuple[int, float]  # of a depth in tokens, or of a place as in `Weights`


class Headwater(Placement):
    """Positions of `structural`, those of `optimal(k)` for raw prompts, and at most `most` learned ones.

    A raw prompt has no known boundary: its client sent tokens or text without roles. Only raw prompts teach `optimal`.
    Its positions are used once a raw prompt of about this length has overlapped, or this one does. They are given up
    where pages are short, and are ordinary checkpoints to eviction.

    `structural` places a checkpoint at a branch point for the second prompt that leaves there: this prompt resumes
    above it. A learned position has one for the first prompt, because prompts of about this length were left there
    before (`Departures`). A checkpoint serves the requests that leave at or below it and above the next checkpoint.
    The learned position that saves most tokens is chosen first, then the best next to it, as long as at least the share
    `least` of such prompts would be served. Eviction keeps unused learned checkpoints in classes of their own.
    """

    def __init__(
        self, least: float = 0.06, most: int = 4, k: int = 2, beta: float = 0.99, prior: float = 4.0, every: int = 10
    ) -> None:
        if not 0 < least <= 1 or not 0 < beta <= 1:
            raise ValueError(f"least is {least:g} and beta {beta:g}; both must be above 0, and 1 at most")
        if prior <= 0:
            raise ValueError(f"prior is {prior:g}; it must be above 0")
        if every < 1 or most < 0:
            raise ValueError(f"every is {every} and most {most}; they must be at least 1 and 0")
        self._structural, self._optimal = Structural(), Optimal(k, beta, every)
        self._departures = Departures(beta, prior, every)
        self._least, self._most = least, most

    def place(self, query: PlacementQuery) -> Placed:
        placed = self._structural.place(query)
        optimal: tuple[int, ...] = ()
        if not query.boundaries.known and self._optimal.knows(query):
            # `structural` has the last page already, also if the answer is cached
            found = self._optimal.place(replace(query, answered=False)).checkpoints
            optimal = tuple(at for at in found if at not in placed.checkpoints)
        learned = self._learned(query, (*placed.checkpoints, *optimal))
        checkpoints = tuple(sorted((*placed.checkpoints, *optimal, *learned)))
        speculative = tuple(at for at in placed.speculative if at not in checkpoints)
        return Placed(checkpoints, speculative, learned, optimal)

    def learn(self, query: PlacementQuery) -> None:
        if not query.boundaries.known:
            self._optimal.learn(query)
        match = query.match
        self._departures.add(match.branch_tokens, match.is_first, query.last_page, query.page_size)

    def _learned(self, query: PlacementQuery, placed: tuple[int, ...]) -> tuple[int, ...]:
        chances = self._departures.of(query.last_page, query.page_size)
        depths = [one for one in chances if query.is_new(one[0])]
        if sum(chance for _, chance in depths) < self._least:
            return ()
        chosen = [query.match.checkpoint_tokens, *placed]
        while len(chosen) - len(placed) <= self._most:
            best = best_of(depths, chosen, self._least)
            if best is None:
                break
            chosen.append(best)
        return tuple(sorted(chosen[1 + len(placed) :]))


def best_of(depths: list[Chance], chosen: list[int], least: float) -> int | None:
    """Return the depth at which one more checkpoint saves most, of those at which it serves the share `least`.

    depths: ascending, with the chance of each. chosen: positions of checkpoints; the prompt resumes at the lowest.
    """
    ends = sorted(chosen)
    best, most, served, i = None, 0.0, 0.0, len(ends) - 1
    for depth, chance in reversed(depths):
        while ends[i] > depth:
            i, served = i - 1, 0.0
        if ends[i] < depth:
            served += chance
            saved = served * (depth - ends[i])
            if served >= least and saved > most:
                best, most = depth, saved
    return best


class Departures:
    """Chances that a prompt is left at a depth at which no request left it before.

    They are shares of the prompts of about this length that left the tree above that depth, so that they computed it.
    Depths in the first half of a prompt count from its beginning, as do system prompts and parts of templates; those in
    the second half from its last page, as does the end of a document before a question. A request weighs `beta` times
    as much for each later one, and `prior` prompts are added that no request left. Chances are renewed every `every`
    requests.
    """

    def __init__(self, beta: float, prior: float, every: int) -> None:
        self._beta, self._prior, self._every = beta, prior, every
        self._unit, self._seen = 1.0, 0  # weight of the next request
        self._begun: dict[int, Weights] = {}  # by class: where prompts left the tree, and were computed from there on
        self._left: dict[int, Weights] = {}  # by class: where they were the first to do so
        self._chances: dict[int, tuple[int, list[Chance]]] = {}  # by class: request at which they are stale, chances

    def add(self, depth: int, is_first: bool, last: int, page: int) -> None:
        """Count a request whose prompt, with its last page at `last`, left the tree at `depth`, as the first or not."""
        kind, at = _class_of(last), _place(depth, last, page)
        self._seen += 1
        self._unit /= self._beta
        _count(self._begun.setdefault(kind, {}), at, self._unit)
        if is_first:
            _count(self._left.setdefault(kind, {}), at, self._unit)
        if self._unit > MAX_WEIGHT:
            self._scale_down()

    def of(self, last: int, page: int) -> list[Chance]:
        """Return the depths at which such a prompt may be left, ascending, and their chances."""
        if not self._left:
            return []
        kind = _class_of(last)
        stale, chances = self._chances.get(kind, (0, []))
        if self._seen >= stale:
            chances = self._renewed(kind)
            self._chances[kind] = self._seen + self._every, chances
        return sorted((at * page if at >= 0 else last + (at + 1) * page, chance) for at, chance in chances)

    def _renewed(self, kind: int) -> list[Chance]:
        alike = range(kind - MAX_CLASS_DISTANCE, kind + MAX_CLASS_DISTANCE + 1)
        left = _sum([self._left[one] for one in alike if one in self._left])
        begun = _sum([self._begun[one] for one in alike if one in self._begun]) if left else {}
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
                tables[kind] = {at: weight for at, weight in scaled.items() if weight >= MIN_WEIGHT}
        self._unit = 1.0


def _class_of(last: int) -> int:
    """Return the class of a prompt's length, by its last page."""
    return int(CLASSES_PER_OCTAVE * log2(max(1, last)))


def _place(depth: int, last: int, page: int) -> int:
    return depth // page if 2 * depth < last else -1 - (last - depth) // page


def _order(at: int) -> tuple[bool, int]:
    """Return the key that sorts places in the order of a prompt."""
    return at < 0, at


def _count(table: Weights, at: int, unit: float) -> None:
    if len(table) > MAX_ENTRIES:
        for small in [one for one, weight in table.items() if weight < MIN_WEIGHT * unit]:
            del table[small]
    table[at] = table.get(at, 0.0) + unit


def _sum(tables: list[Weights]) -> Weights:
    found = dict(tables[0]) if tables else {}
    for table in tables[1:]:
        for at, weight in table.items():
            found[at] = found.get(at, 0.0) + weight
    return found
