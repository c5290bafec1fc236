"""The short causal convolution before a recurrence: depthwise, with silu; its last inputs are part of the state."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from headwater.kernels.compiling import lean_part, part
from headwater.kernels.functions import silu
from headwater.kernels.vectors import LANES, fma, load, load_some, load_triples, spread, store, store_triples

NUMBERS_PER_SLICE = 5  # in descriptions of slices, see `ragged_of` in `mixers/cpu/recurrent.py`


class Convolution(NamedTuple):
    """A convolution's weights, and the last inputs of its channels for all sequences."""

    taps: Any  # rows of all channels, padded by a vector: the oldest input's tap, …, the newest one's, the bias
    stored: Any  # [..., channels, before], oldest first
    channels: int
    before: int  # stored inputs of a channel


@part
def convolve_into(out, inputs, at, convolution, at_stored, channel, n):
    """Convolve the next input of `n` adjacent channels from `channel` on, and shift their stored inputs.

    A token's inputs begin at `at`, its sequence's stored inputs at `at_stored`. `out` receives whole vectors, with
    zeros in lanes beyond `n`.
    """
    taps, stored, channels, before = convolution
    lines = np.zeros((before + 1) * LANES, stored.dtype)  # a row for each tap
    row = channels + LANES
    for c in range(channel, channel + n, LANES):
        some = min(LANES, channel + n - c)
        begin = at_stored + c * before
        triples = before == 3 and some == LANES
        if triples:
            for tap, x in enumerate(load_triples(stored, begin)):
                store(lines, tap * LANES, x)
        else:
            lines[:] = 0
            for lane in range(some):
                for tap in range(before):
                    lines[tap * LANES + lane] = stored[begin + lane * before + tap]
        store(lines, before * LANES, load_some(inputs, at + c, some))
        total = load(lines, 0) * load(taps, c)
        for tap in range(1, before + 1):
            total = fma(load(lines, tap * LANES), load(taps, tap * row + c), total)
        store(out, c - channel, silu(total + load(taps, (before + 1) * row + c)))
        if triples:
            store_triples(stored, begin, load(lines, LANES), load(lines, 2 * LANES), load(lines, 3 * LANES))
        else:
            for lane in range(some):
                for tap in range(before):
                    stored[begin + lane * before + tap] = lines[(tap + 1) * LANES + lane]


@lean_part
def convolve_chunk(work, to, lines, inputs, first, row, n, convolution, at_stored, channel, width):
    """Convolve `n` tokens of `width` adjacent channels, whole vectors, from `channel` on; write [n, width] to `work`.

    A token's inputs begin every `row` elements from `first` on. Those before the chunk are stored at `at_stored`, or
    stand before it if that is negative. `lines` are places for n + before + 1 vectors.
    """
    taps, stored, channels, before = convolution
    tap_row = channels + LANES
    for c in range(channel, channel + width, LANES):
        for tap in range(before if at_stored >= 0 else 0):
            for lane in range(LANES):  # writes 16 lanes, of which the next ones overwrite all but the first
                store(work, lines + tap * LANES + lane, spread(stored, at_stored + (c + lane) * before + tap))
        for t in range(0 if at_stored >= 0 else -before, n):
            store(work, lines + (before + t) * LANES, load(inputs, first + t * row + c))
        bias = load(taps, (before + 1) * tap_row + c)
        for t in range(n):
            total = load(work, lines + t * LANES) * load(taps, c)
            for tap in range(1, before + 1):
                total = fma(load(work, lines + (t + tap) * LANES), load(taps, tap * tap_row + c), total)
            store(work, to + t * width + c - channel, silu(total + bias))


@lean_part
def keep_inputs(inputs, first, row, n, convolution, at_stored, to_stored, channel, width):
    """Store the last inputs of a chunk of `n` tokens, of the type of stored ones; for arguments see `convolve_chunk`.

    `to_stored` may be `at_stored`: inputs are read before they are written over.
    """
    _, stored, _, before = convolution
    for c in range(channel, channel + width):
        for tap in range(before):
            t = n - before + tap
            if t < 0 and at_stored >= 0:
                kept = stored[at_stored + (c + 1) * before + t]
            else:
                kept = inputs[first + t * row + c]
            stored[to_stored + c * before + tap] = kept
