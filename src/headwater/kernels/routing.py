"""Routing: each row's experts with their weights, the rows in the order of experts, and the sum of what experts give.

A row's choice and sum depend only on the row; among experts of equal rank the first is chosen. N rows, J experts a
row, E experts, R = N · J rows of experts, X channels. Arrays are flat, see `arrays.py`.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from headwater.kernels.compiling import kernel, part
from headwater.kernels.functions import copy_into, exp, padded, sigmoid
from headwater.kernels.vectors import LANES, fill, load, load_some, max_lanes, maximum, store, store_some, sum_lanes

SOFTMAX, SIGMOID = range(2)  # scores of logits
LOWEST = np.float32(-np.inf)
ONE = np.float32(1)


@part
def _softmax(score, n):
    """Replace n logits, in whole vectors padded with zeros, by their softmax."""
    for i in range(n, len(score)):
        score[i] = LOWEST
    best = fill(LOWEST)
    for c in range(0, len(score), LANES):
        best = maximum(best, load(score, c))
    highest, total = fill(max_lanes(best)), fill(np.float32(0))
    for c in range(0, len(score), LANES):
        store(score, c, exp(load(score, c) - highest))
    for i in range(n, len(score)):
        score[i] = np.float32(0)
    for c in range(0, len(score), LANES):
        total = total + load(score, c)
    whole = fill(sum_lanes(total))
    for c in range(0, len(score), LANES):
        store(score, c, load(score, c) / whole)


@part
def _best(rank, first, end):
    """Return the index of the largest, the first of equal ones."""
    best = first
    for i in range(first + 1, end):
        if rank[i] > rank[best]:
            best = i
    return best


@part
def _leave_best_groups(rank, n, groups, groups_per_token):
    """Set ranks outside the best groups to -inf; a group's rank is the sum of its two best experts'."""
    size = n // groups
    of_group = np.empty(groups, np.float32)
    for g in range(groups):
        first = _best(rank, g * size, (g + 1) * size)
        total, highest = rank[first], LOWEST
        for i in range(g * size, (g + 1) * size):
            if i != first:
                highest = max(highest, rank[i])
        of_group[g] = total if size == 1 else total + highest
    stays = np.zeros(groups, np.bool_)
    for _ in range(groups_per_token):
        g = _best(of_group, 0, groups)
        stays[g], of_group[g] = True, LOWEST
    for i in range(n):
        if not stays[i // size]:
            rank[i] = LOWEST


@part
def _choose(weight, expert, at, score, rank, n, per_token, normalises, epsilon, scale):
    """Write the experts of the largest ranks, the first choice first, and their weights."""
    total = np.float32(0)
    for j in range(at, at + per_token):
        e = _best(rank, 0, n)
        expert[j], weight[j], rank[e] = e, score[e], LOWEST
        total += score[e]
    if normalises:
        total += epsilon
        for j in range(at, at + per_token):
            weight[j] = weight[j] / total
    for j in range(at, at + per_token):
        weight[j] *= scale


@kernel
def choose_into(
    weight, expert, logits, row, rows, n, scores, correction, groups, best_groups, per_token, normalises, epsilon, scale
):
    """Write each row's weights and experts, [N, J], from the router's logits: see `mixers.feed_forward.Router`."""
    for r in prange(rows):
        score, rank = np.zeros(padded(n), np.float32), np.empty(n, np.float32)
        copy_into(score, logits, r * row, n, ONE)
        if scores == SOFTMAX:
            _softmax(score, n)
        else:
            for c in range(0, len(score), LANES):
                store(score, c, sigmoid(load(score, c)))
        for i in range(n):
            rank[i] = score[i] + correction[i] if len(correction) else score[i]
        if groups > 1:
            _leave_best_groups(rank, n, groups, best_groups)
        at, epsilon_32 = r * per_token, np.float32(epsilon)
        _choose(weight, expert, at, score, rank, n, per_token, normalises, epsilon_32, np.float32(scale))


@kernel
def gather_into(rows_of_experts, place, begins, chosen, expert, rows, per_token, n, x, row, width):
    """Put rows in the order of experts: copies of x [R, X], and of each row's experts the place of its copy, [N, J].

    `begins`, [E + 1], tells where each expert's rows begin; `chosen` has the experts with rows, and first their number.
    """
    for e in range(n + 1):
        begins[e] = 0
    for i in range(rows * per_token):
        begins[expert[i] + 1] += 1
    chosen[0] = 0
    for e in range(n):
        if begins[e + 1]:
            chosen[0] += 1
            chosen[chosen[0]] = e
        begins[e + 1] += begins[e]
    written = np.zeros(n, np.int64)
    for i in range(rows * per_token):
        place[i] = begins[expert[i]] + written[expert[i]]
        written[expert[i]] += 1
    for i in prange(rows * per_token):
        rows_of_experts[place[i] * width : (place[i] + 1) * width] = x[
            i // per_token * row : i // per_token * row + width
        ]


@kernel
def order_into(ordered, x, row, order, begins, n, width):
    """Put each row's inputs in the order in which its expert's weight has them, `order` [E, K]: copies of x [R, K]."""
    for e in prange(n):
        for r in range(begins[e], begins[e + 1]):
            for k in range(width):
                ordered[r * width + k] = x[r * row + order[e * width + k]]


@kernel
def add_into(out, routed, row, weight, place, rows, per_token, width):
    """Write the sum of what each row's experts gave, by their weights, in the order of choice: [N, X]."""
    for r in prange(rows):
        for c in range(0, width, LANES):
            some, total = min(LANES, width - c), fill(np.float32(0))
            for j in range(r * per_token, (r + 1) * per_token):
                total = total + load_some(routed, place[j] * row + c, some) * fill(weight[j])
            store_some(out, r * width + c, total, some)
