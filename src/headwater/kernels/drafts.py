"""Copies of a thread's states and stored inputs, which the drafted rows of a sequence advance in place of its own.

A decode kernel goes through a sequence's rows in order. Rows before `drafts[s]` advance the state memory; from that row
on they advance a copy, which ends with the kernel.
"""

from __future__ import annotations

import numpy as np

from headwater.kernels.compiling import part
from headwater.kernels.convolution import Convolution


@part
def copied(states, at, n):
    """Return a copy of `n` elements from `at` on."""
    copy = np.empty(n, states.dtype)
    for i in range(n):
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
