"""Gated short convolution between its products: of the next tokens of decoding sequences, and of prompts.

A state is the last inputs of the convolution, oldest first: [before, channels], of the type of the inputs.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from headwater.kernels.compiling import kernel
from headwater.kernels.convolution import NUMBERS_PER_SLICE
from headwater.kernels.mamba import BLOCK, copied_columns
from headwater.kernels.vectors import LANES, fill, fma, load, load_some, store, store_some

CHUNK = 64  # tokens, as `mixers.slices.CHUNK`


@kernel
def decode_into(out, inputs, gates, rows, slots, firsts, drafts, states, state_row, taps, sizes):
    """Write the gated convolution of each row; move the inputs in its slot up by one, but not by rows of drafts.

    Rows of `inputs` and of `gates` begin every `rows` elements of their arrays. Rows from `firsts[s]` until
    `firsts[s + 1]` are tokens of one sequence, in order, which is in row `slots[s]` of the state memory; its rows begin
    every `state_row` elements. Those of a step from `drafts[s]` on do not advance it. `taps` has a row of all channels
    for each tap, the oldest input's first, then the biases, each padded by a vector; `sizes` are channels, and inputs
    of a state.
    """
    channels, before = sizes
    tap_row = channels + LANES
    input_row, gate_row = rows
    blocks = -(-channels // BLOCK)
    for task in prange(len(slots) * blocks):
        sequence = task // blocks
        first = (task - sequence * blocks) * BLOCK
        last = min(first + BLOCK, channels)
        lines, line_row, at = states, channels, slots[sequence] * state_row
        for i in range(firsts[sequence], firsts[sequence + 1]):
            if i == drafts[sequence]:
                lines = copied_columns(states, at, channels, before, first, last)
                line_row, at = BLOCK, -first
            for c in range(first, last, LANES):
                some = min(LANES, last - c)
                now, total = load_some(inputs, i * input_row + c, some), fill(np.float32(0))
                for tap in range(before):
                    stored = load_some(lines, at + tap * line_row + c, some)
                    total = fma(stored, load(taps, tap * tap_row + c), total)
                    if tap > 0:
                        store_some(lines, at + (tap - 1) * line_row + c, stored, some)
                if before > 0:
                    store_some(lines, at + (before - 1) * line_row + c, now, some)
                total = fma(now, load(taps, before * tap_row + c), total)
                gated = (total + load(taps, (before + 1) * tap_row + c)) * load_some(gates, i * gate_row + c, some)
                store_some(out, i * channels + c, gated, some)


@kernel
def prefill_into(out, inputs, gates, rows, ragged, n_slices, states, state_row, taps, sizes):
    """Write the gated convolution of slices' rows; write the last inputs to rows of the state memory after each chunk.

    `ragged` are the slices, see `mixers.cpu.recurrent.ragged_of`; other arguments are those of `decode_into`.
    """
    channels, before = sizes
    tap_row = channels + LANES
    input_row, gate_row = rows
    blocks = -(-channels // BLOCK)
    for task in prange(n_slices * blocks):
        which = task // blocks
        first = (task - which * blocks) * BLOCK
        of_slice = NUMBERS_PER_SLICE * which
        begin, length = ragged[of_slice], ragged[of_slice + 1]
        slot, chunk = ragged[of_slice + 2] * state_row, ragged[of_slice + 4]
        window = np.empty((before + CHUNK) * LANES, np.float32)  # inputs of a chunk after the ones before it
        for c in range(first, min(first + BLOCK, channels), LANES):
            some = min(LANES, channels - c)
            for tap in range(before):
                store(window, tap * LANES, load_some(states, slot + tap * channels + c, some))
            for start in range(0, length, CHUNK):
                n = min(CHUNK, length - start)
                for t in range(n):
                    row = begin + start + t
                    store(window, (before + t) * LANES, load_some(inputs, row * input_row + c, some))
                    total = load(window, t * LANES) * load(taps, c)
                    for tap in range(1, before + 1):
                        total = fma(load(window, (t + tap) * LANES), load(taps, tap * tap_row + c), total)
                    gated = (total + load(taps, (before + 1) * tap_row + c)) * load_some(
                        gates, row * gate_row + c, some
                    )
                    store_some(out, row * channels + c, gated, some)
                for tap in range(before):
                    store(window, tap * LANES, load(window, (n + tap) * LANES))
                index = chunk + start // CHUNK
                for at in range(ragged[index], ragged[index + 1]):
                    for tap in range(before):
                        at_state = ragged[at] * state_row + tap * channels + c
                        store_some(states, at_state, load(window, tap * LANES), some)
