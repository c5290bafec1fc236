"""Segments in parallel: cold ones are computed by several workers and combined by one, and no bit changes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from benchmarks import segment_processes
from headwater.cache.segments.compose import METHODS
from headwater.cache.segments.store import SegmentKey
from headwater.cluster import preparing
from headwater.cluster.hosting import prepares
from headwater.engine.meter import Backlog
from headwater.errors import RequestTooLarge
from headwater.request import Fidelity, Generation, Span
from headwater.schedule.prefill_seconds import PrefillSpeed
from headwater.schedule.sequence import key_of
from headwater.schedule.tier_load import ReadSpeed
from tests.cluster import test_routed_answers
from tests.cluster.fake import kill, until
from tests.cluster.test_routed_answers import KINDS, RealWorker, Whole, ask, cluster, generation, settle
from tests.exactness.rig import words

FAST = ReadSpeed(0.001, 1e-7)
LENGTHS = (200, 130, 90, 170)
LEAD, QUESTION, SEAMS = 40, 30, 8


def composed(seed: str, kind: str = "greedy", lengths=LENGTHS, **more: object) -> Generation:
    """Return a request whose prompt has segments of these lengths between a leading part and a question."""
    more = {"fidelity": Fidelity.FAST, "max_tokens": 12, **more}
    at, spans = LEAD, []
    for length in lengths:
        spans.append(Span(at, at + length))
        at += length
    return generation(kind, words(at + QUESTION, seed), segments=tuple(spans), **more)


@contextmanager
def workers_of(model, *names: str) -> Iterator[tuple]:
    """Yield a router over workers of one fingerprint that say they are idle, equally fast, and pull fast.

    A pull always beats computing.
    """
    with cluster(model, **dict.fromkeys(names, "one")) as (router, workers):
        for worker in workers.values():
            worker.engine.scheduler.tiers.prefill_seconds = float  # a second a token
            worker.engine.backlog = lambda: Backlog(0, 0, 0, PrefillSpeed(0.0, 0.001), 1.0, pull=FAST)
        until(lambda: all(link.backlog.pull == FAST for link in router.links.values()))
        yield router, workers


@pytest.fixture(autouse=True)
def patience(monkeypatch) -> None:
    """Let requests wait for their segments on a busy machine, too."""
    monkeypatch.setattr(preparing, "WAIT_SECONDS", 60.0)


def of_one_worker(model, *asked: Generation) -> list[Whole]:
    with workers_of(model, "a") as (router, _):
        answers = [ask(router, one).wait() for one in asked]
        assert router.counts["combined"] == 0
    return answers


def built(workers: dict[str, RealWorker]) -> int:
    """Return the segment tokens that workers have computed."""
    return sum(worker.engine.stats().segment_tokens for worker in workers.values())


def cold(asked: Generation) -> int:
    return sum(span.end - span.start - SEAMS for span in asked.segments)


class Gate:
    """Holds a worker's steps until it is opened."""

    def __init__(self, worker: RealWorker, after: int = 0) -> None:
        """`after`: steps that run before."""
        self.reached, self._opened, self._left = threading.Event(), threading.Event(), after
        self._run = worker.engine.runner.run
        worker.engine.runner.run = self._held

    def _held(self, step):
        if self._left == 0:
            self.reached.set()
            assert self._opened.wait(60)
        self._left = max(0, self._left - 1)
        return self._run(step)

    def open(self) -> None:
        self._opened.set()


# -- bits


def test_cold_segments_computed_by_two_workers_have_the_bits_of_one(model) -> None:
    asked = composed("slice")
    (plain,) = of_one_worker(model, asked)
    with workers_of(model, "a", "b") as (router, workers):
        answer = ask(router, asked).wait()
        assert (router.counts["combined"], router.counts["segments_apart"]) == (1, 2), router.counts
        assert built(workers) == cold(asked), "each segment is computed once"
        assert all(worker.engine.stats().segment_tokens for worker in workers.values())
        pulls = [one for worker in workers.values() for one in worker.engine.stats().tiers]
        assert [sum(getattr(one, work) for one in pulls) for work in ("read", "corrupt", "errors")] == [2, 0, 0]
        until(lambda: all(link.outstanding.number == 0 for link in router.links.values()))
    assert answer.comparable == plain.comparable
    apart = replace(answer.finished.account, segments_apart=0)
    assert (apart, answer.finished.account.segments_apart) == (plain.finished.account, 2)


@pytest.mark.full
@pytest.mark.parametrize("fidelity", [Fidelity.FAST, Fidelity.BALANCED, Fidelity.HIGH, Fidelity.NAIVE])
def test_any_number_of_workers_has_the_same_bits(model, fidelity) -> None:
    """Every kind of answer, cold and again with its segments in another order, from 1, 2 and 3 workers."""
    kinds = [kind for kind in KINDS if kind != "prompt scores"]
    asked = [composed(kind, kind, (200, 130, 90, 170, 64), fidelity=fidelity) for kind in kinds]
    asked += [turned(one) for one in asked]
    plain = [one.comparable for one in of_one_worker(model, *asked)]
    for names in ("ab", "abc"):
        with workers_of(model, *names) as (router, _):
            answers = [ask(router, one).wait() for one in asked]
            assert router.counts["combined"] >= len(kinds), router.counts
        assert [one.comparable for one in answers] == plain, names


def turned(asked: Generation) -> Generation:
    """Return a request with the same segments in reversed order."""
    first, last = asked.segments[0].start, asked.segments[-1].end
    prompt, spans, at = list(asked.prompt[:first]), [], first
    for span in reversed(asked.segments):
        prompt += asked.prompt[span.start : span.end]
        spans.append(Span(at, at + span.end - span.start))
        at = spans[-1].end
    return replace(asked, prompt=(*prompt, *asked.prompt[last:]), segments=tuple(spans))


@pytest.mark.full
def test_workers_in_processes_have_the_bits_of_one() -> None:
    """With CURVE, real speeds and real heartbeats, as `cluster up` starts them but for Ray."""
    one, *others = (segment_processes.measure(count, 6, 400, None) for count in (1, 2, 3))
    for other in others:
        assert other.answers == one.answers
        assert other.row["cold_tokens"] == one.row["cold_tokens"] == [6 * (400 - 16)] * 3


@pytest.mark.full
@pytest.mark.parametrize("family", ["granite", "kimi_linear", "jamba", "ring", "mamba2", "qwen3"])
def test_segments_of_every_kind_of_layer_travel(load, family) -> None:
    model, asked = load(family, "float32", 2), composed("family")
    (plain,) = of_one_worker(model, asked)
    with workers_of(model, "a", "b") as (router, _):
        answer = ask(router, asked).wait()
        assert router.counts["segments_apart"] == 2
    assert answer.comparable == plain.comparable


# -- pulled and kept segments


@pytest.mark.full
def test_stored_segments_are_pulled_by_the_worker_that_combines(model) -> None:
    first, second = composed("stored"), turned(composed("stored"))
    plain = of_one_worker(model, first, second)
    with workers_of(model, "a", "b") as (router, workers):
        answers = [ask(router, first).wait()]
        settle(router)
        (home,) = (name for name, worker in workers.items() if worker.engine.stats().loaded_segments)
        workers[home].engine.backlog = lambda: Backlog(0, 0, 90_000, PrefillSpeed(0.0, 0.001), 1.0, pull=FAST)
        until(lambda: router.links[home].backlog.queued_tokens)
        answers.append(ask(router, second).wait())
        assert built(workers) == cold(first), "nothing is computed twice"
    assert [one.comparable for one in answers] == [one.comparable for one in plain]
    assert answers[1].finished.account.cold_tokens == 0


def test_turn_is_routed_to_the_composed_prefix_of_the_previous_turn(model, monkeypatch) -> None:
    """The router knows how deep it is; another worker has only the segments."""
    monkeypatch.setattr(test_routed_answers, "EVENTS", replace(test_routed_answers.EVENTS, healing="off"))
    first = composed("turns")
    with workers_of(model, "a", "b") as (router, _):
        answer = ask(router, first).wait()
        settle(router)
        second = replace(first, prompt=(*first.prompt, *answer.tokens, *words(40, "next")))
        account = ask(router, second).wait().finished.account
        assert account.approximate_tokens > 500
        assert account.resumed_at > len(first.prompt) - 64
        assert router.counts["cached_as_predicted"] == 2, router.counts


def test_a_tenants_segments_stay_where_they_are_used(model) -> None:
    asked = composed("tenant", namespace="tenant")
    with workers_of(model, "a", "b") as (router, workers):
        ask(router, asked).wait()
        assert (router.counts["combined"], built(workers)) == (0, cold(asked))
        assert not all(worker.engine.stats().segment_tokens for worker in workers.values())


def test_tokens_of_prepared_segments_are_not_counted_as_work_of_their_request(model) -> None:
    asked, seen = composed("counted"), []
    with workers_of(model, "a", "b") as (router, _):
        send = router.assigning.send
        router.assigning.send = lambda request, *to: (seen.append(request.outstanding.uncached), send(request, *to))
        account = ask(router, asked).wait().finished.account
    assert seen == [len(asked.prompt) - account.composed_tokens] == [LEAD + QUESTION + len(LENGTHS) * 2 * SEAMS]


def test_two_requests_compute_a_segment_once(model) -> None:
    asked = [composed("shared"), turned(composed("shared"))]
    plain = of_one_worker(model, *asked)
    with workers_of(model, "a", "b") as (router, workers):
        gates = [Gate(worker) for worker in workers.values()]
        open_answers = [ask(router, one) for one in asked]
        until(lambda: router.counts["routed"] == 2)
        for gate in gates:
            gate.open()
        answers = [one.wait() for one in open_answers]
        assert built(workers) == cold(asked[0])
    assert [one.comparable for one in answers] == [one.comparable for one in plain]


@pytest.mark.full
def test_a_segment_is_pulled_while_the_next_one_is_computed(model) -> None:
    """Long ones are finished one by one: the first is pulled before the worker has computed the second."""
    asked = composed("long", lengths=(1100, 1090, 1080, 1070), max_tokens=4)
    with workers_of(model, "a", "b") as (router, workers):
        gates = {name: Gate(worker) for name, worker in workers.items()}
        answer = ask(router, asked)
        until(lambda: all(gate.reached.is_set() for gate in gates.values()))
        (one,) = router.assigning.preparing.preparations.values()
        (other,) = (worker for name, worker in workers.items() if name != one.combiner.name)
        gates[one.combiner.name].open()
        seen: list[tuple[int, int]] = []
        is_asked = threading.Event()
        stored = other.pulling.sending.parts

        def sealed(*given, was=stored.sealed_segment):
            seen.append((other.engine.stats().segment_tokens, len(other.engine.scheduler.running)))
            is_asked.set()
            return was(*given)

        def run(step, was=other.engine.runner.run):
            assert other.engine.stats().segment_tokens < 1060 or is_asked.wait(60), "the second waits for the first"
            return was(step)

        stored.sealed_segment, other.engine.runner.run = sealed, run
        gates[next(name for name in gates if name != one.combiner.name)].open()
        assert answer.wait().error is None
        assert built(workers) == cold(asked)
    assert len(seen) == 2
    assert seen[0][1] == 1, "another is being computed"
    assert 1060 < seen[0][0] < 2100 < seen[1][0]


# -- losses


@pytest.mark.parametrize("lost", ["computes", "combines"])
def test_a_worker_that_is_lost_meanwhile_loses_nothing(model, lost) -> None:
    asked = composed("lost")
    (plain,) = of_one_worker(model, asked)
    with workers_of(model, "a", "b", "c") as (router, workers):
        gates = {name: Gate(worker) for name, worker in workers.items()}
        answer = ask(router, asked)
        until(lambda: all(gate.reached.is_set() for gate in gates.values()))
        (one,) = router.assigning.preparing.preparations.values()
        builders = {order.link.name for order in tuple(router.assigning.preparing.orders.values())}
        assert len(builders) == 3
        name = one.combiner.name if lost == "combines" else min(builders - {one.combiner.name})
        kill(router, name, workers[name])
        for gate in gates.values():
            gate.open()
        answer.wait()
        assert router.counts["moved"] == router.counts["resumed"] == 0, "it was with no worker yet"
        assert not router.assigning.preparing.orders
    assert answer.error is None
    assert answer.comparable == plain.comparable


@pytest.mark.full
@pytest.mark.parametrize("what", ["the sender fails", "a bit is flipped"])
def test_incomplete_segment_is_computed_by_the_combining_worker(model, what) -> None:
    asked = composed("gone")
    (plain,) = of_one_worker(model, asked)
    with workers_of(model, "a", "b") as (router, workers):
        for worker in workers.values():
            changing(worker, what)
        answer = ask(router, asked).wait()
        assert built(workers) > cold(asked)
        counts = [worker.engine.scheduler.tiers.peers.tier.counts for worker in workers.values()]
        assert bool(sum(one["corrupt"] for one in counts)) == (what == "a bit is flipped")
    assert answer.comparable == plain.comparable


def changing(worker: RealWorker, what: str) -> None:
    """Let a worker fail to send segments, or send them with another last byte of their content."""
    parts = worker.pulling.sending.parts
    if what == "the sender fails":
        parts._part_of = lambda stored: 1 / 0
        return
    seal = parts._sealer.seal

    def flipped(name, part):
        *pieces, last, digest = map(bytes, seal(name, part))
        return [*pieces, last[:-1] + bytes([last[-1] ^ 1]), digest]

    parts._sealer.seal = flipped


@pytest.mark.full
def test_a_request_does_not_wait_for_ever(model, monkeypatch) -> None:
    monkeypatch.setattr(preparing, "WAIT_SECONDS", 0.1)
    monkeypatch.setattr(preparing, "WAIT_FACTOR", 0.0)
    asked = composed("late")
    (plain,) = of_one_worker(model, asked)
    with workers_of(model, "a", "b") as (router, workers):
        gates = {name: Gate(worker) for name, worker in workers.items()}
        answer = ask(router, asked)
        until(lambda: router.assigning.preparing.preparations)
        (one,) = router.assigning.preparing.preparations.values()
        gates[one.combiner.name].open()
        answer.wait()
        assert router.counts["segments_late"] == 1
        for gate in gates.values():
            gate.open()
    assert answer.comparable == plain.comparable


def test_a_cancelled_request_leaves_nothing(model) -> None:
    with workers_of(model, "a", "b") as (router, workers):
        gates = [Gate(worker) for worker in workers.values()]
        received = Whole()
        number = router.submit(composed("cancelled", lengths=(1100, 1100, 1100, 1100)), received.on_event)
        until(lambda: all(gate.reached.is_set() for gate in gates))
        router.cancel(number)
        until(lambda: not (router.assigning.preparing.preparations or router.assigning.preparing.orders))
        until(lambda: not any(worker.worker.open_requests for worker in workers.values()))
        assert all(link.outstanding.number == 0 for link in router.links.values())
        for gate in gates:
            gate.open()
        until(lambda: all(worker.engine.scheduler.idle for worker in workers.values()))
        assert built(workers) <= 2 * 1100, "what had not begun is not computed"
        assert ask(router, composed("after")).wait().error is None, "a late event would have come before its end"
        assert not received.events


# -- what routers order


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        ((5,), ValueError),
        ((), ValueError),
        ((5,) * 16, ValueError),
        ((10**8,) * 100, ValueError),
        ((5,) * 99 + (-1,), ValueError),
        ((5,) * 100_000, RequestTooLarge),
    ],
    ids=["short", "empty", "ends alone", "beyond the vocabulary", "negative", "long"],
)
def test_order_without_a_valid_segment_is_an_error(model, ids: tuple[int, ...], error: type[Exception]) -> None:
    with workers_of(model, "a") as (_, workers):
        engine = workers["a"].engine
        with pytest.raises(error):
            prepares(engine)(segment_of(ids).encoded, (), lambda stored: None)
        assert engine.scheduler.idle


def segment_of(ids: tuple[int, ...]) -> SegmentKey:
    return SegmentKey("", key_of(ids), METHODS[Fidelity.FAST].widths(4))


def test_orders_cancelled_while_they_are_pulled_leave_nothing(model) -> None:
    with workers_of(model, "a", "b") as (router, workers):
        engine, scheduler = workers["a"].engine, workers["a"].engine.scheduler
        begun, goes_on, store = threading.Semaphore(0), threading.Event(), scheduler.tiers.peers.tier.store
        store.has = lambda names: [True] * len(names)
        store.read_into = lambda name, pieces: (begun.release(), not goes_on.wait(60))[-1]
        prepare, peers = prepares(engine), (router.links["b"].incarnation,)
        for n in range(4):
            goes_on.clear()
            cancel = prepare(segment_of(tuple(words(200, f"cancelled {n}"))).encoded, peers, lambda stored: None)
            assert begun.acquire(timeout=60)
            cancel()
            goes_on.set()
            until(lambda: not scheduler.tiers.busy)
        ended = threading.Event()
        prepare(segment_of(tuple(words(200, "last"))).encoded, (), lambda stored: ended.set())
        assert ended.wait(60)
        until(lambda: scheduler.idle)
        assert not scheduler.background.awaited.outcomes
        assert not scheduler.background.awaited.loaded
