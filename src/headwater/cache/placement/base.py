"""Base class of placement policies, with their queries and results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from headwater.plan import Match
from headwater.request import Boundaries


class Edge(NamedTuple):
    """Edge of the tree that a prompt enters. When an edge is split, the lower part keeps the id."""

    id: int
    end: int  # in tokens
    origins: tuple[int, ...] = ()  # ids of the edges that this one was the upper part of, the latest first


Path = tuple[Edge, ...]


@dataclass(frozen=True, slots=True)
class PlacementQuery:
    """Prompt that is about to be prefilled. Lengths and positions in tokens."""

    length: int
    match: Match
    boundaries: Boundaries
    page_size: int  # grid of positions: a page, or a trace's block if that is longer
    answered: bool = False  # whether the output is also cached, with a checkpoint at its end
    path: Callable[[], Path] = tuple  # current edges from the root down; the prompt may leave the last one midway

    @property
    def last_page(self) -> int:
        """The end of the last full page that still leaves one token to compute; 0 if there is none."""
        return max(0, self.length - 1) // self.page_size * self.page_size

    def on_grid(self, position: int) -> int:
        """Return the page boundary at or before `position`."""
        return position // self.page_size * self.page_size

    def is_new(self, position: int) -> bool:
        """Return whether a checkpoint at this page boundary is useful: beyond the match, before the last token."""
        return self.match.checkpoint_tokens < position <= self.last_page

    def fresh(self, positions: Iterable[int]) -> tuple[int, ...]:
        """Return the useful positions, floored to the grid, ascending and without duplicates."""
        return tuple(sorted({at for position in positions if self.is_new(at := self.on_grid(position))}))

    def end(self, wanted: bool) -> tuple[int, ...]:
        """Return the last page if `wanted`, unless the output is cached and has a deeper end."""
        return (self.last_page,) if wanted and not self.answered else ()


@dataclass(frozen=True, slots=True)
class Placed:
    """Positions of new checkpoints: ascending page multiples beyond the match's checkpoint."""

    checkpoints: tuple[int, ...] = ()
    speculative: tuple[int, ...] = ()
    learned: tuple[int, ...] = ()  # checkpoints at positions where earlier requests left prompts of about this length
    optional: tuple[int, ...] = ()  # other checkpoints that are given up as early as learned ones if pages are short


class Placement(ABC):
    """Policy that chooses the positions of a prefill at which checkpoints are stored."""

    @abstractmethod
    def place(self, query: PlacementQuery) -> Placed:
        """Return the positions for this prompt, each once. Changes nothing."""

    def place_answer(self, query: PlacementQuery) -> Placed:
        """Return the positions for the prefill of a finished answer: its last page boundary."""
        end = query.on_grid(query.length)
        return Placed((end,) if end > query.match.checkpoint_tokens else ())

    def learn(self, query: PlacementQuery) -> None:
        """Note at which position a prompt leaves the tree, at the beginning of its prefill. Called once per request."""
        return None
