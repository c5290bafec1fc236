"""What endless memory and a checkpoint at every unit would hit: the bound of every policy, request by request."""

from __future__ import annotations

from headwater.cache.history import Edges
from headwater.traces.request import Request, Trace


class Ideal:
    """Sees requests in the order in which they come."""

    def __init__(self, trace: Trace, unit_tokens: int) -> None:
        self._trace, self._unit = trace, unit_tokens
        self._width = unit_tokens // trace.block_tokens * trace.element_bytes
        self._edges = Edges(self._width)

    def hit(self, request: Request) -> int:
        """Tokens at which this request would resume; what it computes is there from now on."""
        key = self._trace.key(request, request.known_tokens)
        cap = min(max(0, request.prompt_tokens - 1) // self._unit, len(key) // self._width)
        return min(cap, self._edges.note(request.namespace, key, len(key) // self._width)) * self._unit
