"""Placement policies: their protocol, queries and results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from headwater.plan import Match
from headwater.request import Boundaries


class Edge(NamedTuple):
    """An edge of the tree that a prompt enters. Where one is split, the lower part keeps the id."""

    id: int
    end: int  # in tokens
    origins: tuple[int, ...] = ()  # ids of edges whose upper part this was cut from, the latest first


Path = tuple[Edge, ...]


@dataclass(frozen=True, slots=True)
class PlacementQuery:
    """A prompt that is about to be prefilled. Lengths and positions in tokens."""

    length: int
    match: Match
    boundaries: Boundaries
    page_size: int  # the grid: a page, or a block of a trace whose blocks are longer
    answered: bool = False  # the output will be cached, too, with a checkpoint at its end
    path: Callable[[], Path] = tuple  # of the tree as it is now, from the root down; the last edge may be left midway

    @property
    def last_page(self) -> int:
        """The end of the last full page that still leaves one token to compute; 0 if there is none."""
        return max(0, self.length - 1) // self.page_size * self.page_size

    def on_grid(self, position: int) -> int:
        """The page boundary at or before `position`."""
        return position // self.page_size * self.page_size

    def is_new(self, position: int) -> bool:
        """Return whether a checkpoint at this page boundary is useful: beyond the match, before the last token."""
        return self.match.checkpoint_tokens < position <= self.last_page

    def fresh(self, positions: Iterable[int]) -> tuple[int, ...]:
        """Return the useful positions, floored to the grid, ascending and without duplicates."""
        return tuple(sorted({at for position in positions if self.is_new(at := self.on_grid(position))}))

    def end(self, wanted: bool) -> tuple[int, ...]:
        """The last page, if it is wanted and no deeper end is kept with the output."""
        return (self.last_page,) if wanted and not self.answered else ()


@dataclass(frozen=True, slots=True)
class Placed:
    """Positions of new checkpoints: ascending page multiples beyond the match's checkpoint."""

    checkpoints: tuple[int, ...] = ()
    speculative: tuple[int, ...] = ()


class Placement(Protocol):
    """Chooses the positions of a prefill at which checkpoints are taken."""

    def place(self, query: PlacementQuery) -> Placed:
        """Positions for this prompt; none of them twice. Changes nothing."""

    def place_answer(self, query: PlacementQuery) -> Placed:
        """Positions for the prefill of a finished answer, whose last page ends at `length`."""

    def learn(self, query: PlacementQuery) -> None:
        """The prompt's prefill begins: note where it left the tree. Called once a request."""


class EndOfAnswer:
    """A policy that has the next turn resume where the answer ended."""

    def place_answer(self, query: PlacementQuery) -> Placed:
        return Placed((query.length,))


class Unlearned(EndOfAnswer):
    """A policy that goes by the prompt alone."""

    def learn(self, query: PlacementQuery) -> None:
        """There is nothing to note."""
