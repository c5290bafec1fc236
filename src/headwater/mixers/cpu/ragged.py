"""The slices of a round as kernels read them. S slices, n chunks of 64 tokens of all slices, one after the other."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, chain
from typing import Any

import numpy as np

from headwater.mixers.batch import CHUNK, Chunk, Round

OF_SLICE = 4  # numbers


@lru_cache(maxsize=8)
def ragged_of(together: Round) -> np.ndarray[Any, Any]:
    """Return int64 numbers, which all layers of a step share.

    [S, 4]: a slice's first row in the step, its rows, its slot, and where the second list has its first chunk. [n + 1]:
    where the third list has the rows of a chunk, and where it ends. The third list: rows of the state memory that
    receive the state after a chunk. All places are indices of the whole array.
    """
    slices = together.slices
    chunks = [[Chunk(s, i) for i in range(-(-s.length // CHUNK))] for s in slices]
    rows = [chunk.state_rows for chunk in chain(*chunks)]
    of_chunks = OF_SLICE * len(slices)
    firsts = accumulate(map(len, chunks), initial=of_chunks)
    numbers = [
        number for s, first in zip(slices, firsts, strict=False) for number in (s.first, s.length, s.slot, first)
    ]
    numbers += accumulate(map(len, rows), initial=of_chunks + len(rows) + 1)
    return np.array([*numbers, *chain(*rows)], np.int64)
