"""Passes over rows of the vocabulary: largest logits, tokens above a bound, ranks, order, and the token that is drawn.

Each gives what torch's operations give, to the bit: the first of equal maxima, equal entries in the order of tokens,
sums in float64 in that order. A row's result depends only on the row.

R rows, V tokens, both in rows of `row` elements; arrays are flat, see `arrays.py`. Indices of hot loops are unsigned:
then numba adds no test for those that count from the end.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from headwater.kernels.compiling import kernel, part
from headwater.kernels.vectors import LANES, fill, load, max_lanes, maximum, maximum_or_nan, store

CHUNK = 4096  # tokens that one thread passes at a time
STRIDE = 4 * LANES  # tokens that are compared at once
FIXED = np.float32(2.0**62)  # probabilities as integers: their sums do not depend on the order
ROUNDING, TRUNCATION = 2.0**-50, 2.0**-61  # more than a term adds to the error of a sum, as a part of it and in itself
DIGIT = 11  # bits that a pass of the sort looks at
LOWEST = np.float32(-np.inf)


@part
def _larger(a, b):
    """Return the larger number, or NaN if one of them is NaN."""
    return a if a > b or a != a else b


@part
def _largest(x, start, end):
    """Return the largest of x[start:end], or NaN if any is NaN."""
    a = b = c = d = fill(LOWEST)
    at = start
    while at + STRIDE <= end:
        a, b = maximum_or_nan(a, load(x, at)), maximum_or_nan(b, load(x, at + LANES))
        c, d = maximum_or_nan(c, load(x, at + 2 * LANES)), maximum_or_nan(d, load(x, at + 3 * LANES))
        at += STRIDE
    lanes = np.empty(LANES, np.float32)
    store(lanes, 0, maximum_or_nan(maximum_or_nan(a, b), maximum_or_nan(c, d)))
    value = LOWEST
    for lane in range(LANES):
        value = _larger(value, lanes[lane])
    for i in range(at, end):
        value = _larger(value, x[i])
    return value


@kernel
def largest_into(largest, first, x, row, rows, size):
    """Write each row's largest element, NaN if any is NaN, and the first token that has it."""
    n = (size + CHUNK - 1) // CHUNK
    of_chunk = np.empty(rows * n, np.float32)
    for c in prange(rows * n):
        start = c // n * row + c % n * CHUNK
        of_chunk[c] = _largest(x, start, min(start + CHUNK, c // n * row + size))
    for r in range(rows):
        value, c = LOWEST, 0
        for i in range(n):
            value = _larger(value, of_chunk[r * n + i])
        while c < n - 1 and of_chunk[r * n + c] != value:
            c += 1
        at = c * CHUNK
        while at < size - 1 and x[r * row + at] != value:
            at += 1
        largest[r], first[r] = value, at


@kernel
def scaled_into(out, x, row, rows, size, largest, divisor):
    """Write (x - largest) / divisor; `out` is [R, V], the others are numbers of each row."""
    n = (size + CHUNK - 1) // CHUNK
    for c in prange(rows * n):
        r, at = c // n, c % n * CHUNK
        end = min(at + CHUNK, size)
        most, by = fill(largest[r]), fill(divisor[r])
        while at + LANES <= end:
            store(out, r * size + at, (load(x, r * row + at) - most) / by)
            at += LANES
        for i in range(at, end):
            out[r * size + i] = (x[r * row + i] - largest[r]) / divisor[r]


@part
def _any_above(x, at, bound):
    """Return whether one of 64 elements is larger."""
    a = maximum(load(x, at), load(x, at + LANES))
    b = maximum(load(x, at + 2 * LANES), load(x, at + 3 * LANES))
    return max_lanes(maximum(a, b)) > bound


@part
def _replace_least(heap, first, k, value):
    """Replace the lowest of k values, the first of a heap: none is lower than the one at half its index."""
    at = 0
    while True:
        child = 2 * at + 1
        if child + 1 < k and heap[first + child + 1] < heap[first + child]:
            child += 1
        if child >= k or heap[first + child] >= value:
            break
        heap[first + at] = heap[first + child]
        at = child
    heap[first + at] = value


@kernel
def leading_into(tokens, count, x, row, rows, size, heap, k):
    """Append the tokens whose elements are larger than all but k - 1 before them: [R, V], `count` of each row.

    They begin with the first k tokens. `heap`, [R, k], has their elements, ascending, and is left with the k largest.
    """
    for r in prange(rows):
        at, n, first = r * row, count[r], k
        while first < size:
            end = min(first + STRIDE, size)
            if end - first < STRIDE or _any_above(x, at + first, heap[r * k]):
                for i in range(first, end):
                    if x[at + i] > heap[r * k]:
                        _replace_least(heap, r * k, k, x[at + i])
                        tokens[r * size + n] = i
                        n += 1
            first = end
        count[r] = n


@kernel
def count_above_into(count, x, row, rows, size, bound):
    """Write how many elements of each row are larger than its bound."""
    for r in prange(rows):
        n, least = np.int64(0), bound[r]
        for i in range(np.uintp(r * row), np.uintp(r * row + size)):
            n += x[i] > least
        count[r] = n


@part
def _begins(keys, shift):
    """Return where the keys of each digit begin if the largest digits come first; digits count from the largest."""
    begins = np.zeros((1 << DIGIT) + 1, np.int64)
    for key in keys:
        begins[_digit(key, shift) + 1] += 1
    for digit in range(1 << DIGIT):
        begins[digit + 1] += begins[digit]
    return begins


@part
def _digit(key, shift):
    return np.int64((1 << DIGIT) - 1) - np.int64(key >> np.uint32(shift) & np.uint32((1 << DIGIT) - 1))


@part
def _sort_by(shift, keys, tokens, sorted_keys, sorted_tokens):
    """Write keys in the order of one digit, the largest first, equal ones in theirs; tokens go with them."""
    begins = _begins(keys, shift)
    for i in range(len(keys)):
        digit = _digit(keys[i], shift)
        sorted_keys[begins[digit]], sorted_tokens[begins[digit]] = keys[i], tokens[i]
        begins[digit] += 1


@kernel
def descending_into(keys, tokens, count, bits, row, rows, size, least):
    """Write each row's elements that are at least its `least`, and their tokens: descending, equal ones in order.

    Elements are the bits of float32 that are not negative, which have the order of the numbers. `keys` and `tokens` are
    [R, 2, V], of which [R, 1] is left with them: an LSD radix sort.
    """
    for r in prange(rows):
        n, first = 0, r * 2 * size
        for i in range(size):
            keys[first + n], tokens[first + n] = bits[r * row + i], i
            n += bits[r * row + i] >= least[r]
        from_, to = slice(first, first + n), slice(first + size, first + size + n)
        for digit in range(3):
            _sort_by(digit * DIGIT, keys[from_], tokens[from_], keys[to], tokens[to])
            from_, to = to, from_
        count[r] = n


@part
def _fixed(p, least):
    """Return a probability in units of 2^-62, 0 if it is less than `least`."""
    return np.int64((p if p >= least else np.float32(0)) * FIXED)


@part
def _place_in_order(p, start, size, least, uniform):
    """Return the first index whose cumulative sum, added in order, is more than `uniform` times the whole."""
    total = 0.0
    for i in range(start, start + size):
        total += p[i] if p[i] >= least else 0.0
    target, after, at = uniform * total, 0.0, -1
    while at < size - 1 and not after > target:
        at += 1
        after += p[start + at] if p[start + at] >= least else 0.0
    return at


@part
def _place(p, start, size, least, uniform, sums):
    """Return that index from the sums of chunks, unless it might be another if probabilities were added in order."""
    whole = np.int64(0)
    for of_chunk in sums:
        whole += of_chunk
    total = np.float64(whole)
    target, margin = uniform * total, (ROUNDING * total + TRUNCATION * FIXED) * size
    after, c = np.int64(0), 0
    while c < len(sums) - 1 and after + sums[c] <= target:
        after += sums[c]
        c += 1
    for i in range(c * CHUNK, min((c + 1) * CHUNK, size)):
        before = after
        after += _fixed(p[start + i], least)
        if after > target:
            if before + margin < target < after - margin:
                return i
            break
    return _place_in_order(p, start, size, least, uniform)


@kernel
def draw_into(token, p, row, rows, size, least, uniform):
    """Write the first index of each row whose cumulative sum is more than `uniform` in [0, 1) times the row's.

    Elements are probabilities, in float32; those less than the row's `least` count as 0.
    """
    n = (size + CHUNK - 1) // CHUNK
    sums = np.zeros(rows * n, np.int64)
    for c in prange(rows * n):
        start, least_of_row, total = c // n * row + c % n * CHUNK, least[c // n], np.int64(0)
        for i in range(np.uintp(start), np.uintp(min(start + CHUNK, c // n * row + size))):
            total += _fixed(p[i], least_of_row)
        sums[c] = total
    for r in range(rows):
        token[r] = _place(p, r * row, size, least[r], uniform[r], sums[r * n : (r + 1) * n])
