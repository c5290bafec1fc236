"""Laid-out bytes: the working memory of running sequences, a row of bytes each, and stored states of segments.

A row is laid out like a checkpoint, so that restore and save are plain copies between a row and pages of the arena.
R rows, P pages of the arena, C pages of a checkpoint, B bytes and W words of a page.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headwater.memory.arena import LazyBytes
from headwater.spec import ModelSpec
from headwater.state_layout import StateLayout

# Torch copies rows element by element: as 16-byte words this runs at memcpy speed, as bytes at a fifteenth of it.
WORD = torch.complex128
WHOLE = slice(None)  # of a page


def _index(page_ids: Sequence[int], arena_PB: torch.Tensor) -> torch.Tensor:
    return torch.tensor(page_ids, dtype=torch.int64, device=arena_PB.device)


class LaidOut:
    """Typed views of bytes that hold all parts of a layout: one run of bytes [B], or rows of them [R, B]."""

    def __init__(self, layout: StateLayout, bytes_RB: torch.Tensor) -> None:
        """Lay the parts out. Raises ValueError for fewer bytes than the layout has."""
        *rows, n_bytes = bytes_RB.shape
        if n_bytes < layout.bytes:
            raise ValueError(f"the parts take {layout.bytes:,} bytes, there are {n_bytes:,}")
        self._views = {
            (part.layer, part.name): bytes_RB[..., part.offset : part.offset + part.bytes]
            .view(getattr(torch, part.dtype_name))
            .view(*rows, *part.shape)
            for part in layout.parts
        }

    @classmethod
    def gathered(
        cls, layout: StateLayout, arena_PB: torch.Tensor, page_ids: Sequence[int], area: slice = WHOLE
    ) -> LaidOut:
        """Return a copy of pages of the arena, or of some bytes of each, one after the other."""
        pages_CW = arena_PB[:, area].view(WORD).index_select(0, _index(page_ids, arena_PB))
        return LaidOut(layout, pages_CW.view(torch.uint8).flatten())

    def view(self, layer: int, name: str) -> torch.Tensor:
        """Return one part, [*shape], or [rows, *shape] strided by row. Raises KeyError if there is none."""
        return self._views[layer, name]


class StateMemory(LaidOut):
    """`rows` blobs of `row_bytes`, and typed views of them. On the CPU a free row takes no memory.

    `row_bytes` is at least `layout.bytes`. If rows are saved into pages, or into some bytes of each page, the `area`,
    it is a multiple of those bytes.
    """

    def __init__(
        self,
        layout: StateLayout,
        rows: int,
        row_bytes: int,
        device: torch.device | str = "cpu",
        area: slice = WHOLE,
    ) -> None:
        if row_bytes < layout.bytes:
            raise ValueError(f"a state takes {layout.bytes:,} bytes, a row has {row_bytes:,}")
        on_cpu = torch.device(device).type == "cpu"
        # Rows begin at boundaries of the system's pages, so that one can be returned without its neighbours.
        self._stride = -(-row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE if on_cpu else row_bytes
        self._memory = LazyBytes(rows * self._stride, device)
        self.bytes_RB = self._memory.tensor.view(rows, self._stride)[:, :row_bytes]
        self._area = area
        super().__init__(layout, self.bytes_RB)
        # by layer and name of a part: inputs of the last step's drafts, which layers keep in addition to states
        self.kept: defaultdict[tuple[int, str], list[torch.Tensor]] = defaultdict(list)

    def zero(self, row: int) -> None:
        """Set the row to the state before the first token."""
        self.bytes_RB[row].zero_()

    def restore(self, row: int, arena_PB: torch.Tensor, page_ids: Sequence[int]) -> None:
        """Gather a checkpoint's pages into a row, bit for bit."""
        pages_PW, row_CW = self._as_pages(row, len(page_ids), arena_PB)
        torch.index_select(pages_PW, 0, _index(page_ids, arena_PB), out=row_CW)

    def save(self, row: int, arena_PB: torch.Tensor, page_ids: Sequence[int]) -> None:
        """Scatter a row into a checkpoint's pages, bit for bit; a row of no bytes into none."""
        if len(page_ids) or self.bytes_RB.shape[1]:
            pages_PW, row_CW = self._as_pages(row, len(page_ids), arena_PB)
            pages_PW.index_copy_(0, _index(page_ids, arena_PB), row_CW)

    def _as_pages(self, row: int, n_pages: int, arena_PB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the area of all pages, and a row as such areas."""
        pages_PB, row_bytes = arena_PB[:, self._area], self.bytes_RB.shape[1]
        n_bytes = pages_PB.shape[1]
        if n_pages * n_bytes != row_bytes:
            raise ValueError(f"{n_pages} pages of {n_bytes:,} bytes for a row of {row_bytes:,}")
        return pages_PB.view(WORD), self.bytes_RB[row].view(n_pages, n_bytes).view(WORD)

    def release(self, row: int) -> None:
        """Return the row's physical memory to the system; it reads as zeros from now on."""
        self._memory.discard(row * self._stride, self._stride)


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
        cls, spec: ModelSpec, arena_PB: torch.Tensor, interior: range, state: Sequence[int], transition: Sequence[int]
    ) -> Segment:
        """Return a copy of pages of the arena, laid out as `spec.state` and as `spec.transition`.

        Without pages of transitions, transitions are identities.
        """
        transitions, (_, area) = None, spec.transition_place
        if len(transition):
            transitions = LaidOut.gathered(spec.transition, arena_PB, transition, area)
        return cls(interior, LaidOut.gathered(spec.state, arena_PB, state, spec.state_place[1]), transitions)
