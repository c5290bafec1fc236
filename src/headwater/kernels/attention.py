"""Attention of decoding rows over keys and values in place: pages of the arena, or rings of windows.

A sequence's keys are cut into splits of 128 at absolute positions. One thread computes a split: scores, their maximum,
weights, and the weighted values. A second pass combines a row's splits in order. So a row's bits depend only on its
sequence. Queries that share a KV head are computed together, four at a time, over keys that are read once.

Arrays are flat, see `arrays.py`. B rows, T pages of a table, H query heads, G KV heads, Q = H / G queries that share
one, rounded up to four in scratch, D channels of a key, V of a value. A token's keys are [G, D], its values [G, V].
"""

from __future__ import annotations

import numpy as np
from numba import prange

from headwater.kernels.compiling import kernel, part
from headwater.kernels.functions import exp, sigmoid
from headwater.kernels.vectors import (
    LANES,
    fill,
    fma,
    load,
    max_lanes,
    maximum,
    prefetch,
    square_root,
    store,
    sum_lanes,
)

SPLIT = 128  # keys
QUERY_GROUP = 4  # queries that are computed together
PREFETCH_KEYS = 8  # distance between the key that is read and the one that is prefetched
SPARE_KEYS = PREFETCH_KEYS + 4  # entries after the last key of a split that are read without effect, or prefetched
MIN_PARALLEL_HEADS = 64  # that one thread places faster than several threads do
MIN_SCORE = np.float32(-1e30)  # below all scores


@part
def _write_scores(score, q, at, keys, row_at, n, width):
    """Write the products of four queries, which begin at `at`, and n keys, two at a time: [4, 128]."""
    at_0, at_1, at_2, at_3 = at
    for i in range(0, n, 2):
        row_a, row_b = row_at[i], row_at[i + 1]
        zero = fill(np.float32(0))
        a_0, a_1, a_2, a_3 = zero, zero, zero, zero
        b_0, b_1, b_2, b_3 = zero, zero, zero, zero
        for d in range(0, width, LANES):
            key_a, key_b = load(keys, row_a + d), load(keys, row_b + d)
            prefetch(keys, row_at[i + PREFETCH_KEYS] + d)
            prefetch(keys, row_at[i + PREFETCH_KEYS + 1] + d)
            query = load(q, at_0 + d)
            a_0, b_0 = fma(query, key_a, a_0), fma(query, key_b, b_0)
            query = load(q, at_1 + d)
            a_1, b_1 = fma(query, key_a, a_1), fma(query, key_b, b_1)
            query = load(q, at_2 + d)
            a_2, b_2 = fma(query, key_a, a_2), fma(query, key_b, b_2)
            query = load(q, at_3 + d)
            a_3, b_3 = fma(query, key_a, a_3), fma(query, key_b, b_3)
        score[i], score[i + 1] = sum_lanes(a_0), sum_lanes(b_0)
        score[SPLIT + i], score[SPLIT + i + 1] = sum_lanes(a_1), sum_lanes(b_1)
        score[2 * SPLIT + i], score[2 * SPLIT + i + 1] = sum_lanes(a_2), sum_lanes(b_2)
        score[3 * SPLIT + i], score[3 * SPLIT + i + 1] = sum_lanes(a_3), sum_lanes(b_3)


@part
def _weigh(score, first, n):
    """Replace n scores by e^(score - maximum), later ones of their last vector by 0; return maximum and sum."""
    end = first + (n + LANES - 1) // LANES * LANES
    for i in range(first + n, end):
        score[i] = MIN_SCORE
    best = fill(MIN_SCORE)
    for i in range(first, end, LANES):
        best = maximum(best, load(score, i))
    highest = max_lanes(best)
    for i in range(first, end, LANES):
        store(score, i, exp(load(score, i) - fill(highest)))
    for i in range(first + n, end):
        score[i] = np.float32(0)
    total = fill(np.float32(0))
    for i in range(first, end, LANES):
        total = total + load(score, i)
    return highest, sum_lanes(total)


@part
def _write_read(read, to, weight, values, row_at, n, width):
    """Write the sums of n values, by the weights of four queries, from `to` on: [4, V]."""
    for d in range(to, to + QUERY_GROUP * width, LANES):
        store(read, d, fill(np.float32(0)))
    for i in range(0, n, 4):
        row_0, row_1, row_2, row_3 = row_at[i], row_at[i + 1], row_at[i + 2], row_at[i + 3]
        a_0, a_1, a_2, a_3 = fill(weight[i]), fill(weight[i + 1]), fill(weight[i + 2]), fill(weight[i + 3])
        w = SPLIT + i
        b_0, b_1, b_2, b_3 = fill(weight[w]), fill(weight[w + 1]), fill(weight[w + 2]), fill(weight[w + 3])
        w = 2 * SPLIT + i
        c_0, c_1, c_2, c_3 = fill(weight[w]), fill(weight[w + 1]), fill(weight[w + 2]), fill(weight[w + 3])
        w = 3 * SPLIT + i
        d_0, d_1, d_2, d_3 = fill(weight[w]), fill(weight[w + 1]), fill(weight[w + 2]), fill(weight[w + 3])
        for at in range(0, width, LANES):
            v_0, v_1 = load(values, row_0 + at), load(values, row_1 + at)
            v_2, v_3 = load(values, row_2 + at), load(values, row_3 + at)
            for k in range(4):
                prefetch(values, row_at[i + PREFETCH_KEYS + k] + at)
            to_0 = to + at
            store(read, to_0, fma(a_3, v_3, fma(a_2, v_2, fma(a_1, v_1, fma(a_0, v_0, load(read, to_0))))))
            to_1 = to_0 + width
            store(read, to_1, fma(b_3, v_3, fma(b_2, v_2, fma(b_1, v_1, fma(b_0, v_0, load(read, to_1))))))
            to_2 = to_1 + width
            store(read, to_2, fma(c_3, v_3, fma(c_2, v_2, fma(c_1, v_1, fma(c_0, v_0, load(read, to_2))))))
            to_3 = to_2 + width
            store(read, to_3, fma(d_3, v_3, fma(d_2, v_2, fma(d_1, v_1, fma(d_0, v_0, load(read, to_3))))))


@part
def _write_rows(row_at, table, first, n, page_size, page_row, width, base):
    """Write the places of n keys from token `first` of a table on, and after them the first one's again."""
    for i in range(n):
        token = first + i
        row_at[i] = table[token // page_size] * page_row + token % page_size * width + base
    for i in range(n, n + SPARE_KEYS):
        row_at[i] = row_at[0]


@part
def _attend_to_split(q, at_q, sharing, keys, values, k_at, v_at, n, k_width, v_width, highest_sum, reads, item):
    """Attend from the queries of one KV head, [Q, D] from `at_q` on, to one split."""
    score = np.empty(QUERY_GROUP * SPLIT, np.float32)
    slots = (sharing + QUERY_GROUP - 1) // QUERY_GROUP * QUERY_GROUP
    for first in range(0, sharing, QUERY_GROUP):
        last = sharing - 1  # of fewer than four queries the last one is computed again
        offsets = (
            at_q + first * k_width,
            at_q + min(first + 1, last) * k_width,
            at_q + min(first + 2, last) * k_width,
            at_q + min(first + 3, last) * k_width,
        )
        _write_scores(score, q, offsets, keys, k_at, n, k_width)
        for i in range(QUERY_GROUP):
            to = item * slots + first + i
            highest_sum[2 * to], highest_sum[2 * to + 1] = _weigh(score, i * SPLIT, n)
        _write_read(reads, (item * slots + first) * v_width, score, values, v_at, n, v_width)


@part
def _combine(highest_sum, reads, first, n, step, width, sinks, head):
    """Combine what one query read in n splits, `step` apart, into the first of them; return 1 / the sum.

    The head's sink, if there are sinks, is a split with a sum of 1 and nothing read.
    """
    highest = highest_sum[2 * first]
    for i in range(1, n):
        highest = max(highest, highest_sum[2 * (first + i * step)])
    total = fill(np.float32(0))
    if len(sinks):
        highest = max(highest, sinks[head])
        total = exp(fill(sinks[head] - highest))
    for i in range(n):
        at = first + i * step
        weight = exp(fill(highest_sum[2 * at] - highest))
        total = fma(weight, fill(highest_sum[2 * at + 1]), total)
        for d in range(0, width, LANES):
            own = weight * load(reads, at * width + d)
            store(reads, first * width + d, own if i == 0 else load(reads, first * width + d) + own)
    return fill(np.float32(1)) / total


@part
def _normed_and_rotated(to, x, at, norm, eps, cos_sin, at_angle, half, neighbours, width):
    """Write one head in float32: normed if `norm` has weights, its first 2 · half channels rotated."""
    inverse = fill(np.float32(1))
    if len(norm):
        total = fill(np.float32(0))
        for d in range(0, width, LANES):
            total = fma(load(x, at + d), load(x, at + d), total)
        inverse = inverse / square_root(fill(sum_lanes(total) / np.float32(width) + np.float32(eps)))
    for d in range(0, width, LANES):
        head = load(x, at + d)
        store(to, d, head * inverse * load(norm, d) if len(norm) else head)
    step, apart = (2, 1) if neighbours else (1, half)
    for i in range(half):
        cos, sin = cos_sin[at_angle + i], cos_sin[at_angle + half + i]
        a, b = to[i * step], to[i * step + apart]
        to[i * step] = a * cos - b * sin
        to[i * step + apart] = b * cos + a * sin


@part
def _place_head(
    index, x, keys, values, q, positions, tables, q_norm, k_norm, cos_sin,
    heads, kv_heads, width, x_row, q_step, half, neighbours, eps, scale, page_size, page_row, table_row,
):  # fmt: skip
    """Write one query, or one key with its value."""
    row, head = index // (heads + kv_heads), index % (heads + kv_heads)
    at_angle = positions[row] * 2 * half
    placed = np.empty(width, np.float32)
    if head < heads:
        at = row * x_row + head * q_step
        _normed_and_rotated(placed, x, at, q_norm, eps, cos_sin, at_angle, half, neighbours, width)
        for d in range(0, width, LANES):
            store(q, (row * heads + head) * width + d, load(placed, d) * fill(np.float32(scale)))
        return
    group = head - heads
    at = row * x_row + heads * q_step + group * width
    _normed_and_rotated(placed, x, at, k_norm, eps, cos_sin, at_angle, half, neighbours, width)
    token = positions[row] % (table_row * page_size)
    to = tables[row * table_row + token // page_size] * page_row
    to += (token % page_size * kv_heads + group) * width
    for d in range(0, width, LANES):
        store(keys, to + d, load(placed, d))
        store(values, to + d, load(x, at + kv_heads * width + d))


@kernel
def place(
    x, keys, values, q, positions, tables, q_norm, k_norm, cos_sin,
    heads, kv_heads, width, x_row, q_step, half, neighbours, eps, scale, page_size, page_row, table_row,
):  # fmt: skip
    """Norm and rotate queries and keys of rows; write queries [B, H, D], scaled, in float32, and keys and values.

    A row of `x` is the layer's projections: H queries, `q_step` apart, G keys, G values. A row's pages hold its
    last keys: the place of one is its position modulo the tokens of all pages. Without norms their weights are
    empty; without rotation `half` is 0.
    """
    n = len(positions) * (heads + kv_heads)
    if n < MIN_PARALLEL_HEADS:
        for index in range(n):
            _place_head(
                index, x, keys, values, q, positions, tables, q_norm, k_norm, cos_sin,
                heads, kv_heads, width, x_row, q_step, half, neighbours, eps, scale, page_size, page_row, table_row,
            )  # fmt: skip
    else:
        for index in prange(n):
            _place_head(
                np.int64(index), x, keys, values, q, positions, tables, q_norm, k_norm, cos_sin,
                heads, kv_heads, width, x_row, q_step, half, neighbours, eps, scale, page_size, page_row, table_row,
            )  # fmt: skip


@kernel
def attend(
    q, keys, values, tables, positions, gates, sinks, out, highest_sum, reads,
    heads, kv_heads, k_width, v_width, page_size, page_row, table_row, first_key, gate_row, gate_head, out_row,
):  # fmt: skip
    """Attend from each row's queries [H, D] (scaled, float32) to the keys up to its position; write the reads, [H, V].

    `tables` are [B, T] pages of the last keys; keys before `first_key`, which is in the first split, are not seen.
    `gates`, of which sigmoids multiply the reads, and `sinks`, a logit of each head, may be empty.
    `highest_sum` and `reads` are scratch: 2 and V floats for each split of each KV head and each of its queries.
    """
    n, sharing, most = len(positions), heads // kv_heads, table_row * page_size
    slots = (sharing + QUERY_GROUP - 1) // QUERY_GROUP * QUERY_GROUP
    first_item = np.zeros(n + 1, np.int64)
    for row in range(n):
        first_item[row + 1] = first_item[row] + kv_heads * ((min(positions[row] + 1, most) + SPLIT - 1) // SPLIT)
    for item in prange(first_item[n]):
        row = 0
        while first_item[row + 1] <= item:
            row += 1
        splits = (first_item[row + 1] - first_item[row]) // kv_heads
        group, split = (item - first_item[row]) // splits, (item - first_item[row]) % splits
        end = min((split + 1) * SPLIT, min(positions[row] + 1, most))
        first = max(split * SPLIT, first_key)
        n_keys = end - first
        table = tables[row * table_row : (row + 1) * table_row]
        k_at, v_at = np.empty(SPLIT + SPARE_KEYS, np.int64), np.empty(SPLIT + SPARE_KEYS, np.int64)
        _write_rows(k_at, table, first, n_keys, page_size, page_row, kv_heads * k_width, group * k_width)
        _write_rows(v_at, table, first, n_keys, page_size, page_row, kv_heads * k_width, group * v_width)
        at_q = (row * heads + group * sharing) * k_width
        _attend_to_split(
            q, at_q, sharing, keys, values, k_at, v_at, n_keys, k_width, v_width, highest_sum, reads, np.int64(item)
        )  # fmt: skip
    for row_head in prange(n * heads):
        row, head = row_head // heads, row_head % heads
        group = head // sharing
        splits = (first_item[row + 1] - first_item[row]) // kv_heads
        first = (first_item[row] + group * splits) * slots + head % sharing
        inverse = _combine(highest_sum, reads, first, splits, slots, v_width, sinks, head)
        for d in range(0, v_width, LANES):
            read = load(reads, first * v_width + d) * inverse
            if len(gates):
                read = read * sigmoid(load(gates, row * gate_row + head * gate_head + d))
            store(out, row * out_row + head * v_width + d, read)
