"""Headwater, the default: positions of `structural` and `optimal`, and those where prompts are likely to diverge."""

from __future__ import annotations

from dataclasses import replace

from headwater.cache.placement.base import Placed, Placement, PlacementQuery
from headwater.cache.placement.headwater.departures import Chance, Departures
from headwater.cache.placement.headwater.new_places import NewPlaces
from headwater.cache.placement.optimal import Optimal
from headwater.cache.placement.structural import Structural


class Headwater(Placement):
    """Positions of `structural`, of raw prompts those of `optimal(k)`, too, and at most `most` learned ones.

    A raw prompt has no known boundary: its client sent tokens or text without roles. Raw prompts alone teach `optimal`.
    Its positions are taken once a raw prompt of about this length has overlapped, or this one does. They are given up
    where pages are short, and are ordinary checkpoints to eviction.

    `structural` takes a checkpoint at a branch point when the second prompt leaves there: this prompt resumes above it.
    A learned position is one at which the first prompt takes it, because prompts of about this length were left there
    before (`Departures`), or often leave this eighth of it at depths not seen before (`NewPlaces`). Of both, requests
    weigh `beta` times as much for each later one; `prior` and `pooled` are explained there. A checkpoint serves the
    requests that leave at or below it and above the next checkpoint. The one that saves most tokens is taken first,
    then the best beside it, as long as at least the share `least` of such prompts would be served. Eviction keeps
    unused learned checkpoints in classes of their own.
    """

    def __init__(
        self,
        least: float = 0.06,
        most: int = 4,
        k: int = 2,
        beta: float = 0.99,
        prior: float = 4.0,
        pooled: float = 16.0,
        every: int = 10,
    ) -> None:
        if not 0 < least <= 1 or not 0 < beta <= 1:
            raise ValueError(f"least is {least:g} and beta {beta:g}; both must be above 0, and 1 at most")
        if prior <= 0 or pooled <= 0:
            raise ValueError(f"prior is {prior:g} and pooled {pooled:g}; both must be above 0")
        if every < 1 or most < 0:
            raise ValueError(f"every is {every} and most {most}; 1 and 0 are the least")
        self._structural, self._optimal = Structural(), Optimal(k, beta, every)
        self._departures, self._new_places = Departures(beta, prior, every), NewPlaces(beta, pooled)
        self._least, self._most = least, most

    def place(self, query: PlacementQuery) -> Placed:
        placed = self._structural.place(query)
        optimal: tuple[int, ...] = ()
        if not query.boundaries.known and self._optimal.knows(query):
            # `structural` has the last page already, also where the answer is kept
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
        is_new = self._departures.add(match.branch_tokens, match.is_first, query.last_page, query.page_size)
        self._new_places.add(match.branch_tokens, is_new, query.last_page)

    def _learned(self, query: PlacementQuery, placed: tuple[int, ...]) -> tuple[int, ...]:
        chances = self._departures.of(query.last_page, query.page_size)
        chances += self._new_places.of(query.last_page, query.page_size)
        depths = sorted(one for one in chances if query.is_new(one[0]))
        if sum(chance for _, chance in depths) < self._least:
            return ()
        taken = [query.match.checkpoint_tokens, *placed]
        while len(taken) - len(placed) <= self._most:
            best = best_of(depths, taken, self._least)
            if best is None:
                break
            taken.append(best)
        return tuple(sorted(taken[1 + len(placed) :]))


def best_of(depths: list[Chance], taken: list[int], least: float) -> int | None:
    """Return the depth at which one more checkpoint saves most, of those where it serves the share `least`.

    depths: ascending, with the chance of each. taken: checkpoints, the least is where the prompt resumes.
    """
    ends = sorted(taken)
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
