"""Weights as small integers or float8 with scales: the form that formats of quantised checkpoints are read into.

N outputs, K inputs, X groups of inputs in a row, S groups of groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

MAX_BITS = 8
TABLE_BITS = 4  # of codes that stand for numbers of a table
INPUT_GROUP = 8  # inputs whose codes kernels read at a time


@dataclass(frozen=True, eq=False)
class Quantised:
    """A weight [N, K]: `scale · (code − zero) − minimum`, each operation rounded to float32.

    Codes may stand for numbers of a table, which the formula takes instead: those of IQ4_NL, MXFP4, NVFP4 and nf4.
    Groups of K / X successive codes share a scale, a zero and a minimum. If there are groups of groups, a group's
    scale is `outer_scale · scale`, rounded to float32, and its minimum `outer_minimum · minimum`.
    """

    code_NK: Tensor  # uint8, below 2^bits, or float8_e4m3fn
    bits: int  # 1 to 8
    scale_NX: Tensor  # float32, float16, bfloat16, or uint8 within groups of groups
    zero_NX: Tensor  # uint8; X may be 1
    minimum_NX: Tensor | None = None
    outer_scale_NS: Tensor | None = None  # float16 or float32
    outer_minimum_NS: Tensor | None = None
    # 16 numbers that codes of at most 4 bits stand for: integers from 0 to 255, or floats, which have no zero
    table: tuple[int, ...] | tuple[float, ...] | None = None
    order_K: Tensor | None = None  # int64: the input of each code of a row, if groups are not of successive inputs

    def __post_init__(self) -> None:
        n_in, n_groups = self.code_NK.shape[1], self.scale_NX.shape[1]
        if n_in % n_groups or n_in // n_groups % INPUT_GROUP:
            raise ValueError(f"{n_in} inputs cannot be divided into {n_groups} groups of a multiple of {INPUT_GROUP}")
        if not 1 <= self.bits <= MAX_BITS:
            raise ValueError(f"codes have {self.bits} bits, must be 1 to {MAX_BITS}")
        if self.table is not None and (self.bits > TABLE_BITS or len(self.table) != 1 << TABLE_BITS):
            raise ValueError(f"{len(self.table)} numbers for codes of {self.bits} bits, must be 16 for at most 4")

    @property
    def shape(self) -> torch.Size:
        """Outputs and inputs."""
        return self.code_NK.shape

    @property
    def is_float(self) -> bool:
        """Whether codes are float8, or stand for a table's floats: both have no zero and no minimum."""
        of_table = self.table is not None and isinstance(self.table[0], float)
        return self.code_NK.dtype == torch.float8_e4m3fn or of_table

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.code_NK.shape[1] // self.scale_NX.shape[1]

    @property
    def bytes(self) -> int:
        """Bytes in memory with codes packed: those above 4 bits take a byte each."""
        packed = self.code_NK.numel() // (2 if self.bits <= 4 else 1)
        return packed + sum(part.nbytes for name, part in self.parts() if name != "code_NK")

    def rows(self, at: slice | Tensor) -> Self:
        """Return some outputs, in the order of `at`."""
        parts: dict[str, Any] = {name: part[at] for name, part in self.parts()}
        return replace(self, **parts)

    def clone(self) -> Self:
        """Return a copy, which keeps no file mapped."""
        parts: dict[str, Any] = {name: part.clone() for name, part in self.parts()}
        return replace(self, **parts)

    def split(self, sizes: Sequence[int]) -> list[Self]:
        """Cut the outputs into runs of these sizes."""
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [self.rows(slice(start, start + n)) for start, n in zip(starts, sizes, strict=True)]

    def values(self) -> Tensor:
        """Return the weight in float32."""
        scale_NX, minimum_NX = self.scales()
        code_NXg = self._numbers().unflatten(1, (scale_NX.shape[1], -1))
        value_NXg = (code_NXg - self.zero_NX.float()[:, :, None]) * scale_NX[:, :, None]
        if minimum_NX is not None:
            value_NXg -= minimum_NX[:, :, None]
        return self.reordered(value_NXg.flatten(1))

    def reordered(self, value_NK: Tensor) -> Tensor:
        """Return values in the order of inputs, from values in that of codes."""
        return value_NK if self.order_K is None else torch.empty_like(value_NK).index_copy_(1, self.order_K, value_NK)

    def _numbers(self) -> Tensor:
        """Return what codes stand for, float32."""
        if self.table is None:
            return self.code_NK.float()
        return torch.tensor(self.table, dtype=torch.float32)[self.code_NK.int()]

    def scales(self) -> tuple[Tensor, Tensor | None]:
        """Return scales and minimums of groups, float32 [N, X]."""
        scale_NX, minimum_NX = self.scale_NX.float(), self.minimum_NX
        if self.outer_scale_NS is not None:
            scale_NX = scale_NX * self._spread(self.outer_scale_NS)
        if minimum_NX is not None:
            minimum_NX = minimum_NX.float()
            if self.outer_minimum_NS is not None:
                minimum_NX = minimum_NX * self._spread(self.outer_minimum_NS)
        return scale_NX, minimum_NX

    def _spread(self, outer_NS: Tensor) -> Tensor:
        """Repeat what groups of groups share, for each group; float32."""
        return outer_NS.float().repeat_interleave(self.scale_NX.shape[1] // outer_NS.shape[1], 1)

    def parts(self) -> list[tuple[str, Tensor]]:
        """Return the tensors with a row for each output that it has, by name."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self) if field.name != "order_K")
        return [(name, value) for name, value in values if isinstance(value, Tensor)]


def joined(parts: Sequence[Quantised]) -> Quantised:
    """Return the outputs of several weights, one after the other, of one format and group. Raises ValueError."""
    first = parts[0]
    if any((part.bits, part.group, part.table) != (first.bits, first.group, first.table) for part in parts):
        raise ValueError(f"weights of {sorted({(part.bits, part.group) for part in parts})} (bits, group) do not join")
    names = [name for name, _ in first.parts()]
    whole: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return replace(first, **whole)
