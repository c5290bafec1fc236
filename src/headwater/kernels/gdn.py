"""Gated DeltaNet between the layer's two products: for slices of prompts, and for tokens of decoding sequences.

`projected` are rows [q | k | v | z | b | a], `out` rows [heads, v_width]. States and stored inputs of the convolution
begin a row of the state memory every `state_row` and `stored_row` elements. `gates` are −e^A of each head, then the
biases of the heads' steps, then the factors of their strengths. `sizes` are key heads, value heads, widths of a key and
a value, and stored inputs of a channel.
"""

from __future__ import annotations

import numpy as np
from numba import get_thread_id, prange

from headwater.kernels import delta_chunk as chunk
from headwater.kernels.compiling import kernel, lean_part
from headwater.kernels.convolution import (
    NUMBERS_PER_SLICE,
    Convolution,
    convolve_chunk,
    convolve_into,
    keep_inputs,
)
from headwater.kernels.drafts import copied, copied_inputs
from headwater.kernels.functions import L2_EPS, exp, fill_into, inverse_rms, padded, sigmoid, silu, softplus, unit_into
from headwater.kernels.one_token import delta_step
from headwater.kernels.tile import PANEL
from headwater.kernels.vectors import (
    LANES,
    fill,
    fma,
    load,
    load_some,
    spread,
    square_root,
    store,
    store_some,
    sum_lanes,
)


@kernel
def decode_into(
    out, projected, slots, firsts, drafts, states, state_row, taps, stored, stored_row, gates, norm, sizes, eps
):  # fmt: skip
    """Write what each row reads, normed and gated; update the states of its slot in place.

    Rows from `firsts[s]` until `firsts[s + 1]` are tokens of one sequence, in order, which is in row `slots[s]` of the
    state memory; those from `drafts[s]` on do not advance it.
    """
    key_heads, value_heads, k_width, v_width, before = sizes
    keys, values, shared = key_heads * k_width, value_heads * v_width, value_heads // key_heads
    channels = 2 * keys + values
    row = channels + values + 2 * value_heads
    for task in prange(len(slots) * key_heads):
        sequence = task // key_heads
        group = task - sequence * key_heads
        of_states, of_stored = slots[sequence] * state_row, slots[sequence] * stored_row
        convolution = Convolution(taps, stored, channels, before)
        query, key = np.empty(padded(k_width), np.float32), np.empty(padded(k_width), np.float32)
        decay = np.empty(padded(k_width), np.float32)
        value, read = np.empty(padded(v_width), np.float32), np.empty(padded(v_width), np.float32)
        heads = states
        for i in range(firsts[sequence], firsts[sequence + 1]):
            if i == drafts[sequence]:
                of_group = group * shared * k_width * v_width
                heads, of_states = copied(states, of_states + of_group, shared * k_width * v_width), -of_group
                ranges = (
                    (group * k_width, k_width),
                    (keys + group * k_width, k_width),
                    (2 * keys + group * shared * v_width, shared * v_width),
                )
                convolution, of_stored = copied_inputs(convolution, of_stored, ranges), 0
            first = i * row
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
                strength = sigmoid(spread(projected, b)) * spread(gates, 2 * value_heads + head)
                delta_step(heads, at, k_width, v_width, query, key, decay, value, strength, read)
                factor = inverse_rms(read, 0, v_width, eps)
                at, z = (i * value_heads + head) * v_width, first + channels + head * v_width
                for c in range(0, v_width, LANES):
                    some = min(LANES, v_width - c)
                    gate = silu(load_some(projected, z + c, some))
                    store_some(out, at + c, load(read, c) * factor * load(norm, c) * gate, some)


@lean_part
def _finish_chunk(out, work, at, unread, n, projected, z, row, norm, first, out_row, v_width, eps):
    """Norm and gate what a head's tokens from `unread` on read; write it to rows of `out`; row 0 is at `first`."""
    for i in range(unread, n):
        total = fill(np.float32(0))
        for c in range(0, v_width, LANES):
            read = load(work, at.read + (c // PANEL * chunk.TOKENS + i) * PANEL + c % PANEL)
            total = fma(read, read, total)
            store(work, at.lines + c, read)
        mean = fill(sum_lanes(total)) / fill(np.float32(v_width))
        factor = fill(np.float32(1)) / square_root(mean + fill(np.float32(eps)))
        for c in range(0, v_width, LANES):
            gate = silu(load(projected, z + i * row + c))
            store(out, first + i * out_row + c, load(work, at.lines + c) * factor * load(norm, c) * gate)


@lean_part
def _save_chunk(
    work, at, n, projected, begin, row, states, of_state, convolution, at_stored, of_stored, group, sizes
):  # fmt: skip
    """Copy a group's states and last inputs to the row of the state memory whose states and inputs begin there."""
    key_heads, value_heads, k_width, v_width, _ = sizes
    shared, keys = value_heads // key_heads, key_heads * k_width
    panels = (v_width + PANEL - 1) // PANEL * PANEL
    for i in range(shared):
        to = of_state + (group * shared + i) * k_width * v_width
        chunk.store_state(work, at.states + i * k_width * panels, states, to, k_width, v_width)
    for channel, width in (
        (group * k_width, k_width),
        (keys + group * k_width, k_width),
        (2 * keys + group * shared * v_width, shared * v_width),
    ):
        keep_inputs(projected, begin, row, n, convolution, at_stored, of_stored, channel, width)


@lean_part
def _write_unit_rows(
    work, to, lines, first, n, rows, projected, begin, row, convolution, at_stored, channel, width, scale
):  # fmt: skip
    """Write queries or keys from row `first` of a chunk on, and zeros in rows beyond its `n` tokens."""
    some = to + first * width
    convolve_chunk(
        work, some, lines, projected, begin + first * row, row, n - first, convolution, -1 if first else at_stored,
        channel, width,
    )  # fmt: skip
    chunk.unit_rows(work, some, n - first, width, scale)
    chunk.clear(work, to + n * width, (rows - n) * width)


@lean_part
def _prefill_group(
    out, projected, ragged, index, group, states, state_row, convolution, stored_row, gates, norm, sizes, eps,
    work, at,
):  # fmt: skip
    """Compute the heads that share a key head for one slice, chunk by chunk."""
    of_slice = NUMBERS_PER_SLICE * index
    first, length, slot = ragged[of_slice], ragged[of_slice + 1], ragged[of_slice + 2]
    unread_rows, saves = ragged[of_slice + 3], ragged[of_slice + 4]
    key_heads, value_heads, k_width, v_width, _ = sizes
    keys, values, shared = key_heads * k_width, value_heads * v_width, value_heads // key_heads
    row = 2 * keys + 2 * values + 2 * value_heads
    of_state = k_width * ((v_width + PANEL - 1) // PANEL * PANEL)
    chunk.clear(work, at.attend, 2 * chunk.SQUARE)
    for i in range(shared):
        of_head = slot * state_row + (group * shared + i) * k_width * v_width
        chunk.load_state(work, at.states + i * of_state, states, of_head, k_width, v_width)
    for c in range((length + chunk.TOKENS - 1) // chunk.TOKENS):
        n = min(chunk.TOKENS, length - c * chunk.TOKENS)
        rows = (n + chunk.HEIGHT - 1) // chunk.HEIGHT * chunk.HEIGHT
        token = first + c * chunk.TOKENS
        begin, at_stored = token * row, slot * stored_row if c == 0 else -1
        unread = min(rows - chunk.HEIGHT, unread_rows // chunk.HEIGHT * chunk.HEIGHT) if c == 0 else 0
        unread = unread if unread >= convolution.before else 0  # the first query's inputs stand before it
        of_keys = keys + group * k_width
        _write_unit_rows(
            work, at.query, at.lines, unread, n, rows, projected, begin, row, convolution, at_stored,
            group * k_width, k_width, k_width**-0.5,
        )  # fmt: skip
        _write_unit_rows(
            work, at.key, at.lines, 0, n, rows, projected, begin, row, convolution, at_stored, of_keys, k_width, 1.0
        )
        chunk.write_dots(work, at, unread, rows, k_width)
        for i in range(shared):
            head = group * shared + i
            convolve_chunk(
                work, at.value, at.lines, projected, begin, row, n, convolution, at_stored,
                2 * keys + head * v_width, v_width,
            )  # fmt: skip
            chunk.clear(work, at.value + n * v_width, (rows - n) * v_width)
            b = begin + 2 * keys + 2 * values + head
            chunk.write_gates(work, at, projected, b, row, n, gates, head, value_heads)
            chunk.write_pairs(work, at, n, rows)
            chunk.advance(work, at, at.states + i * of_state, unread, rows, k_width, v_width)
            z, to = begin + 2 * keys + values + head * v_width, token * values + head * v_width
            _finish_chunk(out, work, at, unread, n, projected, z, row, norm, to, values, v_width, eps)
        for i in range(ragged[saves + c], ragged[saves + c + 1]):
            _save_chunk(
                work, at, n, projected, begin, row, states, ragged[i] * state_row, convolution, at_stored,
                ragged[i] * stored_row, group, sizes,
            )  # fmt: skip


@kernel
def prefill_into(
    out, projected, ragged, slices, states, state_row, taps, stored, stored_row, gates, norm, sizes, eps, memory,
    of_thread,
):  # fmt: skip
    """Write what the rows of slices read, normed and gated; update the states of their slots and the rows of saves.

    `ragged` describes the slices (`ragged_of` in `mixers/cpu/recurrent.py`). Widths are whole vectors.
    `memory` has `of_thread` elements for each thread, see `delta_chunk.floats_of`.
    """
    key_heads, value_heads, k_width, v_width, before = sizes
    for task in prange(slices * key_heads):
        index = np.int64(task)
        convolution = Convolution(taps, stored, 2 * key_heads * k_width + value_heads * v_width, before)
        at = chunk.places_from(np.int64(get_thread_id()) * of_thread, k_width, v_width, before)
        _prefill_group(
            out, projected, ragged, index % slices, index // slices, states, state_row, convolution, stored_row,
            gates, norm, sizes, eps, memory, at,
        )  # fmt: skip
