"""The last tokens' keys and values of every row of state memory: the token at position p stands in row p mod W.

R rows of the state memory, W tokens of the window, T tokens laid out in order, G KV heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rings:
    """Keys, or values, of one layer. A row of state memory with tokens below W is zeros from there on."""

    memory_RWGD: torch.Tensor  # strided by row

    def read(self, row: int, start: int, end: int) -> torch.Tensor:
        """The tokens at positions [start, end) in order, [end − start, G, D]: a copy. The ring holds them all."""
        position_T = torch.arange(start, end, device=self.memory_RWGD.device)
        return self.memory_RWGD[row, position_T % self.memory_RWGD.shape[1]]

    def laid_out(self, row: int, new_TGD: torch.Tensor, start: int, bounds: tuple[int, int]) -> torch.Tensor:
        """Positions [first, last) of a sequence: what the ring holds of those before `start`, the new ones, zeros."""
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
        """The ring as it is before the token at `position`, from tokens laid out from `first` on."""
        ring_WGD = self.memory_RWGD[row]
        window = len(ring_WGD)
        head = position % window
        turn = position - head  # the position that stands in the ring's first row
        ring_WGD[:head] = laid_TGD[turn - first : position - first]
        if position < window:
            ring_WGD[head:] = 0
        else:
            ring_WGD[head:] = laid_TGD[position - window - first : turn - first]

    def put(self, row_B: torch.Tensor | int, position_B: torch.Tensor, new_BGD: torch.Tensor) -> None:
        """One token of each of B sequences, or B of one, at most W."""
        self.memory_RWGD[row_B, position_B % self.memory_RWGD.shape[1]] = new_BGD
