"""Gated linear attention for the next tokens of decoding sequences: everything between the layer's products."""

from __future__ import annotations

import numpy as np
from numba import prange

from headwater.kernels.compiling import kernel
from headwater.kernels.drafts import copied
from headwater.kernels.functions import exp, silu, softplus
from headwater.kernels.one_token import rank_one_step
from headwater.kernels.padded import copy_into, inverse_rms, padded
from headwater.kernels.vectors import LANES, fill, load, load_some, store, store_some


@kernel
def decode_into(out, mixed, z, gates, rows, slots, firsts, drafts, states, state_row, norm, sizes, normaliser, eps):
    """Write what each row reads, normed and gated; update the states of its slot in place.

    Rows of `mixed` are [q | k | v], of `z` [heads, v_width], of `gates` [heads, k_width]; each begins every `rows`
    elements of its array. Rows from `firsts[s]` until `firsts[s + 1]` are tokens of one sequence, in order, which is in
    row `slots[s]` of the state memory; its rows begin every `state_row` elements, and those of a step from
    `drafts[s]` on do not advance it. `sizes` are heads and the widths of a key and a value. A log decay is log
    sigmoid(gate) / normaliser.
    """
    heads, k_width, v_width = sizes
    mixed_row, z_row, gate_row = rows
    for task in prange(len(slots) * heads):
        sequence = task // heads
        head = task - sequence * heads
        query, key = np.empty(padded(k_width), np.float32), np.empty(padded(k_width), np.float32)
        decay = np.empty(padded(k_width), np.float32)
        value, read = np.empty(padded(v_width), np.float32), np.empty(padded(v_width), np.float32)
        state, of_head = slots[sequence] * state_row + head * k_width * v_width, states
        for i in range(firsts[sequence], firsts[sequence + 1]):
            if i == drafts[sequence]:
                of_head, state = copied(states, state, k_width * v_width), 0
            at = i * mixed_row + head * k_width
            copy_into(query, mixed, at, k_width, k_width**-0.5)
            copy_into(key, mixed, at + heads * k_width, k_width, 1.0)
            copy_into(value, mixed, i * mixed_row + 2 * heads * k_width + head * v_width, v_width, 1.0)
            for c in range(0, k_width, LANES):
                gate = load_some(gates, i * gate_row + head * k_width + c, min(LANES, k_width - c))
                log_decay = softplus(fill(np.float32(0)) - gate) / fill(np.float32(-normaliser))
                store(decay, c, exp(log_decay))
            rank_one_step(of_head, state, k_width, v_width, query, key, decay, value, read)
            factor = inverse_rms(read, 0, v_width, eps)
            for c in range(0, v_width, LANES):
                some = min(LANES, v_width - c)
                gate = silu(load_some(z, i * z_row + head * v_width + c, some))
                store_some(out, (i * heads + head) * v_width + c, load(read, c) * factor * load(norm, c) * gate, some)
