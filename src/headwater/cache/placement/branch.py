"""Marconi's admission: where the prompt leaves the tree, and its end."""

from __future__ import annotations

from headwater.cache.placement.policy import Placed, PlacementQuery, Unlearned
from headwater.cache.placement.state_at import StateAt


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
