"""Branch: Marconi's admission of two checkpoints, the branch point and the end of the sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headwater.cache.placement.base import Placed, Placement, PlacementQuery

CUTS = ("exact", "chunk")


@dataclass(frozen=True, slots=True)
class StateAt:
    """Position of the state that is available for a requested position.

    `exact`: a pass ends there (two passes), or a kernel rolls the state on, so it stands on the page there or before.
    `chunk`: the kernels pass the state on from chunk to chunk of `chunk` tokens, and the last one passed on at the
    position or before is kept: of 100 tokens in chunks of 32, with 80 wanted, that at 64.
    """

    cut: str = "exact"
    chunk: int = 256

    def __post_init__(self) -> None:
        if self.cut not in CUTS:
            raise ValueError(f"cut {self.cut!r} is unknown; there are {', '.join(CUTS)}")
        if self.chunk < 1:
            raise ValueError(f"a chunk has {self.chunk} tokens; it needs at least 1")

    def floor(self, position: int, page: int) -> int:
        """Return the deepest page boundary at or before `position` that has a state."""
        grid = page if self.cut == "exact" else math.lcm(page, self.chunk)
        return position // grid * grid


class Branch(Placement):
    """Branch point, found by looking the input up before prefill, and end of the whole sequence.

    Marconi (section 4.1) keeps the state after the last decoded token, here floored to the page grid. If the output is
    not cached, that is the last page of the prompt. With `cut="chunk"` states within the prefill are available only at
    the ends of the model's chunks of `chunk` tokens.
    """

    def __init__(self, cut: str = "exact", chunk: int = 256) -> None:
        self._state_at = StateAt(cut, chunk)

    def place(self, query: PlacementQuery) -> Placed:
        wanted = (query.match.branch_tokens, *query.end(True))
        return Placed(query.fresh(self._state_at.floor(position, query.page_size) for position in wanted))
