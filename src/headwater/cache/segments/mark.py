"""Keys of prompts whose states are approximate: the same tokens, marked, so that no exact request ever matches them.

A token id takes 29 of a key's 32 bits; the three above say how faithful what was computed of it is. So one tree holds
both: approximate branches share the exact prefix that they grew from, and one eviction serves all.
"""

from __future__ import annotations

from array import array

from headwater.types import Fidelity

LEVELS = {fidelity: level for level, fidelity in enumerate(Fidelity, 1)}
SHIFT = 29
LARGEST_ID = (1 << SHIFT) - 1


def marked(key: bytes, start: int, fidelity: Fidelity) -> bytes:
    """The key with all tokens from `start` on marked. Raises ValueError for one that is marked there already."""
    ids = array("I", key)
    mark = LEVELS[fidelity] << SHIFT
    for i in range(start, len(ids)):
        if ids[i] > LARGEST_ID:
            raise ValueError(f"token {i} of the key is marked already")
        ids[i] |= mark
    return ids.tobytes()
