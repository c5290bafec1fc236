"""Stored tensors of a segment, read from pages."""

from __future__ import annotations

import pytest
import torch

from headwater.memory.slots import LaidOut, StateMemory
from headwater.state_layout import StateLayout

PAGE_BYTES = 4096
PARTS = (("recurrent", (4, 16, 40), "float32"), ("conv", (33, 3), "bfloat16"))
LAYOUT = StateLayout.of([(layer, name, shape, dtype) for layer in (0, 2) for name, shape, dtype in PARTS])


def test_views_equal_the_saved_bits() -> None:
    n_pages = -(-LAYOUT.bytes // PAGE_BYTES)
    states = StateMemory(LAYOUT, 3, n_pages * PAGE_BYTES)
    for number, part in enumerate(LAYOUT.parts):
        states.view(part.layer, part.name)[1] = torch.randn(part.shape, generator=torch.Generator().manual_seed(number))
    arena_PB, page_ids = torch.zeros(20, PAGE_BYTES, dtype=torch.uint8), [17, 3, 4, 11, 0, 9, 8][:n_pages]
    states.save(1, arena_PB, page_ids)
    stored = LaidOut.gathered(LAYOUT, arena_PB, page_ids)
    arena_PB.zero_()
    for part in LAYOUT.parts:
        view = stored.view(part.layer, part.name)
        assert view.is_contiguous()
        assert view.dtype == getattr(torch, part.dtype_name)
        assert torch.equal(view, states.view(part.layer, part.name)[1])


def test_missing_part_and_too_few_bytes_are_refused() -> None:
    stored = LaidOut(LAYOUT, torch.zeros(LAYOUT.bytes, dtype=torch.uint8))
    with pytest.raises(KeyError):
        stored.view(1, "recurrent")
    with pytest.raises(ValueError, match=f"{LAYOUT.bytes - 1:,}"):
        LaidOut(LAYOUT, torch.zeros(LAYOUT.bytes - 1, dtype=torch.uint8))
