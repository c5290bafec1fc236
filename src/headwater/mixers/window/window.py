"""What queries of a step see: in prefill by blocks at absolute positions, in decode by how far the sequence is.

All queries of a block are held to the same keys, those of the block and of a window before it, whatever part of the
block a slice brings; of them, a mask hides what a query may not see. So cuts change no bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

from headwater.mixers.attention.decoding import DecodeBatch, decode_batches
from headwater.mixers.batch import StepBatch
from headwater.mixers.chunks import CHUNK
from headwater.spec import KEY_BLOCK


@dataclass(frozen=True, slots=True)
class Block:
    """Queries [first, last) of one block, and the keys [start, end) that they are held to; positions, all of them."""

    first: int
    last: int
    start: int
    end: int


class Window:
    """A query sees `size` tokens, its own included; `dtype` is that of queries and keys."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.size = size
        self.before = max(1, -(-(size - 1) // CHUNK)) * CHUNK  # keys that a block's first query may see, rounded up
        self.block = min(self.before, KEY_BLOCK)  # queries; as many as that, so that at most half of the work is masked
        self._dtype = dtype
        # -inf, then 0 up to where the own key of a query stands that has no key before it, then -inf.
        reach = self.before + self.block
        self._band = torch.full((3 * reach + 1,), -torch.inf, dtype=dtype, device=device)
        self._band[reach + 1 - size : reach + 1] = 0
        self._last: tuple[StepBatch, tuple[DecodeBatch, ...]] | None = None  # a step, and what it gave: of all layers

    def blocks(self, start: int, end: int) -> Iterator[Block]:
        """Those that queries at positions [start, end) lie in."""
        first = start
        while first < end:
            at = first // self.block * self.block
            last = min(at + self.block, end)
            yield Block(first, last, max(0, at - self.before), at + self.block)
            first = last

    def mask_from_last(self, block: Block) -> torch.Tensor:
        """As `kernel.backwards` takes it: a key is seen from its own position on, for `size` tokens."""
        last_key = block.last - 1 - block.start
        return self._band[self.before + self.block - last_key :]

    def decodes(self, batch: StepBatch) -> tuple[DecodeBatch, ...]:
        """The step's decoding sequences, those together that are held to as many rows of their rings."""
        if self._last is None or self._last[0] is not batch:
            lengths = [min(length, self.size) for length in batch.decode_lengths]
            self._last = batch, decode_batches(lengths, self._dtype, batch.position_N.device, self.size)
        return self._last[1]


@cache
def window_of(size: int, dtype: torch.dtype, device: str) -> Window:
    """One for all layers with as large a window."""
    return Window(size, dtype, device)
