"""Which segments of a prompt have most to do with what is asked after them. Token ids only: it costs no pass."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence

from headwater.request import Span


def asked_about(key: bytes, segments: Sequence[Span], count: int) -> tuple[Span, ...]:
    """At most so many segments that share the rarest tokens with what comes after the last one, ascending.

    Each token of what is asked counts 1/n in the n segments that have it, however often they do, and nothing if all
    have it, as a separator; a segment's sum is divided by the root of its length, so that long ones are not preferred.
    Segments that share none are left out; of equals the first is taken. `key`: token ids of the prompt, four bytes
    each.
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
