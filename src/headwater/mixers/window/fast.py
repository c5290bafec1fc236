"""The keys that queries of a window see, in prefill and in decode, and the rings that hold them.

Prefill works in blocks at absolute positions. All queries of a block are computed over the same keys: the keys of the
block and of a window before it, whatever part of the block a slice contains. A mask hides keys that a query may not
see. So cuts change no bit. Decode groups sequences by the number of tokens in their rings.

R rows of the state memory, W tokens of the window, T tokens laid out in order, G KV heads, D head width, B decoding
sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

from headwater.mixers.attention.fast import DecodeBatch, decode_batches
from headwater.mixers.batch import CHUNK, StepBatch
from headwater.spec import KEY_BLOCK


@dataclass(frozen=True, slots=True)
class Block:
    """Queries [first, last) of one block and the keys [start, end) that they are computed over, as positions."""

    first: int
    last: int
    start: int
    end: int


class Window:
    """A sliding window: a query sees `size` tokens, its own included; `dtype` is that of queries and keys."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.size = size
        self.before = max(1, -(-(size - 1) // CHUNK)) * CHUNK  # keys that a block's first query may see, rounded up
        self.block = min(self.before, KEY_BLOCK)  # queries; as many as that, so that at most half of the work is masked
        self._dtype = dtype
        # -inf, then 0 up to the position of a query's own key if no key is before it, then -inf.
        reach = self.before + self.block
        self._band = torch.full((3 * reach + 1,), -torch.inf, dtype=dtype, device=device)
        self._band[reach + 1 - size : reach + 1] = 0
        self._last: tuple[StepBatch, tuple[DecodeBatch, ...]] | None = (
            None  # the last step and its batches, shared by all layers
        )

    def blocks(self, start: int, end: int) -> Iterator[Block]:
        """Yield the blocks of queries at positions [start, end)."""
        first = start
        while first < end:
            at = first // self.block * self.block
            last = min(at + self.block, end)
            yield Block(first, last, max(0, at - self.before), at + self.block)
            first = last

    def mask_from_last(self, block: Block) -> torch.Tensor:
        """Return the mask for `fast.backwards`: a key is seen from its own position on, for `size` tokens."""
        last_key = block.last - 1 - block.start
        return self._band[self.before + self.block - last_key :]

    def decodes(self, batch: StepBatch) -> tuple[DecodeBatch, ...]:
        """Group the step's decoding sequences by the number of ring rows that they read."""
        if self._last is None or self._last[0] is not batch:
            lengths = [min(length, self.size) for length in batch.decode_lengths]
            self._last = batch, decode_batches(lengths, self._dtype, batch.position_N.device, self.size)
        return self._last[1]


@cache
def window_of(size: int, dtype: torch.dtype, device: str) -> Window:
    """Return the window that all layers of this size share."""
    return Window(size, dtype, device)


@dataclass(frozen=True)
class Rings:
    """Keys or values of one layer's last tokens: the token at position p is in ring row p mod W.

    A ring with fewer than W tokens is zeros after them.
    """

    memory_RWGD: torch.Tensor  # strided by row

    def read(self, row: int, start: int, end: int) -> torch.Tensor:
        """Copy the tokens at positions [start, end) in order, [end − start, G, D]; the ring must hold them all."""
        position_T = torch.arange(start, end, device=self.memory_RWGD.device)
        return self.memory_RWGD[row, position_T % self.memory_RWGD.shape[1]]

    def laid_out(self, row: int, new_TGD: torch.Tensor, start: int, bounds: tuple[int, int]) -> torch.Tensor:
        """Lay out positions [first, last) of a sequence: tokens from the ring before `start`, the new ones, zeros."""
        first, last = bounds
        end, window = start + len(new_TGD), self.memory_RWGD.shape[1]
        known = max(first, start - window)
        laid_TGD = new_TGD.new_empty(last - first, *new_TGD.shape[1:])
        laid_TGD[: known - first] = 0
        laid_TGD[known - first : start - first] = self.read(row, known, start)
        laid_TGD[start - first : end - first] = new_TGD
        laid_TGD[end - first :] = 0
        return laid_TGD

    def store(self, row: int, laid_TGD: torch.Tensor, first: int, position: int) -> None:
        """Write the ring's content before the token at `position`, from tokens laid out from `first` on."""
        ring_WGD = self.memory_RWGD[row]
        window = len(ring_WGD)
        head = position % window
        turn = position - head  # position of the token in the ring's first row
        ring_WGD[:head] = laid_TGD[turn - first : position - first]
        if position < window:
            ring_WGD[head:] = 0
        else:
            ring_WGD[head:] = laid_TGD[position - window - first : turn - first]

    def put(self, row_B: torch.Tensor | int, position_B: torch.Tensor, new_BGD: torch.Tensor) -> None:
        """Store one token of each of B sequences, or B ≤ W tokens of one sequence."""
        self.memory_RWGD[row_B, position_B % self.memory_RWGD.shape[1]] = new_BGD
