"""Linear attention for one decoded token and one head: S' = D S + k vᵀ, o = S'ᵀ q, with D = Diag(d).

The state is passed over once, row by row as it lies in memory.
"""

from __future__ import annotations

from headwater.kernels.compiling import part
from headwater.kernels.padding import padded, padded_rows, unpadded_into
from headwater.kernels.vectors import LANES, fma, load, spread, store


@part
def rank_one_step(state, at, k_width, v_width, query, key, decay, value, out):
    """Advance a head's state [K, V], `state` from `at` on, by one token; write what it reads to `out`.

    `query`, `key`, `decay`, `value` and `out` are padded to whole vectors.
    """
    is_whole = v_width % LANES == 0
    lines = state if is_whole else padded_rows(state, at, k_width, v_width)
    _step(lines, at if is_whole else 0, k_width, padded(v_width), query, key, decay, value, out)
    if not is_whole:
        unpadded_into(state, at, lines, k_width, v_width)


@part
def _step(state, at, k_width, v_width, query, key, decay, value, out):
    out[:] = 0
    for i in range(k_width):
        line = at + i * v_width
        q, k, d = spread(query, i), spread(key, i), spread(decay, i)
        for c in range(0, v_width, LANES):
            s = fma(k, load(value, c), d * load(state, line + c))
            store(state, line + c, s)
            store(out, c, fma(q, s, load(out, c)))
