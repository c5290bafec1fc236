"""Gated DeltaNet for one token of each decoding sequence: everything between the layer's two products."""

from __future__ import annotations

import numpy as np
from numba import prange

from headwater.kernels.compiling import kernel
from headwater.kernels.convolution import Convolution, convolve_into
from headwater.kernels.delta_rule import delta_step
from headwater.kernels.functions import exp, sigmoid, silu, softplus
from headwater.kernels.norms import L2_EPS, inverse_rms, unit_into
from headwater.kernels.padding import fill_into, padded
from headwater.kernels.vectors import LANES, load, load_some, spread, store_some


@kernel
def decode_into(out, projected, slots, states, state_row, taps, stored, stored_row, gates, norm, sizes, eps):
    """Write what each row reads, normed and gated; update the states of its slot in place.

    Rows of `projected` are [q | k | v | z | b | a], those of `out` [heads, v_width]. Row i belongs to the sequence in
    row `slots[i]` of the state memory, in which states and stored inputs of the convolution begin a row every
    `state_row` and `stored_row` elements. `gates` are −e^A of each head, then the biases of the heads' steps. `sizes`
    are key heads, value heads, widths of a key and a value, and stored inputs of a channel.
    """
    key_heads, value_heads, k_width, v_width, before = sizes
    keys, values, shared = key_heads * k_width, value_heads * v_width, value_heads // key_heads
    channels = 2 * keys + values
    row = channels + values + 2 * value_heads
    for task in prange(len(slots) * key_heads):
        i = task // key_heads
        group = task - i * key_heads
        first, of_states, of_stored = i * row, slots[i] * state_row, slots[i] * stored_row
        convolution = Convolution(taps, stored, channels, before)
        query, key = np.empty(padded(k_width), np.float32), np.empty(padded(k_width), np.float32)
        decay = np.empty(padded(k_width), np.float32)
        value, read = np.empty(padded(v_width), np.float32), np.empty(padded(v_width), np.float32)
        convolve_into(query, projected, first, convolution, of_stored, group * k_width, k_width)
        convolve_into(key, projected, first, convolution, of_stored, keys + group * k_width, k_width)
        unit_into(query, k_width, L2_EPS, k_width**-0.5)
        unit_into(key, k_width, L2_EPS, 1.0)
        for head in range(group * shared, (group + 1) * shared):
            convolve_into(value, projected, first, convolution, of_stored, 2 * keys + head * v_width, v_width)
            b = first + channels + values + head
            step = softplus(spread(projected, b + value_heads) + spread(gates, value_heads + head))
            fill_into(decay, exp(spread(gates, head) * step))
            at = of_states + head * k_width * v_width
            delta_step(states, at, k_width, v_width, query, key, decay, value, sigmoid(spread(projected, b)), read)
            factor = inverse_rms(read, 0, v_width, eps)
            at, z = (i * value_heads + head) * v_width, first + channels + head * v_width
            for c in range(0, v_width, LANES):
                some = min(LANES, v_width - c)
                gate = silu(load_some(projected, z + c, some))
                store_some(out, at + c, load(read, c) * factor * load(norm, c) * gate, some)
