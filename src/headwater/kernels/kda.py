"""Kimi Delta Attention for the next tokens of decoding sequences: everything between the layer's products."""

from __future__ import annotations

import numpy as np
from numba import prange

from headwater.kernels.compiling import kernel
from headwater.kernels.convolution import Convolution, convolve_into
from headwater.kernels.drafts import copied, copied_inputs
from headwater.kernels.functions import L2_EPS, exp, inverse_rms, padded, sigmoid, softplus, unit_into
from headwater.kernels.one_token import delta_step
from headwater.kernels.vectors import LANES, fill, load, load_some, spread, store, store_some


@kernel
def decode_into(
    out, mixed, f, z, b, rows, slots, firsts, drafts, states, state_row, taps, stored, stored_row,
    rate, bias, norm, sizes, lowest, eps,
):  # fmt: skip
    """Write what each row reads, normed and gated; update the states of its slot in place.

    Rows of `mixed` are [q | k | v], of `f` and `z` [heads, width], of `b` [heads]; each begins every `rows` elements of
    its array. Rows from `firsts[s]` until `firsts[s + 1]` are tokens of one sequence, in order, which is in row
    `slots[s]` of the state memory, where states and stored inputs of the convolution begin a row every `state_row` and
    `stored_row` elements; those from `drafts[s]` on do not advance it. `rate` (e^A) and `bias` are those of each
    key channel; `sizes` are heads, width, and stored inputs of a channel. The log decay is −rate · softplus(f +
    bias), or with a `lowest` below 0, lowest · sigmoid(rate · (f + bias)).
    """
    heads, width, before = sizes
    mixed_row, f_row, z_row, b_row = rows
    for task in prange(len(slots) * heads):
        sequence = task // heads
        head = task - sequence * heads
        channel = head * width
        of_stored = slots[sequence] * stored_row
        convolution = Convolution(taps, stored, 3 * heads * width, before)
        query, key = np.empty(padded(width), np.float32), np.empty(padded(width), np.float32)
        decay = np.empty(padded(width), np.float32)
        value, read = np.empty(padded(width), np.float32), np.empty(padded(width), np.float32)
        at, of_head = slots[sequence] * state_row + channel * width, states
        for i in range(firsts[sequence], firsts[sequence + 1]):
            if i == drafts[sequence]:
                of_head, at = copied(states, at, width * width), 0
                ranges = (channel, width), (heads * width + channel, width), (2 * heads * width + channel, width)
                convolution, of_stored = copied_inputs(convolution, of_stored, ranges), 0
            first = i * mixed_row
            convolve_into(query, mixed, first, convolution, of_stored, channel, width)
            convolve_into(key, mixed, first, convolution, of_stored, heads * width + channel, width)
            convolve_into(value, mixed, first, convolution, of_stored, 2 * heads * width + channel, width)
            unit_into(query, width, L2_EPS, width**-0.5)
            unit_into(key, width, L2_EPS, 1.0)
            for c in range(0, width, LANES):
                x = load_some(f, i * f_row + channel + c, min(LANES, width - c)) + load(bias, channel + c)
                if lowest < 0:
                    store(decay, c, exp(fill(np.float32(lowest)) * sigmoid(load(rate, channel + c) * x)))
                else:
                    store(decay, c, exp(fill(np.float32(0)) - load(rate, channel + c) * softplus(x)))
            delta_step(of_head, at, width, width, query, key, decay, value, sigmoid(spread(b, i * b_row + head)), read)
            factor = inverse_rms(read, 0, width, eps)
            for c in range(0, width, LANES):
                some = min(LANES, width - c)
                gate = sigmoid(load_some(z, i * z_row + channel + c, some))
                store_some(out, (i * heads + head) * width + c, load(read, c) * factor * load(norm, c) * gate, some)
