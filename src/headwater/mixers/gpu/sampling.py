"""Tokens of a step's rows in Triton: the largest logits, or draws after temperature, top-k, top-p and min-p.

A program takes one row, so that a row's token depends only on its logits and parameters. Weights exp((x − max) / T)
are integers, of which the largest is 2³¹: their sums are the same in every order. Tokens that top-k and top-p leave are
those from a threshold on, which is found by counting and weighing the tokens above several candidates at a time.

R rows, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192  # logits that a program reads at a time, each once
COUNTED = 1024  # the same, if it compares them with candidates
CANDIDATES = 8  # for a threshold
LEVELS = 8
GATHERED = 4096  # tokens that are gathered at most
WARPS = 16
HEAVIEST = tl.constexpr(2147483648.0)  # weight of the most likely token
WEIGHTLESS = tl.constexpr(22.0)  # exp(-22) · 2³¹ is less than 1
LOWEST = tl.constexpr(-2147483648)  # below all keys


class Draw(NamedTuple):
    """Rules by which a row's token is chosen. A temperature of 0 takes the first of the largest logits."""

    row: int  # among the rows of the logits
    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.0  # in [0, 1)


@triton.jit
def _key(x):
    """Return an integer in the order of float32 numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _logit(key):
    """Return the float32 number of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, largest, temperature):
    return (tl.exp((x - largest) / temperature) * HEAVIEST).to(tl.int64)


@triton.jit
def _from(logits, size, largest, temperature, key_C, counted: tl.constexpr, candidates: tl.constexpr):
    """Return how many tokens have at least each of some keys, and their weight, int64."""
    count_BC = tl.zeros((counted, candidates), tl.int32)
    weight_BC = tl.zeros((counted, candidates), tl.int64)
    for first in range(0, size, counted):
        token = first + tl.arange(0, counted)
        x = tl.load(logits + token, mask=token < size, other=float("-inf"))
        from_key = (_key(x).to(tl.int64)[:, None] >= key_C[None, :]) & (token < size)[:, None]
        count_BC += from_key.to(tl.int32)
        weight_BC += tl.where(from_key, _weight(x, largest, temperature)[:, None], 0)
    return tl.sum(count_BC, 0).to(tl.int64), tl.sum(weight_BC, 0)


@triton.jit
def _threshold(
    logits, size, largest, temperature, lowest, wanted, counts: tl.constexpr, counted: tl.constexpr,
    candidates: tl.constexpr,
):  # fmt: skip
    """Return the largest key from which on tokens are as many as `wanted`, or weigh as much; at least `lowest`.

    It is not below the key at which tokens weigh nothing.
    """
    index = tl.arange(0, candidates)
    low = tl.maximum(lowest, _key(largest - WEIGHTLESS * temperature).to(tl.int64))
    high = _key(largest).to(tl.int64)
    while low < high:
        step = (high - low + candidates - 1) // candidates
        key_C = tl.minimum(low + (index + 1) * step, high)
        count_C, weight_C = _from(logits, size, largest, temperature, key_C, counted, candidates)
        enough = (count_C >= wanted) if counts else (weight_C >= wanted)
        n_enough = tl.sum(enough.to(tl.int32), 0)
        too_high = tl.minimum(low + (n_enough + 1) * step, high)
        high = tl.where(n_enough == candidates, high, too_high - 1)
        low = tl.max(tl.where(enough, key_C, low), 0)
    return low


@triton.jit
def _gather(logits, size, least, gathered, gathered_token, block: tl.constexpr):
    """Copy the logits of tokens that have at least a key, and these tokens, in their order; return their number."""
    index = tl.arange(0, block)
    n = tl.full((), 0, tl.int32)
    for first in range(0, size, block):
        x = tl.load(logits + first + index, mask=first + index < size, other=float("-inf"))
        kept = (_key(x).to(tl.int64) >= least) & (first + index < size)
        n_kept = tl.sum(kept.to(tl.int32), 0)
        if n_kept > 0:
            at = n + tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(gathered + at, x, mask=kept)
            tl.store(gathered_token + at, first + index, mask=kept)
        n += n_kept
    tl.debug_barrier()  # what other threads have written is read next
    return n


@triton.jit
def _levels(largest, temperature, levels: tl.constexpr):
    """Return keys of logits that are 1.5, 3, 4.5, 6, 8, 11, 15 and 22 temperatures below the largest."""
    index = tl.arange(0, levels)
    below = tl.where(index < 4, 1.5 * (index + 1), tl.where(index < 6, 8.0 + 3 * (index - 4), 15.0 + 7 * (index - 6)))
    return _key(largest - below * temperature).to(tl.int64)


@triton.jit
def _largest(logits, size, block: tl.constexpr):
    """Return the largest logit, whether any is NaN (a count), and the first token with the largest logit."""
    index = tl.arange(0, block)
    best_B = tl.full((block,), float("-inf"), tl.float32)
    token_B = tl.zeros((block,), tl.int32)
    nan_B = tl.zeros((block,), tl.int32)
    for first in range(0, size, block):
        x = tl.load(logits + first + index, mask=first + index < size, other=float("-inf"))
        nan_B |= (x != x).to(tl.int32)
        token_B = tl.where(x > best_B, first + index, token_B)
        best_B = tl.where(x > best_B, x, best_B)
    largest, n_nan = tl.max(best_B, 0), tl.sum(nan_B, 0)
    return largest, n_nan, tl.min(tl.where(best_B == largest, token_B, size), 0)


@triton.jit
def _top_k(logits, size, largest, temperature, lowest, top_k, counted: tl.constexpr, candidates: tl.constexpr):
    """Return the key of the lowest of the `top_k` largest logits, and how many tokens with that key top-k leaves."""
    threshold = _threshold(logits, size, largest, temperature, lowest, top_k, True, counted, candidates)
    key_C = threshold + 1 + tl.zeros((candidates,), tl.int64)
    count_C, _ = _from(logits, size, largest, temperature, key_C, counted, candidates)
    return threshold, top_k - tl.max(count_C, 0)


@triton.jit
def _top_p(
    logits, size, largest, temperature, threshold, n_ties, limited, of_row, top_p, counted: tl.constexpr,
    candidates: tl.constexpr,
):  # fmt: skip
    """Return threshold and ties of the fewest tokens with `top_p` of the weight of those that top-k left."""
    all_of = of_row
    if limited:
        key_C = threshold + 1 + tl.zeros((candidates,), tl.int64)
        _, weight_C = _from(logits, size, largest, temperature, key_C, counted, candidates)
        tie = _weight(_logit(threshold.to(tl.int32)), largest, temperature)
        all_of = tl.max(weight_C, 0) + n_ties * tie
    wanted = tl.maximum(tl.ceil(top_p * all_of.to(tl.float64)).to(tl.int64), 1)
    wanted = tl.minimum(wanted, all_of)
    found = _threshold(logits, size, largest, temperature, threshold, wanted, False, counted, candidates)
    key_C = found + 1 + tl.zeros((candidates,), tl.int64)
    _, weight_C = _from(logits, size, largest, temperature, key_C, counted, candidates)
    tie = tl.maximum(_weight(_logit(found.to(tl.int32)), largest, temperature), 1)
    needed = (wanted - tl.max(weight_C, 0) + tie - 1) // tie
    return found, tl.where(found > threshold, needed, tl.minimum(needed, n_ties))


@triton.jit
def _drawn(logits, size, largest, temperature, threshold, n_ties, min_p, uniform, token, block: tl.constexpr):
    """Return the drawn token among those above the threshold and the first `n_ties` at it, with `min_p` at least."""
    index = tl.arange(0, block)
    least = tl.ceil(min_p * HEAVIEST).to(tl.int64)
    weight_B, tie_B = tl.zeros((block,), tl.int64), tl.zeros((block,), tl.int64)
    for first in range(0, size, block):
        x = tl.load(logits + first + index, mask=first + index < size, other=float("-inf"))
        key, weight = _key(x).to(tl.int64), _weight(x, largest, temperature)
        in_row = first + index < size
        weight_B += tl.where(in_row & (key > threshold) & (weight >= least), weight, 0)
        tie_B += (in_row & (key == threshold)).to(tl.int64)
    n_ties = tl.minimum(n_ties, tl.sum(tie_B, 0))
    tie = _weight(_logit(threshold.to(tl.int32)), largest, temperature)
    total = tl.sum(weight_B, 0) + tl.where(tie >= least, n_ties * tie, 0) * (n_ties > 0)
    target = tl.floor(uniform * total.to(tl.float64)).to(tl.int64)
    n_seen, before = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    token, first = token * 0 + size, 0
    while (token == size) & (first < size):
        x = tl.load(logits + first + index, mask=first + index < size, other=float("-inf"))
        key, weight = _key(x).to(tl.int64), _weight(x, largest, temperature)
        in_row = first + index < size
        is_tie = in_row & (key == threshold)
        weight = tl.where(in_row & (key >= threshold) & (weight >= least), weight, 0)
        n_tied = tl.sum(is_tie.to(tl.int64), 0)
        if n_seen + n_tied > n_ties:
            rank = n_seen + tl.cumsum(is_tie.to(tl.int32), 0).to(tl.int64)
            weight = tl.where(is_tie & (rank > n_ties), 0, weight)
        of_block = tl.sum(weight, 0)
        if before + of_block > target:
            token = tl.min(tl.where(before + tl.cumsum(weight, 0) > target, first + index, size), 0)
        before += of_block
        n_seen += n_tied
        first += block
    return token


@triton.jit(do_not_specialize=["size"])
def _choose(
    logits, numbers, gathered, gathered_token, out, n_rows, size,
    block: tl.constexpr, counted: tl.constexpr, candidates: tl.constexpr, levels: tl.constexpr, most: tl.constexpr,
):  # fmt: skip
    """Write a row's largest logit, NaN if any is NaN, and its token."""
    which = tl.program_id(0)
    at = numbers + which
    logits += tl.load(at).to(tl.int64) * size
    largest, n_nan, token = _largest(logits, size, block)
    is_gathered = tl.full((), 0, tl.int32)
    temperature = tl.load(at + n_rows).to(tl.float32)
    if (temperature > 0) & (n_nan == 0) & (largest < float("inf")) & (largest > float("-inf")):
        top_k, top_p = tl.load(at + 2 * n_rows).to(tl.int64), tl.load(at + 3 * n_rows)
        threshold = tl.full((), LOWEST, tl.int64)
        n_ties = tl.full((), size, tl.int64)
        of_row = tl.full((), 0, tl.int64)
        limited = (top_k > 0) & (top_k < size)
        if limited | (top_p < 1.0):
            level_C = _levels(largest, temperature, levels)
            count_C, weight_C = _from(logits, size, largest, temperature, level_C, counted, levels)
            of_row = tl.max(weight_C, 0)
            wanted = tl.ceil(top_p * of_row.to(tl.float64)).to(tl.int64)
            enough = tl.where(limited, count_C >= top_k, weight_C >= wanted) | (tl.arange(0, levels) == levels - 1)
            if tl.min(tl.where(enough, count_C, size), 0) <= most:
                level = tl.max(tl.where(enough, level_C, LOWEST), 0)
                gathered += which.to(tl.int64) * most
                gathered_token += which.to(tl.int64) * most
                size = _gather(logits, size, level, gathered, gathered_token, block)
                logits = gathered
                is_gathered = is_gathered + 1
        if limited:
            threshold, n_ties = _top_k(logits, size, largest, temperature, threshold, top_k, counted, candidates)
        if top_p < 1.0:
            threshold, n_ties = _top_p(
                logits, size, largest, temperature, threshold, n_ties, limited, of_row, top_p, counted, candidates
            )
        min_p, uniform = tl.load(at + 4 * n_rows), tl.load(at + 5 * n_rows)
        token = _drawn(logits, size, largest, temperature, threshold, n_ties, min_p, uniform, token, block)
        if is_gathered > 0:
            token = tl.load(gathered_token + token)
    largest = tl.where(n_nan > 0, float("nan"), largest)
    tl.store(out + which, largest.to(tl.float64))
    tl.store(out + n_rows + which, token.to(tl.float64))


def choose(logits_RV: Tensor, draws: Sequence[Draw]) -> tuple[list[float], list[int]]:
    """Return the largest logit of some rows, NaN if any is NaN, and their tokens. The host waits for them.

    Logits are float32 and contiguous. The token of a row whose largest logit is not finite means nothing.
    """
    numbers = torch.tensor(draws, dtype=torch.float64).T.contiguous()
    out_2R = torch.empty(2, len(draws), dtype=torch.float64, device=logits_RV.device)
    gathered = torch.empty(len(draws), GATHERED, dtype=torch.float32, device=logits_RV.device)
    gathered_token = torch.empty(len(draws), GATHERED, dtype=torch.int32, device=logits_RV.device)
    _choose[(len(draws),)](
        logits_RV, numbers.to(logits_RV.device), gathered, gathered_token, out_2R, len(draws), logits_RV.shape[1],
        block=BLOCK, counted=COUNTED, candidates=CANDIDATES, levels=LEVELS, most=GATHERED, num_warps=WARPS,
    )  # fmt: skip
    largest_R, token_R = out_2R.tolist()
    return largest_R, [int(token) for token in token_R]
