"""Rows of drafts that a step computes again, and copies of states that drafts advance.

A decode kernel goes through a sequence's rows in order. Rows before `drafts[s]` advance the state memory; from that row
on they advance a copy, which ends with the kernel.
"""

from __future__ import annotations

import numpy as np

from headwater.kernels.compiling import part, serial_kernel
from headwater.kernels.convolution import Convolution
from headwater.kernels.recording import IDLE
from headwater.kernels.vectors import LANES, LINE, copy_line, load, store


@part
def copied(states, at, n):
    """Return a copy of `n` elements of float32 from `at` on."""
    copy = np.empty(n, states.dtype)
    whole = n // LANES * LANES
    for i in range(0, whole, LANES):
        store(copy, i, load(states, at + i))
    for i in range(whole, n):
        copy[i] = states[at + i]
    return copy


@part
def copied_inputs(convolution, at_stored, ranges):
    """Return a convolution with a copy of one sequence's stored inputs, which begin at 0, of ranges of channels.

    `ranges` are pairs: a first channel, and how many. Inputs of other channels are undefined.
    """
    taps, stored, channels, before = convolution
    copy = np.empty(channels * before, stored.dtype)
    for first, n in ranges:
        for i in range(first * before, (first + n) * before):
            copy[i] = stored[at_stored + i]
    return Convolution(taps, copy, channels, before)


@part
def _copy_row(out, to, array, at, width):
    """Copy `width` bytes: numba copies slices byte by byte."""
    whole = width // LINE * LINE
    for i in range(0, whole, LINE):
        copy_line(out, to + i, array, at + i)
    for i in range(whole, width):
        out[to + i] = array[at + i]


@serial_kernel
def gather_into(out, rows, row, kept, sources, keeps, width):
    """Write rows of `width` bytes one after the other; then keep some. `sources` and `keeps` are int64.

    Row i of `out` is row `sources[i]` of `rows`, which begin `row` bytes apart, or, of a negative number, kept row
    -1 - `sources[i]`; of IDLE it stays as it is. Row i of `rows` becomes kept row `keeps[i]`, unless that is negative.
    """
    for i in range(len(sources)):
        source = sources[i]
        if source >= 0:
            _copy_row(out, i * width, rows, source * row, width)
        elif source != IDLE:
            _copy_row(out, i * width, kept, (-1 - source) * width, width)
    for i in range(len(keeps)):
        if keeps[i] >= 0:
            _copy_row(kept, keeps[i] * width, rows, i * row, width)
