"""The gated delta rule of one chunk of at most 64 tokens and one value head, in the form of `mixers/gdn.py`.

    E  = (I + A)⁻¹ (β V − β e^G K S)        the corrections
    O  = e^G Q S + (Q Kᵀ ∘ D) E
    S' = e^(G_n) S + (e^(G_n − G) K)ᵀ E

Here E is solved for row by row, so that no inverse is computed. All sums are chains over tokens, or over key channels,
in their order: a token's bits depend neither on later tokens of its chunk nor on other heads.

All that a chunk needs is in one array, the memory of its thread. Matrices with 64 columns are panels of products
(`tile.py`): those over V value channels are P = ⌈V / 64⌉ panels, with zeros beyond V. K key channels, V value channels;
both are whole vectors.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headwater.kernels.compiling import lean_part
from headwater.kernels.functions import L2_EPS, exp, sigmoid, softplus
from headwater.kernels.tile import PANEL, tile_of
from headwater.kernels.vectors import LANES, fill, fma, load, spread, square_root, store, sum_lanes

TOKENS = 64  # of a chunk, and of a panel
SQUARE = TOKENS * PANEL
HEIGHT = 4  # rows of a tile
VECTOR = TOKENS + LANES  # elements of a number for each token

_tile = tile_of(HEIGHT)


class Places(NamedTuple):
    """Places of a chunk's parts in the memory of its thread: the index of each one's first element."""

    query: int  # [64, K], of norm 1/√K
    key: int  # [64, K], of norm 1
    turned: int  # [K, 64], the keys
    dots: int  # [128, 64]: Q Kᵀ, then K Kᵀ
    attend: int  # [64, 64]: Q Kᵀ ∘ D; zeros above the diagonal
    system: int  # [64, 64]: −A, with zeros on the diagonal and above it
    value: int  # [64, V]
    read: int  # P panels of 64 tokens: O
    error: int  # P panels of 64 tokens: E
    high: int  # running sums of g within the chunk, as two float32 each
    low: int
    beta: int
    decay: int  # e^G
    rest: int  # e^(G_n − G)
    lines: int  # inputs of the convolution for 16 channels; what one token reads
    states: int  # P panels of K rows for each head


@lean_part
def places_from(first, k_width, v_width, before):
    """Return the places of a thread's memory that begins at `first`; the states, which come last, take any space."""
    panels = (v_width + PANEL - 1) // PANEL
    query = first
    key = query + TOKENS * k_width
    turned = key + TOKENS * k_width
    dots = turned + TOKENS * k_width
    attend = dots + 2 * SQUARE
    system = attend + SQUARE
    value = system + SQUARE
    read = value + TOKENS * v_width
    error = read + panels * SQUARE
    high = error + panels * SQUARE
    lines = high + 5 * VECTOR
    states = lines + (before + TOKENS) * LANES + v_width
    return Places(
        query, key, turned, dots, attend, system, value, read, error,
        high, high + VECTOR, high + 2 * VECTOR, high + 3 * VECTOR, high + 4 * VECTOR, lines, states,
    )  # fmt: skip


def floats_of(k_width: int, v_width: int, before: int, heads: int) -> int:
    """Return the elements of a thread's memory, for states of `heads` heads."""
    panels = -(-v_width // PANEL)
    of_tokens = TOKENS * (3 * k_width + v_width) + (4 + 2 * panels) * SQUARE
    return of_tokens + 5 * VECTOR + (before + TOKENS) * LANES + v_width + heads * panels * k_width * PANEL


@lean_part
def _multiply(work, rows, x_at, w_at, steps, total_at):
    """Write the product of rows, a multiple of 4, with a panel."""
    for r in range(0, rows, HEIGHT):
        _tile(work, x_at + r * steps, steps, 1, work, w_at, steps, work, total_at + r * PANEL, True)


@lean_part
def clear(work, at, n):
    """Write zeros to `n` elements, whole vectors."""
    for i in range(at, at + n, LANES):
        store(work, i, fill(np.float32(0)))


@lean_part
def unit_rows(work, at, rows, width, scale):
    """Divide each row by its norm and multiply it by `scale`, in place."""
    for r in range(at, at + rows * width, width):
        total = fill(np.float32(0))
        for c in range(r, r + width, LANES):
            total = fma(load(work, c), load(work, c), total)
        norm = square_root(fill(sum_lanes(total)) + fill(np.float32(L2_EPS)))
        factor = fill(np.float32(scale)) / norm
        for c in range(r, r + width, LANES):
            store(work, c, load(work, c) * factor)


@lean_part
def write_dots(work, at, unread, rows, k_width):
    """Write the products of keys with keys, and those of queries from row `unread` on."""
    for t in range(rows):
        for c in range(k_width):
            work[at.turned + c * PANEL + t] = work[at.key + t * k_width + c]
    _multiply(work, rows - unread, at.query + unread * k_width, at.turned, k_width, at.dots + unread * PANEL)
    _multiply(work, rows, at.key, at.turned, k_width, at.dots + SQUARE)


@lean_part
def write_gates(work, at, projected, first, row, n, gates, head, heads):
    """Write the gates of `n` tokens and what follows from them; b of a token is at `first`, a is `heads` further.

    Vectors are written for each token, of which the next one overwrites all lanes but the first.
    """
    rate, bias, strength = gates[head], gates[heads + head], gates[2 * heads + head]
    for t in range(n):
        step = softplus(spread(projected, first + t * row + heads) + fill(bias))
        store(work, at.high + t, fill(rate) * step)
        store(work, at.beta + t, sigmoid(spread(projected, first + t * row)) * fill(strength))
    for t in range(n, TOKENS):
        work[at.high + t] = 0
        work[at.beta + t] = 0
    total = 0.0  # float64: after a strong decay sums are large, and small differences between them matter
    for t in range(TOKENS):
        total += np.float64(work[at.high + t])
        high = np.float32(total)
        work[at.high + t] = high
        work[at.low + t] = np.float32(total - np.float64(high))
    last = TOKENS - 1
    for t in range(0, TOKENS, LANES):
        store(work, at.decay + t, exp(load(work, at.high + t)))
        store(work, at.rest + t, _decay_between(work, at, last, t))


@lean_part
def _decay_between(work, at, i, j):
    """Return e^(G_i − G_j) for 16 tokens j."""
    high = spread(work, at.high + i) - load(work, at.high + j)
    return exp(high + (spread(work, at.low + i) - load(work, at.low + j)))


@lean_part
def write_pairs(work, at, n, rows):
    """Write what tokens read of earlier ones' corrections: `attend` and `system`, whose upper vectors are zeros."""
    for i in range(n):
        line = i * PANEL
        strength = fill(np.float32(0)) - spread(work, at.beta + i)
        for j in range(0, i + 1, LANES):
            decay = _decay_between(work, at, i, j)
            store(work, at.attend + line + j, load(work, at.dots + line + j) * decay)
            store(work, at.system + line + j, load(work, at.dots + SQUARE + line + j) * decay * strength)
        work[at.system + line + i] = 0
        for j in range(i + 1, (i // LANES + 1) * LANES):
            work[at.attend + line + j] = 0
            work[at.system + line + j] = 0
    clear(work, at.attend + n * PANEL, (rows - n) * PANEL)
    clear(work, at.system + n * PANEL, (rows - n) * PANEL)


@lean_part
def _write_errors(work, at, error, read, unread, rows, first, v_width):
    """Turn what keys read from the state into β (v − e^G Sᵀk), and scale what queries read; of one panel."""
    for i in range(rows):
        decay, strength = spread(work, at.decay + i), spread(work, at.beta + i)
        for c in range(0, min(PANEL, v_width - first), LANES):
            to = error + i * PANEL + c
            value = load(work, at.value + i * v_width + first + c)
            store(work, to, (value - load(work, to) * decay) * strength)
            if i >= unread:
                to = read + i * PANEL + c
                store(work, to, load(work, to) * decay)


@lean_part
def _solve(work, at, error, rows):
    """Solve (I + A) E = errors in place, four rows at a time: first with all rows above them, then among them."""
    for r in range(0, rows, HEIGHT):
        _tile(work, at.system + r * PANEL, PANEL, 1, work, error, r, work, error + r * PANEL, False)
        for i in range(r + 1, r + HEIGHT):
            for j in range(r, i):
                weight = spread(work, at.system + i * PANEL + j)
                for c in range(0, PANEL, LANES):
                    to = error + i * PANEL + c
                    store(work, to, fma(weight, load(work, error + j * PANEL + c), load(work, to)))


@lean_part
def advance(work, at, states, unread, rows, k_width, v_width):
    """Advance a head's state, panels from `states` on, by a chunk; write what its tokens from `unread` on read.

    Those before it, a multiple of HEIGHT, write no output: a tail's tokens, of which only the state is needed.
    """
    for first in range(0, v_width, PANEL):
        error, read = at.error + first * TOKENS, at.read + first * TOKENS
        state = states + first * k_width
        _multiply(work, rows - unread, at.query + unread * k_width, state, k_width, read + unread * PANEL)
        _multiply(work, rows, at.key, state, k_width, error)
        _write_errors(work, at, error, read, unread, rows, first, v_width)
        _solve(work, at, error, rows)
        for r in range(unread, rows, HEIGHT):
            _tile(work, at.attend + r * PANEL, PANEL, 1, work, error, r + HEIGHT, work, read + r * PANEL, False)
        for i in range(rows):
            rest = spread(work, at.rest + i)
            for c in range(error + i * PANEL, error + (i + 1) * PANEL, LANES):
                store(work, c, load(work, c) * rest)
        decay = spread(work, at.decay + TOKENS - 1)
        for c in range(state, state + k_width * PANEL, LANES):
            store(work, c, load(work, c) * decay)
        for i in range(0, k_width, HEIGHT):
            _tile(work, at.key + i, 1, k_width, work, error, rows, work, state + i * PANEL, False)


@lean_part
def load_state(work, to, states, first, k_width, v_width):
    """Copy a head's state [K, V] from the state memory to panels, with zeros beyond V."""
    for i in range(k_width):
        for c in range(0, (v_width + PANEL - 1) // PANEL * PANEL, LANES):
            place = to + c // PANEL * PANEL * k_width + i * PANEL + c % PANEL
            store(work, place, load(states, first + i * v_width + c) if c < v_width else fill(np.float32(0)))


@lean_part
def store_state(work, at, states, first, k_width, v_width):
    """Copy a head's state from panels to the state memory."""
    for i in range(k_width):
        for c in range(0, v_width, LANES):
            place = at + c // PANEL * PANEL * k_width + i * PANEL + c % PANEL
            store(states, first + i * v_width + c, load(work, place))
