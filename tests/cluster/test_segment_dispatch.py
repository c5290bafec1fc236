"""Segments of a request that are prepared by several workers: which are sent where, and when they are waited for."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.parallel_segments import in_turns, smallest_count
from headwater.cache.segments.compose import Widths
from headwater.cache.segments.store import SegmentKey
from headwater.cluster import preparing, segment_dispatch
from headwater.cluster.cost import Candidate, OpenRequests, Prompt
from headwater.cluster.preparing import MAX_OPEN_ORDERS, MAX_SEGMENTS, Needed, Preparing
from headwater.cluster.routed import Routed
from headwater.cluster.segment_dispatch import (
    MAX_COMBINERS,
    Lane,
    Segment,
    dispatch,
    longest_first,
    ready_at,
    soonest,
)
from headwater.cluster.wire import Cancel, Prepare, PreparedMessage
from headwater.request import Generation, SamplingParams
from headwater.schedule.prefill_seconds import PrefillSpeed
from headwater.schedule.tier_load import ReadSpeed

FAST, SLOW = ReadSpeed(1e-4, 1e-7), ReadSpeed(1e-3, 1e-2)
IDLE = Candidate(0, 0, 0, PrefillSpeed(0.0, 1e-3), 1.0, 8, 0, pool="one", pull=FAST)
COLD = [Segment(100 + 500 * n, 500, 484, ()) for n in range(4)]
PROMPT = Prompt(2200)


def idle(workers: int) -> list[Lane]:
    return [Lane(0.0, 1e-3) for _ in range(workers)]


def loads(tokens: list[int], assigned: list[int], workers: int) -> list[int]:
    return [sum(n for n, to in zip(tokens, assigned, strict=True) if to == worker) for worker in range(workers)]


# -- equation 9


def test_equation_9_assigns_by_descending_tokens_to_the_smallest_count() -> None:
    assert smallest_count([300, 900, 500, 500, 100], idle(2)) == [0, 0, 1, 1, 1]
    assert smallest_count([2400] * 11, idle(4)) == [0, 1, 2, 3] * 2 + [0, 1, 2]
    assert smallest_count([], idle(3)) == []


def test_equation_9_as_printed_looks_at_nothing_but_tokens() -> None:
    uneven = [Lane(9.0, 1.0, SLOW), Lane(0.0, 1e-3)]
    assert smallest_count([5, 4, 3], uneven) == smallest_count([5, 4, 3], idle(2)) == [0, 1, 1]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=6), st.integers(1, 3))
def test_the_longest_first_are_within_grahams_bound_of_the_least(tokens: list[int], workers: int) -> None:
    """Graham (1969): LPT is at most 4/3 - 1/(3m) of the least maximum of equation 9."""
    assignments = product(range(workers), repeat=len(tokens))
    least = min(max(loads(tokens, list(one), workers)) for one in assignments)
    found = max(loads(tokens, smallest_count(tokens, idle(workers)), workers))
    assert found <= least * (4 / 3 - 1 / (3 * workers)) + 1e-9


def test_the_longest_first_beat_turns_on_uneven_segments() -> None:
    tokens = [4000, 300, 3500, 200, 3000, 100]
    assert max(loads(tokens, in_turns(tokens, idle(2)), 2)) == 10_500
    assert max(loads(tokens, smallest_count(tokens, idle(2)), 2)) == 6_500


# -- in seconds


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=20), st.integers(1, 8))
def test_among_idle_equal_workers_seconds_are_equation_9(tokens: list[int], workers: int) -> None:
    """Seconds of a token are a power of two, so that sums are not rounded: equal counts are equal seconds."""
    lanes = [Lane(0.0, 2**-10)] * workers
    assert soonest(tokens, lanes) == smallest_count(tokens, lanes)


def test_queues_speeds_and_transfers_count() -> None:
    assert soonest([500, 500], [Lane(5.0, 1e-3), Lane(0.0, 1e-3)]) == [1, 1]
    assert soonest([500, 500, 500], [Lane(0.0, 1e-3), Lane(0.0, 5e-4)]) == [1, 0, 1]
    assert soonest([500, 500], [Lane(0.0, 1e-3), Lane(0.0, 1e-3, SLOW)]) == [0, 0]
    assert smallest_count([500, 500], [Lane(5.0, 1e-3), Lane(0.0, 1e-3)]) == [0, 1]


def test_segments_are_pulled_one_by_one_while_the_next_are_computed() -> None:
    pull = ReadSpeed(0.0, 1e-4)  # a tenth of computing
    apart = [Lane(0.0, 1e-3, pull)]
    assert ready_at([1000, 1000, 1000], apart, [0, 0, 0]) == pytest.approx(3.1), "the last one alone is waited for"
    three = [Lane(0.0, 1e-3, pull)] * 3
    assert ready_at([1000, 1000, 1000], three, [0, 1, 2]) == pytest.approx(1.3), "they come at once"
    assert ready_at([1000], [Lane(0.0, 1e-3)], [0], pulling=2.0) == 2.0
    assert longest_first([5, 9, 9, 1]) == [1, 2, 0, 3]


# -- one or several workers


def test_cold_segments_are_computed_by_idle_workers_together() -> None:
    found = dispatch(PROMPT, COLD, [IDLE, IDLE], [0, 1])
    assert not found.is_alone
    assert sorted(found.builders.values()) == [0, 0, 1, 1]
    assert found.interiors == 4 * 484
    alone = dispatch(PROMPT, COLD, [IDLE], [0])
    assert alone.is_alone
    assert found.seconds == pytest.approx(alone.seconds - 1.0, abs=0.01), "half of 2,000 tokens"


@pytest.mark.parametrize(
    ("others", "segments"),
    [
        pytest.param({"pull": SLOW}, COLD, id="transfers take longer than computing"),
        pytest.param({"pull": None}, COLD, id="nothing is pulled"),
        pytest.param({}, COLD[:1], id="one segment"),
        pytest.param({"queued_tokens": 3000}, COLD[:1], id="all are equally busy"),
    ],
)
def test_one_worker_has_all_where_nothing_is_gained(others: dict, segments: list[Segment]) -> None:
    workers = [replace(IDLE, **others)] * 2
    found = dispatch(PROMPT, segments, workers, [0, 1])
    assert found.is_alone
    assert found.seconds == dispatch(PROMPT, segments, workers[:1], [0]).seconds


def test_workers_that_are_busy_or_of_another_pool_compute_none() -> None:
    busy, other = replace(IDLE, queued_tokens=20_000, running=1), replace(IDLE, pool="another")
    found = dispatch(PROMPT, COLD, [busy, IDLE, other, IDLE], [0, 1, 3])
    assert set(found.builders.values()) == {1, 3}
    assert found.combiner in (1, 3)


def test_stored_segments_are_pulled_and_only_cold_ones_computed() -> None:
    stored = [replace(one, holders=(1,)) for one in COLD[:2]]
    found = dispatch(PROMPT, [*stored, *COLD[2:]], [IDLE, replace(IDLE, queued_tokens=9000)], [0, 1])
    assert (found.combiner, found.pulled, set(found.builders)) == (0, {0: 1, 1: 1}, {2, 3})
    slow = replace(IDLE, pull=SLOW)
    found = dispatch(PROMPT, [*stored, *COLD[2:]], [slow, replace(slow, queued_tokens=9000)], [0, 1])
    assert (found.combiner, found.pulled, set(found.builders)) == (0, {}, {0, 1, 2, 3}), "pulling would take longer"


def test_the_worker_that_has_segments_combines_them() -> None:
    stored = [replace(one, holders=(1,)) for one in COLD]
    found = dispatch(PROMPT, stored, [replace(IDLE, pull=ReadSpeed(0.05, 1e-7)), IDLE], [0, 1])
    assert (found.combiner, found.is_alone, found.builders) == (1, True, {})


STORED = [replace(one, stores={1: ("STORAGE", "CPU")}) for one in COLD]


def test_the_worker_that_has_segments_stored_loads_them_and_combines() -> None:
    owner = replace(IDLE, queued_tokens=200, loads={"STORAGE": SLOW, "CPU": FAST})
    found = dispatch(PROMPT, STORED, [IDLE, owner], [0, 1])
    assert (found.combiner, found.is_alone, found.builders, found.loaded) == (1, True, {}, [0, 1, 2, 3])
    held = dispatch(PROMPT, [replace(one, holders=(1,)) for one in COLD], [IDLE, owner], [1])
    assert found.seconds == pytest.approx(held.seconds + 4 * (FAST.seconds(500) + FAST.state))


@pytest.mark.parametrize(
    ("loads", "why"), [({"CPU": SLOW}, "computing is faster"), ({}, "the store cannot be read, or is not measured")]
)
def test_segments_that_are_not_worth_a_load_are_computed(loads: dict[str, ReadSpeed], why: str) -> None:
    found = dispatch(PROMPT, STORED, [IDLE, replace(IDLE, loads=loads)], [0, 1])
    assert found == dispatch(PROMPT, COLD, [IDLE, IDLE], [0, 1]), why


def test_a_segment_is_pulled_or_loaded_whichever_is_sooner() -> None:
    there = [replace(STORED[0], holders=(0,)), *COLD[1:]]
    slower = ReadSpeed(2e-4, 1e-7)
    for pull, load, loaded in ((FAST, slower, []), (slower, FAST, [0])):
        one = replace(IDLE, pull=pull, loads={"CPU": load})
        found = dispatch(PROMPT, there, [replace(one, queued_tokens=9000), one], [1])
        assert (found.loaded, found.pulled) == (loaded, {} if loaded else {0: 0})


def test_segments_inside_a_cached_prefix_are_not_needed() -> None:
    ahead = replace(IDLE, reusable=1152, cached=1152)
    found = dispatch(PROMPT, COLD, [ahead], [0])
    assert set(found.builders) == {3}
    assert found.interiors == 484


def test_a_worker_that_only_prefills_computes_and_does_not_combine() -> None:
    found = dispatch(PROMPT, COLD, [IDLE, IDLE], [1])
    assert found.combiner == 1
    assert 0 in found.builders.values()


@given(
    st.lists(st.tuples(st.integers(16, 5000), st.sets(st.integers(0, 6))), min_size=1, max_size=12),
    st.lists(st.integers(0, 9000), min_size=7, max_size=7),
)
def test_several_workers_never_take_longer_than_one(found: list, queues: list[int]) -> None:
    at, segments = 0, []
    for tokens, holders in found:
        segments.append(Segment(at, tokens, tokens - 8, tuple(holders)))
        at += tokens
    workers = [replace(IDLE, queued_tokens=queue) for queue in queues]
    together = dispatch(Prompt(at + 9), segments, workers, range(7))
    own = [replace(one, pool=str(n)) for n, one in enumerate(workers)]
    assert together.seconds <= dispatch(Prompt(at + 9), segments, own, range(7)).seconds + 1e-9
    needed = {*together.builders, *together.pulled}
    assert needed == {n for n, one in enumerate(segments) if together.combiner not in one.holders}


def test_a_dispatch_is_computed_for_few_of_many_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(tokens, lanes):
        asked.append(next(n for n, lane in enumerate(lanes) if lane.hand_over is None))
        return soonest(tokens, lanes)

    workers = [replace(IDLE, queued_tokens=100 * (16 - n)) for n in range(16)]
    stored = [replace(one, holders=(0,)) for one in COLD]
    monkeypatch.setattr(segment_dispatch, "soonest", counted)
    dispatch(PROMPT, stored, workers, range(16))
    assert sorted(asked) == [0, 13, 14, 15], "the one that lacks none, and those that are soonest free"
    assert len(asked) == MAX_COMBINERS


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
