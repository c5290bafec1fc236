"""The short causal convolution of one decoded token: depthwise, with silu; its last inputs are part of the state."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from headwater.kernels.compiling import part
from headwater.kernels.functions import silu
from headwater.kernels.vectors import LANES, fma, load, load_some, load_triples, store, store_triples


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
