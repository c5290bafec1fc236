"""Keys of prompts whose states are approximate: the same tokens, marked, so that no exact request ever matches them.

A token id takes 28 of a key's 32 bits; the four above say how faithful what was computed of it is. So one tree holds
both: approximate branches share the exact prefix that they grew from, and one eviction serves all.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from headwater.request import Fidelity, Span

LEVELS = {fidelity: level for level, fidelity in enumerate(Fidelity, 1)}
ANEW = 15  # the level of segments computed whole between others: so their choice is part of the key
SHIFT = 28
LARGEST_ID = (1 << SHIFT) - 1


def marked(key: bytes, start: int, fidelity: Fidelity, anew: Iterable[Span] = ()) -> bytes:
    """The key with all tokens from `start` on marked, those of segments computed whole in another way.

    Raises ValueError for one that is marked there already.
    """
    ids = np.frombuffer(key, np.uint32).copy()
    behind = ids[start:]
    if len(behind) and behind.max() > LARGEST_ID:
        raise ValueError(f"token {start + int((behind > LARGEST_ID).argmax())} of the key is marked already")
    levels = np.full(len(ids), LEVELS[fidelity] << SHIFT, np.uint32)
    for span in anew:
        levels[span.start : span.end] = ANEW << SHIFT
    behind |= levels[start:]
    return ids.tobytes()
