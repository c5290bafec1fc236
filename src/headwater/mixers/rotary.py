"""Rotary position embedding of the first channels of each head (Su et al. 2021).

Shapes: N rows of a step, H heads, D head width, F rotated pairs of channels (rotary_dim / 2).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from headwater.layers.attention import Rotary
from headwater.mixers.batch import LastValue
from headwater.mixers.frequencies import frequencies
from headwater.mixers.gpu import has_kernels

TABLE_BLOCK = 4096  # positions


class RotaryTable:
    """Cosines and sines by position in float32, computed in blocks of fixed size: bits depend only on the position."""

    def __init__(self, rotary: Rotary, device: torch.device | str) -> None:
        self.neighbours, self._amplitude = rotary.neighbours, rotary.amplitude
        self._frequency_F = frequencies(rotary).to(device)
        self._cos_sin = torch.empty(0, 2, rotary.dim // 2, device=device)
        self._at = LastValue(self._looked_up)  # of the positions of a step, for all its layers

    def at(self, position_N: Tensor) -> Tensor:
        """Return cosines and sines at these positions, times the rotation's amplitude, [N, 2, F]."""
        return self._at.of(position_N, position_N)

    def turn(self, by: int) -> Tensor:
        """Return the rotation by `by` positions, [1, 2, F], from angles in float64."""
        angle_1F = by * self._frequency_F.double()[None]
        return torch.stack([angle_1F.cos(), angle_1F.sin()], dim=1).float()

    def between(self, from_N: Tensor, to_N: Tensor) -> Tensor:
        """Return the rotation of keys from some positions to others, [N, 2, F].

        It is the difference of the angles that `at` returns, which are rounded, more so at larger positions.
        """
        (cos_from, sin_from), (cos_to, sin_to) = (self._looked_up(x).unbind(1) for x in (from_N, to_N))
        cos_NF = (cos_to * cos_from).addcmul_(sin_to, sin_from)
        sin_NF = (sin_to * cos_from).addcmul_(cos_to, sin_from, value=-1)
        return torch.stack([cos_NF, sin_NF], dim=1) / self._amplitude**2

    def turned(self, x_NHD: Tensor, cos_sin_N2F: Tensor) -> Tensor:
        """Return x rotated, in float32; round once."""
        turned_NHD = x_NHD.to(torch.float32, copy=True)
        rotate_into(turned_NHD, cos_sin_N2F, self.neighbours)
        return turned_NHD.to(x_NHD.dtype)

    def until(self, end: int) -> Tensor:
        """Return `at` of positions from 0 to at least `end`, [positions, 2, F]: the same one if it can."""
        table = self._cos_sin  # another thread may replace it by a shorter one
        starts = range(len(table), end, TABLE_BLOCK)
        if starts:
            more = [self._computed(torch.arange(start, start + TABLE_BLOCK, device=table.device)) for start in starts]
            table = self._cos_sin = torch.cat([table, *more])
        return table

    def _looked_up(self, position_N: Tensor) -> Tensor:
        end = int(position_N.max()) + 1 if len(position_N) else 0
        return self.until(end)[position_N]

    def _computed(self, position_N: Tensor) -> Tensor:
        angle_NF = position_N.float()[:, None] * self._frequency_F
        return torch.stack([angle_NF.cos(), angle_NF.sin()], dim=1) * self._amplitude


class RotaryOnGpu(RotaryTable):
    """Cosines and sines computed at each use: finding the largest position would make the host wait for the device."""

    def _looked_up(self, position_N: Tensor) -> Tensor:
        return self._computed(position_N)


def rotary_table(rotary: Rotary, device: torch.device | str) -> RotaryTable:
    """Return the table that all layers with this rotation share."""
    return _shared(RotaryOnGpu if has_kernels(device) else RotaryTable, rotary, str(device))


@cache
def _shared(kind: type[RotaryTable], rotary: Rotary, device: str) -> RotaryTable:
    return kind(rotary, device)


def rotate_into(x_NHD: Tensor, cos_sin_N2F: Tensor, neighbours: bool = False) -> None:
    """Rotate the first 2F channels of each head in place; x is float32.

    Pairs are (i, i + F), or neighbours (2i, 2i + 1), as in the original paper.
    """
    half = cos_sin_N2F.shape[-1]
    cos_N1F, sin_N1F = cos_sin_N2F[:, 0, None], cos_sin_N2F[:, 1, None]
    if neighbours:
        a, b = x_NHD[..., 0 : 2 * half : 2], x_NHD[..., 1 : 2 * half : 2]
    else:
        a, b = x_NHD[..., :half], x_NHD[..., half : 2 * half]
    rotated_a = (a * cos_N1F).sub_(b * sin_N1F)
    rotated_b = (b * cos_N1F).add_(a * sin_N1F)
    a.copy_(rotated_a)
    b.copy_(rotated_b)
