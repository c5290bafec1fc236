"""Rows of states: views, copies to and from pages, and memory given back."""

import mmap
from pathlib import Path

import pytest
import torch

from headwater.memory.slots import LaidOut, StateMemory
from headwater.state_layout import StateLayout

PAGE_BYTES = 4096
LAYOUT = StateLayout.of(
    [
        (layer, name, shape, dtype)
        for layer in (0, 2)
        for name, shape, dtype in (("recurrent", (4, 16, 40), "float32"), ("conv", (33, 3), "bfloat16"))
    ]
)


def memory(rows: int = 5) -> StateMemory:
    n_pages = -(-LAYOUT.bytes // PAGE_BYTES)
    return StateMemory(LAYOUT, rows, n_pages * PAGE_BYTES)


def arena(n_pages: int = 20) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (n_pages, PAGE_BYTES), dtype=torch.uint8, generator=generator)


def test_views_are_the_layouts_parts_and_do_not_overlap() -> None:
    states = memory()
    for number, part in enumerate(LAYOUT.parts):
        view = states.view(part.layer, part.name)
        assert view.shape == (5, *part.shape)
        assert view.dtype == getattr(torch, part.dtype_name)
        assert view[0].is_contiguous()
        view.fill_(number + 1)
    for number, part in enumerate(LAYOUT.parts):
        assert (states.view(part.layer, part.name) == number + 1).all()


def test_save_and_restore_are_bit_exact_and_touch_nothing_else() -> None:
    states, pages_PB = memory(), arena()
    states.bytes_RB.copy_(arena(5 * states.bytes_RB.shape[1] // PAGE_BYTES).view(5, -1).flip(1))
    n_pages = states.bytes_RB.shape[1] // PAGE_BYTES
    page_ids = [17, 3, 4, 11, 0, 9, 8][:n_pages]
    rows_before, pages_before = states.bytes_RB.clone(), pages_PB.clone()
    states.save(1, pages_PB, page_ids)
    assert torch.equal(pages_PB[page_ids].flatten(), rows_before[1])
    others = [p for p in range(len(pages_PB)) if p not in page_ids]
    assert torch.equal(pages_PB[others], pages_before[others])
    states.restore(3, pages_PB, page_ids)
    assert torch.equal(states.bytes_RB[3], rows_before[1])
    assert torch.equal(states.bytes_RB[[0, 1, 2, 4]], rows_before[[0, 1, 2, 4]])


def test_rows_of_no_bytes_are_saved_into_no_pages() -> None:
    """As the states of a model with only attention, in any slot."""
    states, pages_PB = StateMemory(StateLayout.of([]), 5, 0), arena()
    before = pages_PB.clone()
    for row in range(5):
        states.save(row, pages_PB, [])
        states.release(row)
    assert torch.equal(pages_PB, before)


def test_every_bit_pattern_survives_as_nan_payloads_do() -> None:
    states, pages_PB = memory(), torch.zeros(20, PAGE_BYTES, dtype=torch.uint8)
    patterns = torch.tensor([0x7FA00001, 0x7F800001, -0x3FFFFF, 1, -(2**31)], dtype=torch.int32).view(torch.uint8)
    states.bytes_RB[0, : len(patterns)] = patterns
    page_ids = list(range(states.bytes_RB.shape[1] // PAGE_BYTES))
    states.save(0, pages_PB, page_ids)
    states.restore(1, pages_PB, page_ids)
    assert torch.equal(states.bytes_RB[1, : len(patterns)], patterns)


def test_zero_clears_one_row() -> None:
    states = memory()
    states.bytes_RB.fill_(7)
    states.zero(2)
    assert not states.bytes_RB[2].any()
    assert (states.bytes_RB[[0, 1, 3, 4]] == 7).all()


def test_a_row_too_small_for_the_layout_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=rf"{LAYOUT.bytes:,} bytes, a row has 64"):
        StateMemory(LAYOUT, 1, 64)


def test_a_wrong_number_of_pages_is_refused() -> None:
    states = memory()
    with pytest.raises(ValueError, match="1 pages of 4,096 bytes for a row of"):
        states.restore(0, arena(), [1])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_rows_take_memory_when_used_and_give_it_back() -> None:
    megabytes = 32
    layout = StateLayout.of([(0, "recurrent", (megabytes << 18,), "float32")])
    before = resident_bytes()
    states = StateMemory(layout, 64, layout.bytes)  # 2 GiB of address space
    assert resident_bytes() - before < layout.bytes
    for row in (3, 4):
        states.bytes_RB[row].fill_(1)
    assert resident_bytes() - before > 1.9 * layout.bytes
    states.release(3)
    assert resident_bytes() - before < 1.5 * layout.bytes
    assert not states.bytes_RB[3].any()
    assert states.bytes_RB[4].all()


def test_views_of_a_stored_segment_equal_the_saved_bits() -> None:
    states, n_pages = memory(3), -(-LAYOUT.bytes // PAGE_BYTES)
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
