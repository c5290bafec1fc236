"""Marconi's admission: where the prompt leaves the tree, and its end."""

from __future__ import annotations

from headwater.cache.placement.policy import Placed, PlacementQuery


class Branch:
    """At most two checkpoints: the branch point, found by looking the input up before prefill, and the last page.

    Marconi (section 4.1) keeps the state after the sequence's last token; on the page grid that is the last page.
    """

    def place(self, query: PlacementQuery) -> Placed:
        wanted = {query.on_grid(query.match.branch_tokens), query.last_page}
        return Placed(tuple(sorted(position for position in wanted if query.is_new(position))))
