"""Guard: follows whichever of several policies has had the most hits of late, as their shadow caches show."""

from __future__ import annotations

from array import array

from headwater.cache.eviction.headwater import Headwater
from headwater.cache.node import Node
from headwater.cache.order.rows import view
from headwater.cache.shadows import Shadows
from headwater.cache.spelling import split
from headwater.plan import CacheLayout

EXPERTS = "headwater, gdsf, flop_aware(2.0)"
UNFIT = "guard", "clairvoyant"  # one has shadows of its own, the other has to know the future
MOST = 8  # policies: bits of a row


class Guard(Headwater):
    """A checkpoint goes that the best policy's shadow cache lacks, of those the lowest by `headwater`.

    Nothing goes at a switch: the memory becomes what the other policy would hold as room is needed ("lazy"; Blum and
    Burch 2000). If the shadow lacks nothing, the lowest goes. The best policy has the most hit tokens; a request counts
    1/e after `window` more. With one in the lead, it is followed until another is ahead.

    experts: the policies, the first one at the beginning. Without checkpoints there are no shadows.
    """

    def __init__(self, layout: CacheLayout, experts: str = EXPERTS, window: float = 200.0) -> None:
        if window < 1:
            raise ValueError(f"window is {window}, must be at least 1 request")
        super().__init__(layout)
        named = split(experts)
        if len(named) > MOST:
            raise ValueError(f"{len(named)} policies are to be followed; at most {MOST} can be")
        if unfit := [name for name in named if name.startswith(UNFIT)]:
            raise ValueError(f"{unfit[0]} cannot be followed")
        self.experts = () if layout.every_page else named
        self.window = window
        self._shadows: Shadows | None = None
        self._holders = array("B")  # a column: shadows that have the prefix, as bits
        self._kept.begin(self._holders)
        self._nodes: dict[int, Node] = {}  # with a checkpoint, by the prefix's id

    def follow(self, shadows: Shadows) -> None:
        """Follow these shadows, which are those of `experts`."""
        self._shadows = shadows
        shadows.holders.listener = self._hold

    def _hold(self, prefix: int, bits: int) -> None:
        if (node := self._nodes.get(prefix)) is not None:
            self._holders[self._kept.row_of(node)] = bits

    def _leave(self, node: Node) -> None:
        del self._nodes[self._kept.prefix[self._kept.row_of(node)]]
        super()._leave(node)

    def _take(self, node: Node) -> int:
        row = super()._take(node)
        if self._shadows is not None:
            prefix = self._kept.prefix[row]
            self._holders[row] = self._shadows.holders.of.get(prefix, 0)
            self._nodes[prefix] = node
        return row

    def lowest(self, leaves: bool, now: int) -> Node | None:
        if self._shadows is None:
            return super().lowest(leaves, now)
        kept = self._kept
        lacking = view(self._holders) >> self._shadows.best & 1 == 0
        if leaves:
            lacking &= view(kept.leaf) == 1
        lowest = kept.lowest_allowed(now, lacking)
        if lowest is None:
            return super().lowest(leaves, now)
        return kept.hinted(lowest, now, leaves, self.clock())
