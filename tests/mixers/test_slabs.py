"""Memory of weights: huge pages where the system has them, freed with the last weight in them."""

import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from headwater.mixers.weight_memory import CACHE_LINE, HUGE_PAGE, SLAB_BYTES, Slabs
from tests.mixers.test_linear import WEIGHTS

HAS_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage").is_dir()


def mappings() -> Iterator[tuple[range, set[str]]]:
    """The address ranges of this process and their flags."""
    addresses = range(0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if first == "VmFlags:":
            yield addresses, set(rest)
        elif not first.endswith(":"):
            addresses = range(*(int(part, 16) for part in first.split("-")))


def flags_at(address: int) -> set[str] | None:
    return next((flags for addresses, flags in mappings() if address in addresses), None)


@pytest.mark.skipif(not HAS_HUGE_PAGES, reason="this system has no transparent huge pages")
@pytest.mark.parametrize("kind", WEIGHTS)
def test_panels_of_every_format_lie_in_memory_with_huge_pages(kind: str) -> None:
    panels = pytest.importorskip("headwater.mixers.panels", reason="numba is not installed")
    held = panels.held(WEIGHTS[kind](100, 64), torch.float32)
    arrays = [part for part in held.arrays if np.size(part) > 64]  # smaller: tables of 16 numbers, and numbers
    assert len(arrays) >= (3 if kind.startswith("int") else 1)
    for array in arrays:
        assert "hg" in (flags_at(array.ctypes.data) or ())
    assert "hg" not in (flags_at(torch.zeros(1000).data_ptr()) or ()), "the control"


def test_tensors_are_zeros_that_do_not_overlap_and_begin_at_cache_lines() -> None:
    slabs = Slabs()
    shapes = [(3,), (5, 7), (1,), (HUGE_PAGE,), (SLAB_BYTES // 4,), (2,), (SLAB_BYTES // 4 + 3,), (0,), (9,)]
    tensors = [slabs.empty(shape, torch.float32) for shape in shapes]
    assert not any(tensor.any() for tensor in tensors)
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        assert tensor.shape == shape
        assert (tensor == number).all()
        assert tensor.data_ptr() % CACHE_LINE == 0


@pytest.mark.skipif(sys.platform != "linux", reason="mappings are read from /proc")
def test_a_slab_is_freed_with_the_last_of_its_tensors() -> None:
    slabs = Slabs()
    first, second = (slabs.empty((1000,), torch.bfloat16) for _ in range(2))
    address = first.data_ptr()
    view = second[500:].view(torch.int16).numpy()
    del first, second
    assert flags_at(address) is not None
    del view
    assert flags_at(address) is None
    assert not slabs.empty((4,), torch.float32).any(), "in a new slab"


@pytest.mark.parametrize("advice", [None, 10**6])
def test_without_huge_pages_memory_is_plain(advice: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if advice is None:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)  # as on macOS
    else:
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", advice, raising=False)  # which the kernel refuses
    tensor = Slabs().empty((1000,), torch.float32)
    assert not tensor.any()
    if sys.platform == "linux":
        assert "hg" not in (flags_at(tensor.data_ptr()) or ())
