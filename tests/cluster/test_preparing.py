"""Preparations of a router without workers: orders to workers, and the work of its thread."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import pytest

from headwater.cache.segments.compose import Widths
from headwater.cache.segments.store import SegmentKey
from headwater.cluster import preparing
from headwater.cluster.cost import Candidate, OpenRequests, Prompt
from headwater.cluster.preparing import MAX_OPEN_ORDERS, MAX_SEGMENTS, Needed, Preparing
from headwater.cluster.routed import Routed
from headwater.cluster.wire import Cancel, Prepare, PreparedMessage
from headwater.request import Generation, SamplingParams
from headwater.schedule.prefill_seconds import PrefillSpeed
from headwater.schedule.tier_load import ReadSpeed

LENGTH = 40


class Holder:
    """Worker that has no segment, and notes its orders."""

    def __init__(self, name: str) -> None:
        self.name, self.incarnation, self.outstanding = name, name.encode(), OpenRequests()
        self.sent: list[Prepare | Cancel] = []

    def has_segment(self, digest: int) -> bool:
        return False

    def stores_of(self, digest: int) -> list[str]:
        return []

    def send(self, message: Prepare | Cancel) -> None:
        self.sent.append(message)


class Rig:
    """Preparations over idle workers."""

    def __init__(self, workers: int) -> None:
        self.links = [Holder(f"w{n}") for n in range(workers)]
        self.ready: list[Routed] = []
        self.preparing = Preparing(count(1), self.ready.append, Counter())
        self._digests = count(1)

    def needed(self, segments: int) -> list[Needed]:
        """Return segments that no other request has."""
        return [
            Needed(n * LENGTH, SegmentKey("", bytes(4 * LENGTH), Widths(8, 8)), next(self._digests))
            for n in range(segments)
        ]

    def combine(self, needed: list[Needed]) -> tuple[Routed, int | None]:
        request = Routed(next(self._digests), Generation((), SamplingParams()), lambda event: None, 0.0, b"")
        fast = ReadSpeed(1e-4, 1e-7)
        given = 0, 0, 0, PrefillSpeed(0.0, 1e-3), 1.0, 8, 0
        workers = [Candidate(*given, name=one.name, pool="one", pull=fast) for one in self.links]
        prompt = Prompt(len(needed) * LENGTH + 9)
        return request, self.preparing.combine(request, needed, prompt, self.links, workers, range(len(workers)))

    @property
    def is_clean(self) -> bool:
        one = self.preparing
        open_ = [link.outstanding.number for link in self.links]
        return not (one.orders or one._by_segment or one.preparations or any(open_))


@contextmanager
def counting_lines(module: object) -> Iterator[Counter[str]]:
    """Count the lines of a module that run."""
    lines, file = Counter[str](), module.__file__

    def trace(frame, event: str, argument: object) -> Callable | None:
        lines["run"] += event == "line"
        return trace if frame.f_code.co_filename == file else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


def test_work_per_request_is_independent_of_open_orders() -> None:
    rig, work = Rig(4), []
    for _ in range(4):
        with counting_lines(preparing) as lines:
            assert rig.combine(rig.needed(60))[1] is None
        work.append(lines["run"])
    assert work[-1] < 1.05 * work[0]
    assert work[0] < 60 * 40


def test_one_request_and_all_together_are_bounded() -> None:
    rig = Rig(4)
    assert rig.combine(rig.needed(MAX_SEGMENTS + 1))[1] is not None
    assert rig.is_clean
    found = [rig.combine(rig.needed(MAX_SEGMENTS))[1] for _ in range(MAX_OPEN_ORDERS // MAX_SEGMENTS + 2)]
    assert [at is None for at in found] == [True] * (MAX_OPEN_ORDERS // MAX_SEGMENTS) + [False] * 2
    assert len(rig.preparing.orders) == MAX_OPEN_ORDERS


@pytest.mark.parametrize("end", ["prepared", "cancelled", "lost"])
def test_orders_that_end_are_given_again(end: str) -> None:
    rig = Rig(2)
    needed = rig.needed(4)
    request, at = rig.combine(needed)
    assert at is None
    while rig.preparing.orders:
        if end == "cancelled":
            rig.preparing.cancel(request)
        elif end == "lost":
            for link in rig.links:
                rig.preparing.lost(link)
        else:
            rig.preparing.prepared(PreparedMessage(next(iter(rig.preparing.orders)), 0, True))
    assert rig.is_clean
    assert rig.ready == ([] if end == "cancelled" else [request])
    before = [len(link.sent) for link in rig.links]
    rig.combine(needed)
    assert [len(link.sent) - n for link, n in zip(rig.links, before, strict=True)] == [2, 2]
