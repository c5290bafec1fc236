"""Segments in tiers: which are stored and when, which are loaded, and stores that fail or do not answer."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from headwater.account import TierOutcome
from headwater.config import ServeConfig
from headwater.engine.tiers import io
from headwater.engine.tiers import segments as segments_io
from headwater.request import Span
from headwater.schedule.tiers import Tiers
from headwater.tiers.memory import MemoryStore
from headwater.tiers.store import Store
from tests.engine.tiers.test_tier_io import Broken, outcomes
from tests.exactness.rig import DOCUMENTS, FAST, LEAD, Make, Rig, prompt_of, words
from tests.exactness.test_tier_segments import INTERIORS, OFF, ask, built, submit
from tests.exactness.test_tiers import AMPLE, KEY, OWN, copied, server
from tests.support import Clock

HOUR = 3600.0  # seconds
MADE = sum(len(document) - 8 for document in DOCUMENTS)


@pytest.fixture
def make(load) -> Make:
    return Make(*load("qwen3_5", "float32", 2), OFF)


class SegmentsAlone(Broken):
    """A store without states and KV."""

    def put(self, name, pieces, keep=frozenset()):
        if name.startswith("g"):
            super().put(name, pieces, keep)


@pytest.fixture
def store() -> SegmentsAlone:
    return SegmentsAlone()


@pytest.fixture
def first(make: Make, store: SegmentsAlone):
    """The answer of a server that has stored the documents."""
    with server(make, [store]) as rig:
        return ask(rig)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Clock by which lookups and loads of segments are late."""
    one = Clock()
    for module in (io, segments_io):
        monkeypatch.setattr(module, "time", one)
    return one


def until(rig: Rig, holds: Callable[[Tiers], object]) -> None:
    """Wait until something holds of a server's tiers."""
    changed, tiers = rig.engine.changed, rig.engine.scheduler.tiers
    with changed:
        assert any(changed.wait_for(lambda: holds(tiers), 0.01) for _ in range(6000))


def some_tier_answered(tiers: Tiers) -> bool:
    return any(one.tiers for one in tiers.segments.loads._sought.values())


def segments(store: Store) -> int:
    return sum(name.startswith("g") for name in store.catalog().entries)


@contextmanager
def selective(make: Make, store: Store, **more) -> Iterator[Rig]:
    with server(make, [store], **more) as rig:
        rig.engine.scheduler.tiers.copies.through = False
        yield rig


def test_selective_storing_takes_segments_that_are_reused(make: Make) -> None:
    store = MemoryStore(None)
    with selective(make, store) as rig:
        ask(rig)
        copied(rig)
        assert segments(store) == 0, "each was built for this request"
        ask(rig, DOCUMENTS[1:])
        copied(rig)
        assert segments(store) == 2


def test_all_that_is_left_is_stored_at_the_end(make: Make) -> None:
    store = MemoryStore(None)
    with selective(make, store) as rig:
        ask(rig)
        copied(rig)
        assert segments(store) == 0
        rig.engine.drain()
        end = time.monotonic() + 60
        rig.engine.stop(lambda: end - time.monotonic())
    assert segments(store) == 3
    with server(make, [store]) as rig:
        assert ask(rig).account.loaded_segments == 3


@pytest.mark.parametrize("call", ["has", "get", "put"])
def test_a_store_that_fails_costs_no_request(make: Make, store, first, call: str) -> None:
    store.fails.add(call)
    with server(make, [store]) as rig:
        again = ask(rig)
        copied(rig)
        assert built(rig) == (0 if call == "put" else MADE)
    assert again.same_bits(first)
    assert (again.account.loaded_segments, again.account.cold_tokens) == ((3, 0) if call == "put" else (0, INTERIORS))


@pytest.mark.parametrize("call", ["has", "get"])
def test_a_store_that_does_not_answer_is_not_waited_for(make: Make, store, first, clock: Clock, call: str) -> None:
    """A segment that is read too late is dropped if it was built meanwhile."""
    store.waits[call] = threading.Event()
    with server(make, [store]) as rig:
        tiers = rig.engine.scheduler.tiers
        tiers.timeout = 0.1  # of the prefix
        asked = submit(rig)
        until(rig, lambda tiers: len(tiers.segments) if call == "has" else len(tiers.segments.loads.open) == 3)
        clock.ahead = HOUR
        again = rig.wait(asked)
        assert tiers.busy
        store.waits[call].set()
        copied(rig)
        rig.engine.scheduler.cache.check()
        assert built(rig) == MADE
        assert len(rig.engine.scheduler.cache.segments) == 3
        assert rig.engine.scheduler.cache.stats().pages_segment == sum(
            one.pages for one in rig.engine.scheduler.cache.segments
        )
    assert again.account.tier_outcome == TierOutcome.SLOW
    assert again.same_bits(first)


def test_stored_segment_does_not_depend_on_earlier_content_of_its_pages(make: Make) -> None:
    """Its last page of KV is not full: the rest may be of another tenant, and must not get into a store."""
    contents = []
    for before in (0x00, 0xFF):
        store = SegmentsAlone()
        rig = make(AMPLE + 12 * make.checkpoint_pages)
        rig.engine.use_tiers([store], KEY, OWN, ServeConfig(tier=("disk:unused",), tier_store="through"))
        rig.engine.scheduler.tiers.prefill_seconds = lambda tokens: 1.0 * tokens
        rig.engine.runner.arena.pages.fill_(before)
        with rig:
            answer = ask(rig)
            copied(rig)
        contents.append((store._content, answer))
    (zeroed, one), (poisoned, other) = contents
    assert len(zeroed) == 3
    assert zeroed == poisoned
    assert one.same_bits(other)


def test_requests_for_one_segment_wait_for_one_load(make: Make, store, first) -> None:
    store.waits["get"] = threading.Event()
    with server(make, [store]) as rig:
        asked = [prompt_of(DOCUMENTS[:1], [*LEAD[:-1], i]) for i in range(4)]
        answers = [rig.submit(prompt, 4, segments=spans, **FAST) for prompt, spans in asked]
        until(rig, lambda tiers: tiers.segments.loads.open)
        beside = rig.ask(words(200, "beside"))  # others continue
        store.waits["get"].set()
        answers = [rig.wait(answer) for answer in answers]
        assert (built(rig), outcomes(rig)["read"]) == (0, 1)
    assert [answer.account.loaded_segments for answer in answers] == [1] * 4
    assert beside.account.loaded_tokens == 0


def test_segments_of_a_request_that_waits_for_a_slot_are_loaded_meanwhile(make: Make, store, first) -> None:
    with server(make, [store], max_running=1) as rig:
        loaded, run = threading.Event(), rig.engine.runner.run
        rig.engine.runner.run = lambda step: (loaded.wait(0.1), run(step))[
            1
        ]  # loads are faster, on a busy machine, too
        running = [rig.submit(words(100, "long", i), 120) for i in range(2)]  # a slot, and the reserved one's namespace
        queued = submit(rig)
        until(rig, lambda tiers: outcomes(rig).get("read", 0) == 3)
        assert not running[1].done.is_set(), "they were loaded only when a slot was free"
        loaded.set()
        again = rig.wait(queued)
        assert built(rig) == 0
    assert again.account.loaded_segments == 3
    assert again.same_bits(first)


@pytest.mark.parametrize(("seconds", "loaded"), [(1e-9, 0), (1.0, 3)])
def test_segments_are_loaded_only_if_that_beats_building(make: Make, store, first, seconds: float, loaded: int) -> None:
    with server(make, [store]) as rig:
        rig.engine.scheduler.tiers.prefill_seconds = lambda tokens: seconds * tokens
        again = ask(rig)
    assert again.account.loaded_segments == loaded
    assert again.account.tier_outcome == (TierOutcome.LOADED if loaded else TierOutcome.COMPUTING_IS_FASTER)
    assert again.same_bits(first)


def test_concurrent_loads_are_compared_with_concurrent_builds(make: Make, store, first) -> None:
    """Each takes a little less time to read than to build: the last one waits for the others either way."""
    with server(make, [store]) as rig:
        tiers = rig.engine.scheduler.tiers
        tiers.tiers[0].bandwidth.note(1e6, 1.0)
        size = tiers.segments._bytes
        longest = max(size(one) for one in rig_keys(rig))
        tiers.prefill_seconds = lambda tokens: 1.1 * (1e-3 + longest / 1e6)
        assert ask(rig).account.loaded_segments == 3


def rig_keys(rig: Rig):
    composer = rig.engine.scheduler.composer
    return [composer.wanted(document, "") for document in DOCUMENTS]


def test_warmed_segments_are_loaded_and_built_if_that_fails(make: Make, store, first) -> None:
    texts = [tuple(document) for document in DOCUMENTS]
    with server(make, [store]) as rig:
        assert rig.engine.warm_segments(texts, "") == ["stored"] * 3
        assert (built(rig), outcomes(rig)["read"]) == (0, 3)
        assert rig.engine.warm_segments(texts, "") == ["held"] * 3
        assert not rig.engine.scheduler.wanted
        assert not rig.engine.scheduler.background.awaited.outcomes
    store.fails.add("get")
    with server(make, [store]) as rig:
        assert rig.engine.warm_segments(texts, "") == ["stored"] * 3
        assert built(rig) == MADE


def test_a_prompt_that_is_one_segment_loads_it(make: Make, store, first) -> None:
    document = DOCUMENTS[0]
    with server(make, [store]) as rig:
        answer = rig.ask(document, 1, segments=(Span(0, len(document)),))
        assert (built(rig), outcomes(rig)["read"]) == (0, 1)
        assert rig.engine.warm_segments([tuple(document)], "") == ["held"]
    assert answer.account.tier_outcome == TierOutcome.LOADED
    assert answer.account.loaded_tokens == 0, "the end of a prompt is always computed"


def test_a_cancelled_request_leaves_nothing_behind(make: Make, store, first) -> None:
    store.waits["get"] = threading.Event()
    with server(make, [store]) as rig:
        submit(rig, DOCUMENTS[:1], 4)
        request = max(rig.engine.answering.live)
        until(rig, lambda tiers: tiers.segments.loads.open)
        rig.engine.cancel(request)
        store.waits["get"].set()
        copied(rig)
        rig.engine.scheduler.cache.check()
        assert ask(rig, DOCUMENTS[:1]).account.segments == 1
        assert (built(rig), outcomes(rig)["read"]) == (0, 1)


def test_loads_in_little_memory_end_and_pins_are_given_back(make: Make) -> None:
    """Memory holds some of the segments: requests are composed of what fits, and all of them end."""
    store, documents = SegmentsAlone(), [words(150 + 20 * i, "small", i) for i in range(6)]
    with server(make, [store]) as rig:
        rig.engine.warm_segments([tuple(document) for document in documents], "")
    assert segments(store) == 6
    pages = 8 + 4 * (make.checkpoint_pages + make.loaded.spec.transition_pages + 4)
    with server(make, [store], pages=pages) as rig:
        asked = []
        for i in range(8):
            prompt, spans = prompt_of([documents[(i + k) % 6] for k in range(3)], words(70, i), words(9, i))
            asked.append(rig.submit(prompt, 6, segments=spans, **FAST))
        for answer in asked:
            assert len(rig.wait(answer).tokens) == 6
        copied(rig)
        assert sum(answer.account.loaded_segments for answer in asked) > 0
        cache = rig.engine.scheduler.cache
        assert all(stored.pins == 0 for stored in cache.segments)
        assert cache.stats().evicted_segments > 0


def test_a_store_that_does_not_answer_delays_no_other_stores_segments(make, store, first, clock: Clock) -> None:
    slow = Broken()
    slow.waits["has"] = threading.Event()
    with server(make, [slow, store]) as rig:
        rig.engine.scheduler.tiers.timeout = 0.1  # of the prefix
        asked = submit(rig)
        until(rig, some_tier_answered)
        clock.ahead = HOUR
        again = rig.wait(asked)
        slow.waits["has"].set()
    assert again.account.loaded_segments == len(DOCUMENTS)


class Slow(MemoryStore):
    """A store that takes a while to answer lookups."""

    def has(self, names):
        time.sleep(0.1)
        return super().has(names)


def test_a_store_that_does_not_give_segments_delays_no_other(make: Make, store, first) -> None:
    """The slow one is asked for two segments, as many as it has threads, while another has the third."""
    slow, other = SegmentsAlone(), SegmentsAlone()
    with server(make, [slow]) as rig:
        ask(rig, DOCUMENTS[:2])
    with server(make, [other]) as rig:
        ask(rig, DOCUMENTS[2:])
    slow.waits["get"] = threading.Event()
    with server(make, [slow, other]) as rig:
        waiting = submit(rig, DOCUMENTS[:2])
        until(rig, lambda tiers: len(tiers.segments.loads.open) == 2)
        loaded = ask(rig, DOCUMENTS[2:])
        assert not waiting.done.is_set()
        slow.waits["get"].set()
        rig.wait(waiting)
    assert (loaded.account.loaded_segments, waiting.account.loaded_segments) == (1, 2)


def test_a_text_that_two_clients_warm_at_once_is_built_once(make: Make) -> None:
    text, done = tuple(DOCUMENTS[0]), []
    with server(make, [Slow(None)]) as rig:
        clients = [threading.Thread(target=lambda: done.append(rig.engine.warm_segments([text], ""))) for _ in range(2)]
        for one in clients:
            one.start()
        for one in clients:
            one.join(60)
        assert len(done) == 2
        assert built(rig) == len(text) - 8


@pytest.mark.parametrize("tiers", [True, False])
def test_a_document_that_stands_twice_in_a_prompt_is_built_once(make: Make, tiers: bool) -> None:
    """The second one ends the prompt, whose last token is computed: nothing of it is used, and both are missing."""
    document, between = DOCUMENTS[1], words(8, "between")
    prompt = [*LEAD, *document, *between, *document]
    spans = Span(len(LEAD), len(LEAD) + len(document)), Span(len(prompt) - len(document), len(prompt))
    with server(make, [Slow(None)] * tiers) as rig:
        answer = rig.ask(prompt, 2, segments=spans, **FAST)
        assert len(answer.tokens) == 2
        assert built(rig) == len(document) - 8


def test_segment_without_a_waiting_request_is_forgotten(make: Make, store, first, clock: Clock) -> None:
    """One tier has answered that it has it, the other never answers, and the request was cancelled."""
    hung = SegmentsAlone()
    hung.waits["has"] = threading.Event()
    with server(make, [store, hung]) as rig:
        tiers = rig.engine.scheduler.tiers
        tiers.timeout = 0.1  # of the prefix
        submit(rig)
        until(rig, some_tier_answered)
        rig.engine.cancel(max(rig.engine.answering.live))
        for _ in range(2):
            clock.ahead += HOUR
            with rig.engine.changed:
                tiers.take_late()
        assert not len(tiers.segments.loads._sought)
        hung.waits["has"].set()
