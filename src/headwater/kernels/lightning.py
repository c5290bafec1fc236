"""Lightning attention for the next tokens of decoding sequences: everything between the layer's products."""

from __future__ import annotations

import numpy as np
from numba import prange

from headwater.kernels.compiling import kernel, part
from headwater.kernels.drafts import copied
from headwater.kernels.functions import copy_into, fill_into, inverse_rms, padded
from headwater.kernels.one_token import rank_one_step
from headwater.kernels.vectors import LANES, fill, fma, load, load_some, spread, store, store_some


@kernel
def decode_into(
    out, mixed, gates, rows, turns, slots, firsts, drafts, states, state_row, decays, qk_norm, norm, sizes, scale, eps
):
    """Write what each row reads, normed and gated; update the states of its slot in place.

    Rows of `mixed` are [q | k | v], of `gates` [heads, width], activated; each begins every `rows` elements of its
    array. Rows from `firsts[s]` until `firsts[s + 1]` are tokens of one sequence, in order, which is in row `slots[s]`
    of the state memory; its rows begin every `state_row` elements, and those of a step from `drafts[s]` on do not
    advance it. `turns` are each row's cosines and sines; `decays` the heads' factors; `qk_norm` the weights of the
    norms of queries and keys, a vector of zeros apart, or nothing; `sizes` are heads, width, groups of the output's
    norm and rotated pairs.
    """
    heads, width, groups, pairs = sizes
    mixed_row, gate_row = rows
    reads = np.empty(firsts[-1] * heads * width, np.float32)
    for task in prange(len(slots) * heads):
        sequence = task // heads
        head = task - sequence * heads
        query, key = np.empty(padded(width), np.float32), np.empty(padded(width), np.float32)
        value, read = np.empty(padded(width), np.float32), np.empty(padded(width), np.float32)
        decay = np.empty(padded(width), np.float32)
        state, of_head = slots[sequence] * state_row + head * width * width, states
        for i in range(firsts[sequence], firsts[sequence + 1]):
            if i == drafts[sequence]:
                of_head, state = copied(states, state, width * width), 0
            at = i * mixed_row + head * width
            copy_into(query, mixed, at, width, 1.0)
            copy_into(key, mixed, at + heads * width, width, 1.0)
            copy_into(value, mixed, at + 2 * heads * width, width, 1.0)
            if len(qk_norm) > 0:
                norm_into(query, qk_norm, 0, width, eps)
                norm_into(key, qk_norm, width + LANES, width, eps)
            turn_into(query, turns, 2 * i * pairs, pairs)
            turn_into(key, turns, 2 * i * pairs, pairs)
            for c in range(0, width, LANES):
                store(query, c, load(query, c) * fill(np.float32(scale)))
            fill_into(decay, spread(decays, head))
            rank_one_step(of_head, state, width, width, query, key, decay, value, read)
            for c in range(0, width, LANES):
                store_some(reads, (i * heads + head) * width + c, load(read, c), min(LANES, width - c))
    for task in prange(firsts[-1] * groups):
        i = task // groups
        of_group, at = heads * width // groups, i * heads * width
        first = (task - i * groups) * of_group
        factor = inverse_rms(reads, at + first, of_group, eps)
        for c in range(first, first + of_group, LANES):
            some = min(LANES, first + of_group - c)
            y = load_some(reads, at + c, some) * factor * load(norm, c)
            store_some(out, at + c, y * load_some(gates, i * gate_row + c, some), some)


@part
def norm_into(x, weight, at, n, eps):
    """Scale x to a root mean square of 1, times the weights from `at` on, in place."""
    factor = inverse_rms(x, 0, n, eps)
    for c in range(0, n, LANES):
        some = min(LANES, n - c)
        store_some(x, c, load(x, c) * factor * load(weight, at + c), some)


@part
def turn_into(x, turns, at, pairs):
    """Rotate the pairs (i, i + pairs) of x in place; `turns` has their cosines, then their sines, from `at` on."""
    for c in range(0, pairs, LANES):
        some = min(LANES, pairs - c)
        a, b = load_some(x, c, some), load_some(x, pairs + c, some)
        cosine, sine = load_some(turns, at + c, some), load_some(turns, at + pairs + c, some)
        zero = fill(np.float32(0))
        store_some(x, c, fma(a, cosine, zero - b * sine), some)
        store_some(x, pairs + c, fma(b, cosine, a * sine), some)
