"""Marconi's admission: where the prompt leaves the tree, and its end."""

from __future__ import annotations

from headwater.cache.placement.policy import Placed, PlacementQuery, Unlearned


class Branch(Unlearned):
    """The branch point, found by looking the input up before prefill, and the end of the whole sequence.

    Marconi (section 4.1) keeps the state after the last token that is decoded, on the page grid the last page of it.
    Where the output is not cached, that is the last page of the prompt.
    """

    def place(self, query: PlacementQuery) -> Placed:
        wanted = {query.on_grid(query.match.branch_tokens)}
        if not query.answered:
            wanted.add(query.last_page)
        return Placed(tuple(sorted(position for position in wanted if query.is_new(position))))
