"""A window composed with a segment that was computed apart (HYPIC, sections 4.2 and 4.3).

Its keys and values are those of attention: composed by position, keys rotated on, values copied. What a transition does
to a recurrent state, a window does by itself: tokens leave it as others come. So there is nothing beside the ring to be
stored, and the ways with transitions and without (naive addition) do the same.

W tokens of the window, G KV heads, D head width, T tokens that are taken over.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headwater.mixers.attention.heads import Heads
from headwater.mixers.window.rings import Rings


@dataclass(frozen=True)
class SegmentWindow:
    """What one layer stores of a segment: its rings after the interior, the segment's first token at position 0."""

    keys_WGD: torch.Tensor
    values_WGD: torch.Tensor
    interior: range  # tokens of the segment; what the rings hold of those before is computed anew at each use


def compose_into(heads: Heads, rings: tuple[Rings, Rings], row: int, segment: SegmentWindow, at: int) -> None:
    """The rings of a row, right before an interior, become those after it; the segment begins at position `at`.

    Of the interior the last W tokens are taken over, and the rows of all others stay.
    """
    window = len(segment.keys_WGD)
    last = segment.interior[-window:]
    from_T = torch.arange(last.start, last.stop, device=segment.keys_WGD.device)
    row_T, to_T = from_T % window, from_T + at
    keys_TGD = heads.moved(segment.keys_WGD[row_T], from_T, to_T)
    for ring, new_TGD in zip(rings, (keys_TGD, segment.values_WGD[row_T]), strict=True):
        ring.put(row, to_T, new_TGD)
