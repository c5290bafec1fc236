"""Bytes of pages are those of the arena, in place or staged; reads and fills are complete on return."""

import threading
from collections import Counter
from contextlib import contextmanager

import pytest
import torch

from headwater.memory import page_bytes as module
from headwater.memory.page_bytes import BytesInPlace, CardLane, PageBytes, StagedBytes, page_bytes
from tests.staging import STALE, LateLane, NeverWaits

PAGES, SIZE = 40, 512


@pytest.fixture
def arena() -> torch.Tensor:
    return torch.randint(0, 256, (PAGES, SIZE), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


def spread(content: bytes):
    """Return a function that fills memory with `content`."""

    def read(views: list[memoryview]) -> None:
        for i, view in enumerate(views):
            view[:] = content[i * SIZE : (i + 1) * SIZE]

    return read


def test_on_a_cpu_nothing_is_copied(arena: torch.Tensor) -> None:
    bytes_of = page_bytes(arena)
    assert isinstance(bytes_of, BytesInPlace)
    (view,) = bytes_of.views([7])
    arena[7].fill_(1)
    assert bytes(view) == bytes([1] * SIZE)
    assert bytes_of.fill([8], lambda views: views[0].__setitem__(0, 9)) is None
    assert arena[8, 0] == 9


@pytest.mark.parametrize("staged", [False, True])
def test_pages_are_read_and_filled_to_the_bit_in_any_order(arena: torch.Tensor, staged: bool) -> None:
    bytes_of: PageBytes = StagedBytes(arena, LateLane) if staged else page_bytes(arena)
    before, some = arena.clone(), [31, 2, 3, 39, 0]
    assert bytes_of.page_bytes == SIZE
    assert b"".join(bytes_of.views(some)) == before[some].numpy().tobytes()
    assert bytes_of.views([]) == []
    new = torch.randint(0, 256, (5, SIZE), dtype=torch.uint8)
    assert bytes_of.fill(some, spread(new.numpy().tobytes())) is None
    expected = before.clone()
    expected[some] = new
    assert arena.equal(expected)


def test_pages_that_follow_each_other_are_one_copy(arena: torch.Tensor) -> None:
    counts = Counter[str]()
    bytes_of = StagedBytes(arena, lambda: LateLane(counts))
    bytes_of.views([4, 5, 6, 9, 8, 7, 20, 21])
    assert counts["copied"] == 5
    bytes_of.fill(range(10, 30), spread(bytes(20 * SIZE)))
    assert counts["copied"] == 6
    assert not arena[10:30].any()


def test_incomplete_read_is_not_copied_to_the_card(arena: torch.Tensor) -> None:
    bytes_of, before = StagedBytes(arena, LateLane), arena.clone()

    def fails(views: list[memoryview]) -> str:
        views[0][:] = bytes(SIZE)
        return "corrupt"

    assert bytes_of.fill([1, 2], fails) == "corrupt"
    assert arena.equal(before)


def test_a_lane_that_is_not_waited_for_shows(arena: torch.Tensor) -> None:
    """Control."""
    bytes_of, before = StagedBytes(arena, NeverWaits), arena.clone()
    assert b"".join(bytes_of.views([1])) == bytes([STALE] * SIZE)
    bytes_of.fill([1], spread(bytes(SIZE)))
    assert arena.equal(before)


def test_threads_do_not_share_memory(arena: torch.Tensor) -> None:
    """Each keeps its views while the others read and fill."""
    bytes_of, wrong = StagedBytes(arena, LateLane), list[int]()
    barrier = threading.Barrier(4)

    def work(number: int) -> None:
        mine = list(range(10 * number, 10 * number + 10))
        for turn in range(20):
            content = bytes([16 * number + turn % 16]) * (10 * SIZE)
            barrier.wait()
            bytes_of.fill(mine, spread(content))
            views = bytes_of.views(mine)
            barrier.wait()
            if b"".join(views) != content:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


class Card:
    """Stand-in for `torch.cuda`: it notes calls, and copies when a stream is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.within: Card.Stream | None = None
        monkeypatch.setattr(torch.cuda, "Stream", self.Stream)
        monkeypatch.setattr(torch.cuda, "stream", self.entered)
        empty = torch.empty

        def pinned(size: int, *, dtype: torch.dtype, pin_memory: bool = False) -> torch.Tensor:
            self.calls.append(f"{size} {'pinned' if pin_memory else 'bytes'}")
            return empty(size, dtype=dtype)

        monkeypatch.setattr(module.torch, "empty", pinned)
        copy = torch.Tensor.copy_

        def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            assert non_blocking
            assert self.within is not None, "on the steps' stream"
            self.within.begun.append(lambda: copy(target, source))
            return target

        monkeypatch.setattr(torch.Tensor, "copy_", copy_)

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.begun: list = []

        def synchronize(self) -> None:
            for copy in self.begun:
                copy()
            self.begun.clear()

    @contextmanager
    def entered(self, stream: Stream):
        self.within = stream
        yield
        self.within = None


def test_card_copies_use_their_own_stream_and_pinned_memory_grows(
    arena: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = arena.clone()
    with monkeypatch.context() as patch:
        card = Card(patch)
        patch.setattr(module, "MAX_PINNED_BYTES", 9 * SIZE)
        bytes_of = StagedBytes(arena, lambda: CardLane(torch.device("cuda")))
        found = [b"".join(bytes_of.views(pages)) for pages in ([4], [4, 5, 9], [9, 8, 7, 6], range(12), [0])]
        bytes_of.fill([3, 1], spread(bytes(2 * SIZE)))
    assert found == [before[list(pages)].numpy().tobytes() for pages in ([4], [4, 5, 9], [9, 8, 7, 6], range(12), [0])]
    assert not arena[[3, 1]].any()
    assert card.calls == ["0 bytes", f"{SIZE} pinned", f"{4 * SIZE} pinned", f"{12 * SIZE} bytes"]
