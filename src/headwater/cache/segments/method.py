"""The ways to put a prompt together from stored segments: what is computed anew, what carries a state over a segment.

Three are for use. The others are what they are measured against (HYPIC, section 6.1 and figure 13).
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.cache.segments.compose import Widths
from headwater.request import Fidelity


@dataclass(frozen=True, slots=True)
class Method:
    """Composing with transitions and seams."""

    seam: int  # tokens computed anew at each end of a segment
    whole: int = 0  # segments that are computed whole at most: those that have most to do with what is asked
    one_in: int = 1  # and of so many segments at most one, rounded up; but never all of them
    carries: bool = True  # whether a segment's transition is applied to the state before it

    def whole_of(self, segments: int) -> int:
        """How many of a prompt's segments are computed whole."""
        return max(0, min(self.whole, -(-segments // self.one_in), segments - 1))

    def widths(self, conv_taps: int) -> Widths:
        """What is computed of a segment at each use, in a model whose widest convolution has so many taps."""
        return Widths.of(self.seam, conv_taps)


@dataclass(frozen=True, slots=True)
class NaiveAddition:
    """S ← S + S_{C|0}: no transition, nothing computed anew, the convolution's warm-up included (section 3.1).

    It is of recurrent states: keys and values, in pages or in windows, are composed by position as ever.
    """

    carries: bool = False

    def whole_of(self, segments: int) -> int:
        """None."""
        return 0

    def widths(self, conv_taps: int) -> Widths:
        """None."""
        return Widths(0, 0)


METHODS: dict[Fidelity, Method | NaiveAddition] = {
    Fidelity.FAST: Method(8),
    Fidelity.BALANCED: Method(8, whole=2, one_in=4),
    Fidelity.HIGH: Method(16, whole=4, one_in=2),
    Fidelity.NAIVE: NaiveAddition(),
    Fidelity.W0: Method(0),
    Fidelity.W4: Method(4),
    Fidelity.W16: Method(16),
    Fidelity.W32: Method(32),
}
