"""Mamba-2 for the next tokens of decoding sequences: everything between the layer's two products."""

from __future__ import annotations

import numpy as np
from numba import prange

from headwater.kernels.compiling import kernel, part
from headwater.kernels.convolution import Convolution, convolve_into
from headwater.kernels.drafts import copied, copied_inputs
from headwater.kernels.functions import exp, fill_into, inverse_rms, padded, silu, softplus
from headwater.kernels.one_token import rank_one_step
from headwater.kernels.vectors import LANES, fill, fma, load, load_some, maximum, spread, store, store_some


@kernel
def decode_into(
    out, projected, slots, firsts, drafts, states, state_row, taps, stored, stored_row,
    of_heads, norm, sizes, scales, limits, order, eps
):  # fmt: skip
    """Write the gated and normed outputs of rows; update the states of their slots in place.

    Rows of `projected` are [z | x | B | C | dt], those of `out` [heads, width]. Rows from `firsts[s]` until
    `firsts[s + 1]` are tokens of the sequence in row `slots[s]` of the state memory, in order; rows from `drafts[s]` on
    do not advance it. `of_heads` are the heads' decay rates, biases of steps, and skips; `sizes` are heads, groups,
    channels of a head, width of a state and stored inputs of a channel; `scales` those of z and dt; `limits` the lowest
    and highest step. `order` is 1 if the gate comes before the norm, 2 if after it, 0 without a norm.
    """
    heads, groups, width, state, before = sizes
    inner, line = heads * width, padded(state)
    channels = inner + 2 * groups * state
    row, n_group = inner + channels + heads, inner // groups
    n = firsts[-1]
    shared = np.empty(n * groups * 2 * line, np.float32)  # B and C of each group
    reads = np.empty(n * inner, np.float32)
    for task in prange(len(slots) * groups):
        sequence = task // groups
        group = task - sequence * groups
        convolution, of_stored = Convolution(taps, stored, channels, before), slots[sequence] * stored_row
        rows = firsts[sequence], firsts[sequence + 1], drafts[sequence]
        share_into(shared, projected, row, rows, convolution, of_stored, inner, group, groups, state)
    for task in prange(len(slots) * heads):
        sequence = task // heads
        head = task - sequence * heads
        convolution, of_stored = Convolution(taps, stored, channels, before), slots[sequence] * stored_row
        x, taken = np.empty(padded(width), np.float32), np.empty(padded(width), np.float32)
        read, decay = np.empty(padded(width), np.float32), np.empty(line, np.float32)
        of_head, at = states, slots[sequence] * state_row + head * state * width
        for i in range(firsts[sequence], firsts[sequence + 1]):
            if i == drafts[sequence]:
                of_head, at = copied(states, at, state * width), 0
                convolution, of_stored = copied_inputs(convolution, of_stored, ((head * width, width),)), 0
            convolve_into(x, projected, i * row + inner, convolution, of_stored, head * width, width)
            step = spread(projected, i * row + inner + channels + head)
            step = step_of(step, spread(of_heads, heads + head), scales[1], limits)
            fill_into(decay, exp(step * spread(of_heads, head)))
            for c in range(0, width, LANES):
                store(taken, c, step * load(x, c))
            group = i * groups + head // (heads // groups)
            key, query = shared[2 * group * line :], shared[(2 * group + 1) * line :]
            rank_one_step(of_head, at, state, width, query, key, decay, taken, read)
            skip_into(reads, i * inner + head * width, x, read, spread(of_heads, 2 * heads + head), width)
    for task in prange(n * groups):
        i = task // groups
        first, at_group = (task - i * groups) * n_group, i * inner + (task - i * groups) * n_group
        finish_into(out, reads, at_group, projected, i * row + first, norm, first, n_group, scales[0], order, eps)


@part
def share_into(shared, projected, row, rows, convolution, of_stored, inner, group, groups, state):
    """Write the convolved B and C of a group for a sequence's rows: first row, end, first draft."""
    begin, end, drafts = rows
    line, channel = padded(state), inner + group * state
    for i in range(begin, end):
        if i == drafts:
            ranges = (channel, state), (channel + groups * state, state)
            convolution, of_stored = copied_inputs(convolution, of_stored, ranges), 0
        at, to = i * row + inner, 2 * (i * groups + group) * line
        convolve_into(shared[to:], projected, at, convolution, of_stored, channel, state)
        convolve_into(shared[to + line :], projected, at, convolution, of_stored, channel + groups * state, state)


@part
def skip_into(reads, to, x, read, skip, width):
    """Write a head's reads plus its skipped inputs, skip · x."""
    for c in range(0, width, LANES):
        store_some(reads, to + c, fma(skip, load(x, c), load(read, c)), min(LANES, width - c))


@part
def step_of(projected, bias, scale, limits):
    """Return the step, softplus(projected · scale + bias), within its limits."""
    zero = fill(np.float32(0))
    step = maximum(softplus(projected * fill(np.float32(scale)) + bias), fill(np.float32(limits[0])))
    return zero - maximum(zero - step, fill(np.float32(-limits[1])))


@part
def finish_into(out, reads, at, gates, at_gates, norm, at_norm, n, scale, order, eps):
    """Write `n` channels of a group, gated and normed in this `order`; `reads` are overwritten."""
    if order != 2:
        for c in range(0, n, LANES):
            some = min(LANES, n - c)
            gate = silu(load_some(gates, at_gates + c, some) * fill(np.float32(scale)))
            store_some(reads, at + c, load_some(reads, at + c, some) * gate, some)
    factor = fill(np.float32(1))
    if order != 0:
        factor = inverse_rms(reads, at, n, eps)
    for c in range(0, n, LANES):
        some = min(LANES, n - c)
        y = load_some(reads, at + c, some) * factor * load(norm, at_norm + c)
        if order == 2:
            y = y * silu(load_some(gates, at_gates + c, some) * fill(np.float32(scale)))
        store_some(out, at + c, y, some)
