"""Self-check of attention kernels: a decoding row has the same bits with any other rows, on any number of threads.

It runs a layer's kernels at its shape, over pages with random content, and NaN where rows write their own keys and
values, so that a missing or late write is found. Some channels have denormal results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headwater.kernels.attention import SPLIT
from headwater.kernels.compiling import threads_in_use, use_threads
from headwater.layers.attention import GroupedAttention
from headwater.mixers.attention import Heads
from headwater.mixers.cpu.attention import DecodeKernel, DecodeRows, Pages
from headwater.mixers.numerics import TINY, same_bits
from headwater.mixers.weights import Weights

NARROW = 64  # model width
SEQUENCES = (1, 2, 3, 7)
PAGES, PAGE = 4, SPLIT  # of a sequence, and tokens of each
TOKENS = 7  # of one sequence, across the end of a page


def broken_attention(layer: GroupedAttention, random: Callable[..., Tensor]) -> Iterator[str]:
    """Name counts of sequences and of threads at which the kernels of a layer change bits."""
    if not DecodeKernel.takes(layer):
        return
    narrow = replace(layer, hidden=NARROW)
    dtype = random(1).dtype
    heads = Heads(narrow, Weights({name: random(*size) for name, size in narrow.tensors().items()}, dtype))
    decode, n, threads = Decoding(narrow, DecodeKernel(narrow, heads), random), SEQUENCES[-1], threads_in_use()
    everyone, tokens = list(range(n)), list(range(n, n + TOKENS))
    if not decode.same(tokens, decode(tokens), decode(*([row] for row in tokens))):
        yield f"kernel of {layer.kind} at {TOKENS} tokens of a sequence"
    whole = decode(everyone)
    for count in SEQUENCES:
        for some in (everyone[:count], everyone[-count:]):
            reads_BX, *pages = whole
            if not decode.same(some, decode(some), (reads_BX[some], *pages)):
                yield f"kernel of {layer.kind} at {count} decoding sequences"
    for fewer in range(1, threads):
        use_threads(fewer)
        same = decode.same(everyone, decode(everyone), whole)
        use_threads(threads)
        if not same:
            yield f"kernel of {layer.kind} on {fewer} threads"


class Decoding:
    """Random rows of several sequences, then several rows of one, of which any are decoded together."""

    def __init__(self, layer: GroupedAttention, kernel: DecodeKernel, random: Callable[..., Tensor]) -> None:
        n, self.kernel, self.width = SEQUENCES[-1], kernel, layer.heads * layer.head_dim
        keys = layer.kv_heads * layer.head_dim
        lengths = [PAGES * PAGE * (i + 1) // n - i % 2 for i in range(n)]
        self.position_B = np.array([*lengths, *range(SPLIT, SPLIT + TOKENS)], np.int64) - 1
        self.table_BT = np.arange((n + 1) * PAGES).reshape(n + 1, PAGES)[[*range(n), *[n] * TOKENS]]
        self.qkv_BX = random(n + TOKENS, (2 if layer.gated else 1) * self.width + 2 * keys)
        self.before = random((n + 1) * PAGES, PAGE * keys), random((n + 1) * PAGES, PAGE * keys)
        for values in (self.before[1], self.qkv_BX[:, -keys:]):
            values.unflatten(1, (-1, layer.head_dim))[..., ::5] *= TINY
        pages, places = self.table_BT[range(n + TOKENS), self.position_B // PAGE], self.position_B % PAGE
        for part in self.before:
            part.unflatten(1, (PAGE, keys))[pages, places] = torch.nan

    def __call__(self, *steps: list[int]) -> tuple[Tensor, ...]:
        """Return what rows read, those of a step at once, and the keys and values of all pages after them."""
        after, reads = tuple(part.clone() for part in self.before), []
        for rows in steps:
            position_B = self.position_B[rows]
            read_BX = self.qkv_BX.new_empty(len(rows), self.width)
            of_step = DecodeRows(position_B, self.table_BT[rows], int(position_B.max()) + 1)
            self.kernel.decode_into(read_BX, self.qkv_BX[rows], of_step, Pages.of(after, PAGE))
            reads.append(read_BX)
        return torch.cat(reads), *after

    def same(self, rows: list[int], one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
        """Return whether these rows read the same, and their pages hold the same."""
        (read_BX, *pages), (other_BX, *others), table = one, other, self.table_BT[rows].ravel()
        return same_bits(read_BX, other_BX) and all(
            same_bits(part[table], of_other[table]) for part, of_other in zip(pages, others, strict=True)
        )
