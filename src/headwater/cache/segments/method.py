"""Methods of composing a prompt from stored segments: the tokens to recompute, and the use of transitions.

Three are for use. The others are measured against them (HYPIC, section 6.1 and figure 13).
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from headwater.cache.segments.compose import Widths
from headwater.request import Fidelity, Span


@dataclass(frozen=True, slots=True)
class Method:
    """Composition with seams, and with transitions or without.

    Without them (S ← S + S_{C|0}, section 3.1) nothing is recomputed, not even to warm the convolution up. This is for
    recurrent states: keys and values, in pages or in windows, are composed by position as ever.
    """

    seam: int  # tokens recomputed at each end of a segment
    whole: int = 0  # at most N segments are recomputed whole: those most relevant to the question
    one_in: int = 1  # and at most one in N of the segments, rounded up; but never all of them
    carries: bool = True  # whether a segment's transition is applied to the state before it

    def whole_of(self, segments: int) -> int:
        """Return how many of a prompt's segments are recomputed whole."""
        return max(0, min(self.whole, -(-segments // self.one_in), segments - 1))

    def widths(self, conv_taps: int) -> Widths:
        """Return the widths of seams in a model whose widest convolution has that many taps."""
        return Widths.of(self.seam, conv_taps) if self.carries else Widths(0, 0)


METHODS = {
    Fidelity.FAST: Method(8),
    Fidelity.BALANCED: Method(8, whole=2, one_in=4),
    Fidelity.HIGH: Method(16, whole=4, one_in=2),
    Fidelity.NAIVE: Method(0, carries=False),
    Fidelity.W0: Method(0),
    Fidelity.W4: Method(4),
    Fidelity.W16: Method(16),
    Fidelity.W32: Method(32),
}


def relevant(key: bytes, segments: Sequence[Span], count: int) -> tuple[Span, ...]:
    """Return the at most `count` segments that share the rarest tokens with the question, in order of position.

    The question is what follows the last segment. Each of its tokens counts 1/n in the n segments that contain it,
    however often they do, and nothing if all contain it, as a separator; a segment's sum is divided by the root of its
    length, so that long ones are not preferred. Segments that share none are left out; of equals the first is taken.
    No model runs. `key`: token ids of the prompt, four bytes each.
    """
    if not count or not segments:
        return ()
    ids = array("I", key)
    asked = set(ids[segments[-1].end :])
    shared = [sorted(asked.intersection(ids[span.start : span.end])) for span in segments]
    held_by = Counter(token for tokens in shared for token in tokens)
    scores = [
        sum(1 / held_by[token] for token in tokens if held_by[token] < len(segments)) / math.sqrt(span.end - span.start)
        for tokens, span in zip(shared, segments, strict=True)
    ]
    best = sorted(range(len(segments)), key=lambda i: -scores[i])[:count]
    return tuple(segments[i] for i in sorted(best) if scores[i])
