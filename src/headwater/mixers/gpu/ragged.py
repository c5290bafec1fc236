"""The slices of a step as kernels read them: int32 tensors on the device, made once a step.

S slices, P prefill rows, n chunks of 64 tokens (of all slices, one after the other).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headwater.mixers.batch import Slice
from headwater.mixers.chunks import CHUNK

NO_ROW = -1
# Of the loop over chunks: what comes next is not loaded ahead. Triton's default of three would take 230 to 295 KB of
# shared memory a program at heads of 128 channels, which no card has; so it takes 41 to 98.
STAGES = 1


@dataclass(frozen=True)
class Ragged:
    """Where each slice's rows, states and chunks are."""

    first_S: torch.Tensor  # its first row in the step
    length_S: torch.Tensor
    slot_S: torch.Tensor  # row of the state memory
    chunk_S: torch.Tensor  # its first chunk
    slice_P: torch.Tensor  # which slice a row belongs to
    slice_n: torch.Tensor  # which slice a chunk belongs to
    save_n: torch.Tensor  # row of the state memory that also takes the state after a chunk, or -1

    @property
    def rows_of_chunks(self) -> torch.Tensor:
        """The row of each token of each chunk, int64 [n, 64]; -1 after a slice's last one. Rows come in this order."""
        index_nt = torch.arange(CHUNK, device=self.first_S.device) + CHUNK * self._index_n.unsqueeze(1)
        inside_nt = index_nt < self.length_S[self.slice_n].unsqueeze(1)
        return torch.where(inside_nt, self.first_S[self.slice_n].unsqueeze(1) + index_nt, NO_ROW).long()

    @property
    def _index_n(self) -> torch.Tensor:
        """Which of its slice's chunks each one is."""
        return torch.arange(len(self.slice_n), device=self.slice_n.device) - self.chunk_S[self.slice_n]

    @classmethod
    def of(cls, slices: Sequence[Slice], device: torch.device | str) -> Ragged:
        """Raises ValueError where two saves of one slice are at the same position."""
        counts = [-(-s.length // CHUNK) for s in slices]
        saves: list[int] = []
        for s, count in zip(slices, counts, strict=True):
            at = dict(s.saves)
            if len(at) < len(s.saves):
                raise ValueError(f"{len(s.saves)} saves at {len(at)} positions of a slice")
            saves += [at.get(min(s.start + (i + 1) * CHUNK, s.end), NO_ROW) for i in range(count)]

        def tensor(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        return cls(
            first_S=tensor([s.first for s in slices]),
            length_S=tensor([s.length for s in slices]),
            slot_S=tensor([s.slot for s in slices]),
            chunk_S=tensor([sum(counts[:i]) for i in range(len(counts))]),
            slice_P=tensor([i for i, s in enumerate(slices) for _ in range(s.length)]),
            slice_n=tensor([i for i, count in enumerate(counts) for _ in range(count)]),
            save_n=tensor(saves),
        )
