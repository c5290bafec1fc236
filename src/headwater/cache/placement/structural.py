"""Structural: the positions at which a next turn or another user's prompt probably leaves this one."""

from __future__ import annotations

from headwater.cache.placement.base import Placed, Placement, PlacementQuery


class Structural(Placement):
    """Ends of the prompt's known parts; if none are known, evenly spaced speculative checkpoints.

    Parts known: end of system and tools, start and end of the last query, the branch point, the last page, and the
    client's own positions. Parts unknown: the branch point and the last page; a prefix of n shared tokens then hits on
    its second request at n − prompt/8 − 64 or deeper, if enough pages are free.
    """

    def __init__(self, min_gap: int = 256, max_per_request: int = 8, max_speculative: int = 8) -> None:
        self._min_gap, self._max, self._max_speculative = min_gap, max_per_request, max_speculative

    def place(self, query: PlacementQuery) -> Placed:
        ranked = self._ranked(query)
        spaced = self._with_gaps(ranked)
        chosen = sorted(sorted(spaced, key=lambda position: ranked[position])[: self._max])
        speculative = () if query.boundaries.known else self._speculative(query, set(chosen))
        return Placed(tuple(chosen), speculative)

    def _ranked(self, query: PlacementQuery) -> dict[int, int]:
        """Return the candidates and their ranks.

        Rank 0 is kept whatever the gap: system end, branch point, query end, last page, and positions with a time to
        live. With a short question about a document, the branch point is the document's end, often less than the gap
        below the query's end. Before a second question has shown the branch point, the start of the first one stands
        there. So rank 1, which is also kept whatever the gap, is a start at least the gap beyond the last checkpoint
        before it. In sessions of short turns it is not.
        """
        parts = query.boundaries
        kept = [parts.system_end, query.match.branch_tokens, parts.query_end, query.last_page]
        kept += [one.position for one in parts.retained]
        wanted = [*((position, 0) for position in kept), (parts.query_start, 2)]
        wanted += [(position, 3) for position in parts.extra]
        ranks: dict[int, int] = {}
        for position, rank in wanted:
            if position is not None and query.is_new(at := query.on_grid(position)):
                ranks[at] = min(rank, ranks.get(at, rank))
        start = None if parts.query_start is None else query.on_grid(parts.query_start)
        if start is not None and ranks.get(start):
            before = (at for at, rank in ranks.items() if not rank and at < start)
            if start - max(before, default=query.match.checkpoint_tokens) >= self._min_gap:
                ranks[start] = 1
        return ranks

    def _with_gaps(self, ranked: dict[int, int]) -> list[int]:
        """Return the candidates, except those within the gap below another one."""
        kept: list[int] = []
        for position in sorted(ranked, reverse=True):
            if ranked[position] <= 1 or not kept or kept[-1] - position >= self._min_gap:
                kept.append(position)
        return kept

    def _speculative(self, query: PlacementQuery, chosen: set[int]) -> tuple[int, ...]:
        """Return speculative positions, as far apart as without a match: a short suffix needs none."""
        start = query.match.checkpoint_tokens
        parts = -(-(self._max_speculative + 1) * (query.length - start) // max(1, query.length))
        spaced = {query.on_grid(start + (query.length - start) * part // parts) for part in range(1, parts)}
        return tuple(sorted(at for at in spaced - chosen if query.is_new(at)))
