"""Mamba-1 for the next tokens of decoding sequences: its convolution, then, after the products of steps, its scan."""

from __future__ import annotations

import numpy as np
from numba import prange

from headwater.kernels.compiling import kernel, part
from headwater.kernels.convolution import Convolution, convolve_into
from headwater.kernels.drafts import copied_inputs
from headwater.kernels.functions import exp, silu, softplus
from headwater.kernels.vectors import LANES, fma, load, load_some, spread, store, store_some

BLOCK = 256  # channels that a thread takes at once: a row of them is adjacent in memory


@kernel
def convolve_rows_into(out, projected, slots, firsts, drafts, taps, stored, stored_row, channels, before):
    """Write the convolved channels of each row, float32; shift the stored inputs of its slot.

    Rows of `projected` are [x | z]. Rows of `out` are padded to whole blocks. Rows from `firsts[s]` until
    `firsts[s + 1]` are tokens of the sequence in slot `slots[s]`, in order; those from `drafts[s]` on shift no input.
    """
    blocks = -(-channels // BLOCK)
    for task in prange(len(slots) * blocks):
        sequence = task // blocks
        block = task - sequence * blocks
        first = block * BLOCK
        convolution, at_stored = Convolution(taps, stored, channels, before), slots[sequence] * stored_row
        some = min(BLOCK, channels - first)
        for i in range(firsts[sequence], firsts[sequence + 1]):
            if i == drafts[sequence]:
                convolution, at_stored = copied_inputs(convolution, at_stored, ((first, some),)), 0
            of_block = out[(i * blocks + block) * BLOCK :]
            convolve_into(of_block, projected, i * 2 * channels, convolution, at_stored, first, some)


@kernel
def scan_into(out, x, projected, dt, b, c, rows, slots, firsts, drafts, states, state_row, rate, bias, skip, sizes):
    """Write what each row reads, gated; update the states of its slot in place, but not by rows from `drafts[s]` on.

    `x` are rows of convolved channels, padded to whole blocks; rows of `projected` are [x | z], those of `dt` the
    channels of the steps before bias and softplus, those of `b` and `c` the states' factors; the last three begin
    every `rows` elements of their arrays. `rate` are rows of all channels' decay rates, below 0, one for each state,
    padded by a vector; `sizes` are channels and states of a channel.
    """
    channels, n_states = sizes
    dt_row, b_row, c_row = rows
    blocks = -(-channels // BLOCK)
    for task in prange(len(slots) * blocks):
        sequence = task // blocks
        block = task - sequence * blocks
        first = block * BLOCK
        last = min(first + BLOCK, channels)
        whole = last - (last - first) % LANES
        step, taken, read = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
        lines, line_row, of_states = states, channels, slots[sequence] * state_row
        for i in range(firsts[sequence], firsts[sequence + 1]):
            if i == drafts[sequence]:
                lines = copied_columns(states, of_states, channels, n_states, first, last)
                line_row, of_states = BLOCK, -first
            read[:] = 0
            of_x = x[(i * blocks + block) * BLOCK :]
            for at in range(first, last, LANES):
                inputs = load_some(dt, i * dt_row + at, min(LANES, last - at)) + load(bias, at)
                store(step, at - first, softplus(inputs))
                store(taken, at - first, load(step, at - first) * load(of_x, at - first))
            for state in range(n_states):
                factor, reading = spread(b, i * b_row + state), spread(c, i * c_row + state)
                line, rates = of_states + state * line_row, state * (channels + LANES)
                for at in range(first, whole, LANES):
                    local = at - first
                    decay = exp(load(step, local) * load(rate, rates + at))
                    h = fma(decay, load(lines, line + at), load(taken, local) * factor)
                    store(lines, line + at, h)
                    store(read, local, fma(reading, h, load(read, local)))
                if whole < last:
                    local, some = whole - first, last - whole
                    decay = exp(load(step, local) * load(rate, rates + whole))
                    h = fma(decay, load_some(lines, line + whole, some), load(taken, local) * factor)
                    store_some(lines, line + whole, h, some)
                    store(read, local, fma(reading, h, load(read, local)))
            for at in range(first, last, LANES):
                some, local = min(LANES, last - at), at - first
                y = fma(load(of_x, local), load(skip, at), load(read, local))
                gate = silu(load_some(projected, (2 * i + 1) * channels + at, some))
                store_some(out, i * channels + at, y * gate, some)


@part
def copied_columns(states, at, channels, n_states, first, last):
    """Return a copy of some channels of a sequence's states: a row of a block for each state."""
    copy = np.empty(n_states * BLOCK, states.dtype)
    for state in range(n_states):
        for c in range(first, last):
            copy[state * BLOCK + c - first] = states[at + state * channels + c]
    return copy
