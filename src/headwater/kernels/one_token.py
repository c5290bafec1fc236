"""Recurrences for one decoded token and one head, with a decay D = Diag(d): the gated delta rule and linear attention.

Gated delta rule: S' = D S + k (β (v − (D S)ᵀk))ᵀ, o = S'ᵀ q. The state is passed over twice, row by row as it lies in
memory, and comes from it once: a head's state stays in the processor's cache between the two. q and k are read from the
decayed state, since o = (D S)ᵀ q + (k·q) e for the error e = β (v − (D S)ᵀk).

Linear attention (a step of rank one): S' = D S + k vᵀ, o = S'ᵀ q. The state is passed over once.

K key channels, V value channels.
"""

from __future__ import annotations

import numpy as np

from headwater.kernels.compiling import part
from headwater.kernels.functions import dot, padded, padded_rows, unpadded_into
from headwater.kernels.vectors import LANES, fma, load, spread, store


@part
def delta_step(state, at, k_width, v_width, query, key, decay, value, beta, out):
    """Advance a head's state [K, V], `state` from `at` on, by one token; write what it reads to `out`.

    `query`, `key`, `decay`, `value` and `out` are padded to whole vectors; `beta` is a vector of one number.
    """
    is_whole = v_width % LANES == 0
    lines = state if is_whole else padded_rows(state, at, k_width, v_width)
    _delta_step(lines, at if is_whole else 0, k_width, padded(v_width), query, key, decay, value, beta, out)
    if not is_whole:
        unpadded_into(state, at, lines, k_width, v_width)


@part
def _delta_step(state, at, k_width, v_width, query, key, decay, value, beta, out):
    error = np.zeros(v_width, np.float32)  # (D S)ᵀk, then e
    out[:] = 0
    for i in range(k_width):
        line = at + i * v_width
        k = spread(key, i) * spread(decay, i)
        q = spread(query, i) * spread(decay, i)
        for c in range(0, v_width, LANES):
            s = load(state, line + c)
            store(error, c, fma(k, s, load(error, c)))
            store(out, c, fma(q, s, load(out, c)))
    key_query = dot(key, query, k_width)
    for c in range(0, v_width, LANES):
        e = (load(value, c) - load(error, c)) * beta
        store(error, c, e)
        store(out, c, fma(key_query, e, load(out, c)))
    for i in range(k_width):
        line = at + i * v_width
        k, d = spread(key, i), spread(decay, i)
        for c in range(0, v_width, LANES):
            store(state, line + c, fma(k, load(error, c), d * load(state, line + c)))


@part
def rank_one_step(state, at, k_width, v_width, query, key, decay, value, out):
    """Advance a head's state [K, V], `state` from `at` on, by one token; write what it reads to `out`.

    `query`, `key`, `decay`, `value` and `out` are padded to whole vectors.
    """
    is_whole = v_width % LANES == 0
    lines = state if is_whole else padded_rows(state, at, k_width, v_width)
    _rank_one_step(lines, at if is_whole else 0, k_width, padded(v_width), query, key, decay, value, out)
    if not is_whole:
        unpadded_into(state, at, lines, k_width, v_width)


@part
def _rank_one_step(state, at, k_width, v_width, query, key, decay, value, out):
    out[:] = 0
    for i in range(k_width):
        line = at + i * v_width
        q, k, d = spread(query, i), spread(key, i), spread(decay, i)
        for c in range(0, v_width, LANES):
            s = fma(k, load(value, c), d * load(state, line + c))
            store(state, line + c, s)
            store(out, c, fma(q, s, load(out, c)))
