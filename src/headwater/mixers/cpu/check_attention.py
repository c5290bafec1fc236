"""Self-check of attention kernels: whether a decoding row has the same bits in any company, on any number of threads.

It runs a layer's kernels at its shape, over pages with random content.
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
from headwater.mixers.cpu.attention import Array, DecodeKernel, DecodeRows, Pages
from headwater.mixers.weights import Weights

NARROW = 64  # model width
SEQUENCES = (1, 2, 3, 7)
PAGES, PAGE = 4, SPLIT  # of a sequence, and tokens of each


def broken_attention(layer: GroupedAttention, random: Callable[..., Tensor]) -> Iterator[str]:
    """Name counts of sequences and of threads at which the kernels of a layer change bits."""
    if not DecodeKernel.takes(layer):
        return
    narrow = replace(layer, hidden=NARROW)
    dtype = random(1).dtype
    heads = Heads(narrow, Weights({name: random(*size) for name, size in narrow.tensors().items()}, dtype))
    kernel, n, keys = DecodeKernel(narrow, heads), SEQUENCES[-1], layer.kv_heads * layer.head_dim
    pages = Pages.of((random(n * PAGES, PAGE * keys), random(n * PAGES, PAGE * keys)), PAGE)
    qkv_BX = random(n, (2 if layer.gated else 1) * layer.heads * layer.head_dim + 2 * keys)
    length_B = np.array([PAGES * PAGE * (i + 1) // n - i % 2 for i in range(n)], np.int64)
    table_BT = np.arange(n * PAGES).reshape(n, PAGES)

    def decoded(qkv_BX: Tensor, length_B: Array, table_BT: Array) -> Tensor:
        rows = DecodeRows(length_B - 1, np.ascontiguousarray(table_BT), int(length_B.max()))
        read_BX = qkv_BX.new_empty(len(rows.position_B), layer.heads * layer.head_dim)
        kernel.decode_into(read_BX, qkv_BX, rows, pages)
        return read_BX

    def decode(at: slice) -> Tensor:
        return decoded(qkv_BX[at], length_B[at], table_BT[at])

    of_one = SPLIT - 1 + np.arange(n), np.zeros((n, 1), np.int64) + table_BT[0]  # tokens of one sequence
    in_turn = [decoded(qkv_BX[i : i + 1], *(part[i : i + 1] for part in of_one)) for i in range(n)]
    if not torch.equal(decoded(qkv_BX, *of_one), torch.cat(in_turn)):
        yield f"kernel of {layer.kind} at {n} tokens of a sequence"
    whole_BX, threads = decode(slice(0, n)), threads_in_use()
    for count in SEQUENCES:
        for at in (slice(0, count), slice(n - count, n)):
            if not torch.equal(decode(at), whole_BX[at]):
                yield f"kernel of {layer.kind} at {count} decoding sequences"
    for fewer in range(1, threads):
        use_threads(fewer)
        same = torch.equal(decode(slice(0, n)), whole_BX)
        use_threads(threads)
        if not same:
            yield f"kernel of {layer.kind} on {fewer} threads"
