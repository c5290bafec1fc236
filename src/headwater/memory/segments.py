"""Stored states and transitions of segments, as the tensors that a step takes.

B bytes, P pages of the arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headwater.memory.slots import WORD
from headwater.spec import ModelSpec, StateLayout


class LaidOut:
    """Typed views of one run of bytes, which holds all parts of a layout."""

    def __init__(self, layout: StateLayout, bytes_B: torch.Tensor) -> None:
        """Lay the parts out. Raises ValueError for fewer bytes than the layout has."""
        if len(bytes_B) < layout.bytes:
            raise ValueError(f"the parts take {layout.bytes:,} bytes, there are {len(bytes_B):,}")
        self._views = {
            (part.layer, part.name): bytes_B[part.offset : part.offset + part.bytes]
            .view(getattr(torch, part.dtype_name))
            .view(part.shape)
            for part in layout.parts
        }

    @classmethod
    def gathered(cls, layout: StateLayout, arena_PB: torch.Tensor, page_ids: Sequence[int]) -> LaidOut:
        """Return a copy of pages of the arena, one after the other."""
        page_P = torch.tensor(page_ids, dtype=torch.int64, device=arena_PB.device)
        return cls(layout, arena_PB.view(WORD).index_select(0, page_P).view(torch.uint8).flatten())

    def view(self, layer: int, name: str) -> torch.Tensor:
        """Return one part in its shape. Raises KeyError if there is none."""
        return self._views[layer, name]


@dataclass(frozen=True)
class Segment:
    """Stored interior of a segment: zero-start states with the convolutions' last inputs, and transitions.

    For layers with a window these are their rings after the interior, computed as if the segment began at position 0.
    """

    interior: range  # its tokens, counted from the segment's first
    states: LaidOut
    transitions: LaidOut | None  # None: identities

    @classmethod
    def gathered(
        cls,
        spec: ModelSpec,
        arena_PB: torch.Tensor,
        interior: range,
        state_pages: Sequence[int],
        transition_pages: Sequence[int],
    ) -> Segment:
        """Return a copy of pages of the arena, laid out as `spec.state` and as `spec.transition`.

        Without pages of transitions, transitions are identities.
        """
        return cls(
            interior,
            LaidOut.gathered(spec.state, arena_PB, state_pages),
            LaidOut.gathered(spec.transition, arena_PB, transition_pages) if len(transition_pages) else None,
        )
