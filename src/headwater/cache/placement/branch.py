"""Marconi's admission: where the prompt leaves the tree, and its end."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headwater.cache.positions import Placed, PlacementQuery, Unlearned

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
        """The deepest place at or before `position` at which there is a state and a page ends."""
        grid = page if self.cut == "exact" else math.lcm(page, self.chunk)
        return position // grid * grid


class Branch(Unlearned):
    """The branch point, found by looking the input up before prefill, and the end of the whole sequence.

    Marconi (section 4.1) keeps the state after the last token that is decoded, on the page grid the last page of it.
    Where the output is not cached, that is the last page of the prompt. `cut="chunk"` takes states within the prefill
    where the model's chunks of `chunk` tokens end, and not where they are wanted.
    """

    def __init__(self, cut: str = "exact", chunk: int = 256) -> None:
        self._state_at = StateAt(cut, chunk)

    def place(self, query: PlacementQuery) -> Placed:
        wanted = (query.match.branch_tokens, *query.end(True))
        return Placed(query.fresh(self._state_at.floor(position, query.page_size) for position in wanted))
