"""SegLen: the tokens that would be replayed without a checkpoint, weighed against how recently it was used."""

from __future__ import annotations

from headwater.cache.eviction.base.scored import Scored
from headwater.cache.eviction.base.worth import base
from headwater.cache.node import Node
from headwater.plan import CacheLayout


class SegLen(Scored):
    """Lowest U = w·minmax(L) + minmax(R) goes; L = length to the nearest ancestor with a checkpoint, R = 1/age.

    The article gives the idea, its authors' pull request the formula. A range without width counts 0.5, which ranks
    like 0. KV goes by the same score, in split pools, too.
    """

    def __init__(self, layout: CacheLayout, w: float = 0.85, single_child: bool = True) -> None:
        super().__init__(w, single_child)

    def value(self, node: Node) -> float:
        """Return L, in units."""
        return node.end - base(node)
