"""Router and workers: requests reach workers, and a request outlives its worker without a lost or doubled token."""

import time
from dataclasses import replace
from functools import partial

import pytest

from headwater.cluster.assigning import NoWorker
from headwater.cluster.cost import Candidate, LeastCost, LeastLoaded, Prompt, RoundRobin
from headwater.cluster.routed import Routed
from headwater.cluster.router import HEARTBEAT_TIMEOUT_SECONDS
from headwater.cluster.sockets import ACTIONS_SECONDS, MAX_ACTIONS, Contact
from headwater.cluster.wire import (
    Batch,
    FailedMessage,
    Submit,
    TokenMessage,
    WireError,
    answer_of,
    encode,
    for_worker,
    from_worker,
)
from headwater.cluster.worker import ROUTER_TIMEOUT_SECONDS
from headwater.errors import (
    ConstraintError,
    DeadlineExceeded,
    EngineStopped,
    HeadwaterError,
    OutOfPages,
    QueueFull,
    RequestTooLarge,
)
from headwater.events import FailedEvent, TokenEvent
from headwater.request import Boundaries, Constraint, Drafting, Fidelity, Generation, SamplingParams, Span, Thought
from headwater.schedule.prefill_seconds import PrefillSpeed
from headwater.schedule.sequence import key_of
from headwater.server.observe.logs import log_worker_end
from tests.cluster.fake import LONG, FakeWorker, FormulaEngine, Received, asking, cluster, formula, kill, until

SLOW = 0.01  # seconds a token


def submit(router, generation: Generation) -> Received:
    received = Received()
    received.id = router.submit(generation, received.on_event)
    return received


def test_answers_are_the_workers() -> None:
    with cluster(a=FakeWorker(FormulaEngine()), b=FakeWorker(FormulaEngine())) as router:
        asked = [submit(router, asking(range(i, i + 9), 20)) for i in range(12)]
        for i, received in enumerate(asked):
            assert received.wait().tokens == formula(range(i, i + 9), 20)
            assert received.text == "".join(f"{token} " for token in received.tokens)
            assert received.finished.output_tokens == 20
        assert router.counts["answered"] == 12
        assert router.stats().running == 0
        workers = router.health()["workers"]
        assert [one["state"] for one in workers] == ["up", "up"]
        assert sum(one["answered"] for one in workers) == 12
        assert not any(one["open"] for one in workers)


@pytest.mark.parametrize("share", [1.0, 0.0])
def test_worker_logs_the_id_that_the_router_has(share: float, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with cluster(a=FakeWorker(FormulaEngine(), ended=partial(log_worker_end, share))) as router:
        submit(router, replace(asking([1, 2, 3], 4), request_id="req-7")).wait()
    lines = [record.message for record in caplog.records if record.name == "headwater.request"]
    assert lines == (["worker[0] prompt=3 cached=0 output=4 id=req-7"] if share else [])


def test_a_burst_of_requests_does_not_delay_heartbeats() -> None:
    with cluster(a=FakeWorker(FormulaEngine())) as router:
        waiting, ping = [], router._ping
        router._ping = lambda now: (waiting.append(len(router.actions)), ping(now))
        for _ in range(5 * MAX_ACTIONS):
            router.actions.put(lambda: time.sleep(0.002))
        until(lambda: not router.actions)
        assert any(waiting), "a heartbeat is sent while actions wait"


def test_few_actions_that_take_long_do_not_delay_heartbeats() -> None:
    with cluster(a=FakeWorker(FormulaEngine())) as router:
        waiting, ping = [], router._ping
        router._ping = lambda now: (waiting.append(len(router.actions)), ping(now))
        for _ in range(8):
            router.actions.put(lambda: time.sleep(1.2 * ACTIONS_SECONDS))
        until(lambda: not router.actions)
        assert any(waiting)


def test_counts_of_open_requests_return_to_zero() -> None:
    a, b = (FakeWorker(FormulaEngine(SLOW)) for _ in "ab")
    with cluster(a=a, b=b) as router:
        asked = [submit(router, asking(range(i, i + 9), 30)) for i in range(6)]
        for received in asked:
            received.wait_for(2)
        router.cancel(asked[0].id)
        kill(router, "a", a)
        for received in asked[1:]:
            received.wait()
        open_ = router.links["b"].outstanding
        assert (open_.number, open_.prompt_tokens, open_.uncached_tokens) == (0, 0, 0)


def test_memory_for_drafts_is_that_of_all_workers() -> None:
    """A server that takes the best drafts lets requests name `mtp` if there is any for the model's head."""
    with cluster(a=FakeWorker(FormulaEngine(), mtp_bytes=7), b=FakeWorker(FormulaEngine(), mtp_bytes=9)) as router:
        assert (router.mtp_bytes, router.draft_bytes) == (16, 0)


def test_the_rule_learns_that_a_worker_has_left() -> None:
    a = FakeWorker(FormulaEngine(SLOW))
    with cluster(a=a, b=FakeWorker(FormulaEngine(SLOW))) as router:
        calls = []
        router.assigning.selection.choice.ended = lambda prompt, name: calls.append(("ended", name))
        router.assigning.selection.choice.left = lambda name: calls.append(("left", name))
        received = submit(router, asking(range(9), 20))
        received.wait_for(1)
        (home,) = (link.name for link in router.links.values() if link.open)
        router.leave(home)
        received.wait()
        assert calls[:2] == [("ended", home), ("left", home)]


def test_without_a_seed_the_router_draws_one() -> None:
    worker = FakeWorker(FormulaEngine())
    with cluster(a=worker) as router:
        for _ in range(2):
            submit(router, asking([1, 2], 3, seed=None)).wait()
    first, second = (generation.params.seed for generation in worker.engine.seen)
    assert first != second
    assert None not in (first, second)


@pytest.mark.parametrize("after", [0, 1, 2, 30, 59])
def test_answer_continues_on_another_worker_after_a_loss(after: int) -> None:
    """After `after` tokens; the other worker sends the last of them again, and it is compared."""
    a, b = (FakeWorker(FormulaEngine(SLOW)) for _ in "ab")
    with cluster(a=a, b=b) as router:
        received = submit(router, asking(range(9), 60))
        until(lambda: a.engine.seen or b.engine.seen)
        received.wait_for(after)
        kill(router, *(("a", a) if a.engine.seen else ("b", b)))
        received.wait()
        assert received.error is None
        assert received.tokens == formula(range(9), 60)
        assert received.finished.output_tokens == 60
        assert router.counts["resumed"] + router.counts["moved"] == 1
        resumed = router.counts["resumed"] == 1
    assert len(a.engine.seen) == len(b.engine.seen) == 1
    assert resumed or not after
    assert sorted(a.engine.begun + b.engine.begun) == [False, resumed]


def test_a_silent_worker_is_lost() -> None:
    a, b = (FakeWorker(FormulaEngine(SLOW)) for _ in "ab")
    with cluster(heartbeat_timeout=HEARTBEAT_TIMEOUT_SECONDS, a=a, b=b) as router:
        received = submit(router, asking(range(9), 300))
        received.wait_for(3)
        (a if a.engine.seen else b).kill()
        assert received.wait().tokens == formula(range(9), 300)
        assert router.counts["resumed"] >= 1


def test_late_messages_and_those_of_another_incarnation_are_ignored() -> None:
    """An attempt that was given up, and a process that was there before."""
    workers = {name: FakeWorker(FormulaEngine(SLOW)) for name in "ab"}
    with cluster(**workers) as router:
        received = submit(router, asking(range(9), 200))
        received.wait_for(5)
        (home,) = (link for link in router.links.values() if link.open)
        (request,) = home.open.values()
        late = TokenMessage(request.id, request.attempt, TokenEvent(-1, "late"))
        kill(router, home.name, workers[home.name])
        until(lambda: len(request.sent) > 20)
        (link,) = router.links.values()
        router.actions.put(lambda: router._take(link, late))
        now = TokenMessage(request.id, request.attempt, TokenEvent(-1, "now"))
        assert link._of(Batch(b"another", [now])) == []
        assert link._of(Batch(link.incarnation, [now])) == [now]
        assert received.wait().tokens == formula(range(9), 200)


def test_an_answer_outlives_several_workers() -> None:
    workers = {name: FakeWorker(FormulaEngine(SLOW)) for name in "abc"}
    with cluster(**workers) as router:
        received = submit(router, asking(range(9), 80))
        for n in (10, 30):
            received.wait_for(n)
            (name,) = (link.name for link in router.links.values() if link.open)
            kill(router, name, workers[name])
            until(lambda gone=name: gone not in router.links)
        assert received.wait().tokens == formula(range(9), 80)
        assert router.counts["resumed"] == 2


def test_a_worker_whose_bits_differ_is_found_out() -> None:
    a, b = FakeWorker(FormulaEngine(SLOW)), FakeWorker(FormulaEngine(SLOW, other=1))
    with cluster(a=a) as router:
        received = submit(router, asking(range(9), 200))
        received.wait_for(5)
        router.join("b", b.worker.contact)
        until(lambda: len(router.links.infos) == 2)
        kill(router, "a", a)
        received.wait()
        n = len(received.tokens)
        assert received.tokens == formula(range(9), n)
        assert "their bits differ" in str(received.error)
        assert router.counts["diverged"] == 1
        b.worker.close()
        b.engine.close()


def test_worker_of_another_fingerprint_never_continues_an_answer() -> None:
    a, b = FakeWorker(FormulaEngine(SLOW)), FakeWorker(FormulaEngine(SLOW), fingerprint="another")
    with cluster(a=a, b=b) as router:
        asked = [submit(router, asking(range(i, i + 9), 100)) for i in range(2)]
        for received in asked:
            received.wait_for(3)
        kill(router, "a", a)
        ended = [received.wait() for received in asked]
        failed = [one for one in ended if one.error]
        assert len(failed) == 1, "each had one of them"
        assert isinstance(failed[0].error, NoWorker)
        assert "no worker with the same fingerprint" in str(failed[0].error)
        assert submit(router, asking([5], 10)).wait().tokens == formula([5], 10)


def test_a_request_waits_for_a_worker() -> None:
    with cluster() as router:
        received = submit(router, asking([3, 4], 6))
        worker = FakeWorker(FormulaEngine())
        router.join("late", worker.worker.contact)
        assert received.wait().tokens == formula([3, 4], 6)
        kill(router, "late", worker)
        worker.engine.close()
        assert isinstance(submit(router, asking([3, 4], 6)).wait().error, EngineStopped)


def test_a_cancelled_request_is_cancelled_at_its_worker() -> None:
    worker = FakeWorker(FormulaEngine(SLOW))
    with cluster(a=worker) as router:
        received = submit(router, asking([1], 10_000))
        received.wait_for(2)
        router.cancel(received.id)
        until(lambda: worker.engine.cancelled)
        assert worker.worker.open_requests == 0
        assert not router._requests


def test_workers_know_those_of_their_pool() -> None:
    parts = {name: Contact(f"tcp://{name}", name.encode()) for name in "abc"}
    a, b, c = (FakeWorker(FormulaEngine(), "two" if name == "c" else "one", parts=parts[name]) for name in "abc")
    with cluster(a=a, b=b, c=c, d=FakeWorker(FormulaEngine())) as router:
        until(lambda: a.known and a.known[-1] == {a.peer, b.peer})
        until(lambda: c.known and c.known[-1] == {c.peer})
        told = len(a.known)
        kill(router, "b", b)
        until(lambda: a.known[-1] == {a.peer})
        assert len(a.known) == told + 1, "nothing is told twice"
        a.worker._forget_silent(time.monotonic() + 2 * LONG)
        until(lambda: len(a.known) == told + 3)
        assert a.known[-2:] == [set(), {a.peer}], "those of a silent router are forgotten, until it is heard again"


def test_draining_worker_is_idle_once_known_and_no_request_needs_it() -> None:
    with cluster(a=FakeWorker(FormulaEngine())) as router:
        assert not router.is_idle("a"), "it does not drain"
        router.drain("a")
        until(lambda: router.is_idle("a"))
        info, router.links["a"].info = router.links["a"].info, None
        assert not router.is_idle("a"), "it was joined again"
        router.links["a"].info, waiting = info, Routed(1, asking([1], 2), lambda event: None, 0.0, b"")
        router.assigning.wait(waiting, "two")
        assert router.is_idle("a")
        router.assigning.wait(waiting, "one")
        assert not router.is_idle("a"), "that request can go on there alone"


def test_a_silent_router_has_its_requests_cancelled() -> None:
    worker = FakeWorker(FormulaEngine(SLOW), router_timeout=ROUTER_TIMEOUT_SECONDS)
    with cluster(a=worker) as router:
        submit(router, asking([1], 100_000)).wait_for(2)
        router._ping = lambda now: None
        until(lambda: worker.engine.cancelled)
        assert worker.worker.open_requests == 0


def test_a_router_that_was_away_has_its_requests_answered_all_the_same() -> None:
    """Its worker has cancelled them meanwhile, and is given them again."""
    worker = FakeWorker(FormulaEngine(SLOW), router_timeout=ROUTER_TIMEOUT_SECONDS)
    with cluster(a=worker) as router:
        received = submit(router, asking([1], 300))
        received.wait_for(5)
        knock, router._ping = router._ping, lambda now: None
        until(lambda: worker.engine.cancelled)
        router._ping = knock
        assert received.wait().tokens == formula([1], 300)
        assert router.counts["resumed"] >= 1


def test_a_router_that_did_not_run_takes_no_worker_for_silent() -> None:
    worker = FakeWorker(FormulaEngine(SLOW))
    with cluster(heartbeat_timeout=HEARTBEAT_TIMEOUT_SECONDS, a=worker) as router:
        received = submit(router, asking([1], 200))
        received.wait_for(5)
        router.actions.put(lambda: time.sleep(2 * HEARTBEAT_TIMEOUT_SECONDS))
        assert received.wait().tokens == formula([1], 200)
        assert list(router.links) == ["a"]


def test_a_draining_worker_gets_no_more_requests() -> None:
    a, b = (FakeWorker(FormulaEngine(SLOW)) for _ in "ab")
    with cluster(a=a, b=b) as router:
        asked = [submit(router, asking([i], 40)) for i in range(4)]
        for received in asked:
            received.wait_for(1)
        router.drain("a")
        before = len(a.engine.seen)
        for i in range(4):
            submit(router, asking([i, i], 3)).wait()
        assert len(a.engine.seen) == before
        assert [received.wait().error for received in asked] == [None] * 4
        until(lambda: router.is_idle("a"))


def test_requests_continue_on_others_after_a_workers_engine_stops() -> None:
    a, b = FakeWorker(FormulaEngine(SLOW)), FakeWorker(FormulaEngine(SLOW))
    with cluster(a=a, b=b) as router:
        lost = []
        router.lost = lost.append
        asked = [submit(router, asking([i], 60)) for i in range(4)]
        for received in asked:
            received.wait_for(3)
        a.engine.fail(EngineStopped("the engine failed: a kernel"))
        for i, received in enumerate(asked):
            assert received.wait().tokens == formula([i], 60)
        assert lost == ["a"]
        assert router.counts["resumed"] > 0
        assert submit(router, asking([9], 5)).wait().tokens == formula([9], 5)


def test_another_worker_gets_the_rest_of_a_deadline() -> None:
    a, b = (FakeWorker(FormulaEngine(SLOW)) for _ in "ab")
    with cluster(a=a, b=b) as router:
        received = submit(router, asking([1], 60, deadline=30.0))
        received.wait_for(20)
        first, second = (a, b) if a.engine.seen else (b, a)
        kill(router, "a" if first is a else "b", first)
        received.wait()
        assert 29.0 < first.engine.seen[0].deadline <= 30.0
        assert second.engine.seen[0].deadline < first.engine.seen[0].deadline - 0.1


def test_a_stopped_router_ends_its_requests() -> None:
    with cluster(a=FakeWorker(FormulaEngine(SLOW))) as router:
        received = submit(router, asking([1], 10_000))
        received.wait_for(1)
        router.stop()
        assert isinstance(received.wait().error, EngineStopped)
        with pytest.raises(EngineStopped):
            router.submit(asking([1], 2), received.on_event)


ERRORS = [
    QueueFull(3, 2, 9),
    DeadlineExceeded(1.5, 7, "request_timeout"),
    OutOfPages(5, 2, 1),
    ConstraintError("no such rule", "response_format"),
    RequestTooLarge("12 tokens, 8 fit"),
    EngineStopped("it stops"),
    HeadwaterError("the step failed"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_of_workers_keep_class_text_and_fields(error: Exception) -> None:
    (came,) = from_worker(encode(Batch(b"i", [answer_of(4, 2, FailedEvent(error))]))).messages
    assert isinstance(came, FailedMessage)
    assert (type(came.error), str(came.error), vars(came.error)) == (type(error), str(error), vars(error))


def test_other_errors_keep_their_text() -> None:
    (came,) = from_worker(encode(Batch(b"i", [answer_of(4, 2, FailedEvent(KeyError("x")))]))).messages
    assert (type(came.error), str(came.error)) == (HeadwaterError, "'x'")


def test_every_field_of_a_request_reaches_the_worker() -> None:
    constraint = Constraint("regex", "a+", "response_format", Constraint("lark", "start: X"))
    params = SamplingParams(9, 0.3, 5, 0.9, 0.1, 2**62, 1, ("x",), (3,), True, 2, 4, 1.1, 0.2, 0.3, ((7, -1.5),), 2)
    params = replace(params, constraint=constraint, thought=Thought("<think>", "</think>", True))
    whole = Generation(
        (1, 2, 3),
        params,
        "tenant",
        Boundaries(1, 2, 3, (4,)),
        False,
        2.5,
        "request_timeout",
        (Span(0, 2),),
        Fidelity.HIGH,
        Drafting("ngram", 3, (8, 9)),
        messages=((0, 1),),
    )
    sent = Submit(1, 2, replace(whole, prompt=()), key_of(whole.prompt), (5, 6))
    read = for_worker(encode(sent))
    assert read == sent
    assert read.whole == whole


@pytest.mark.parametrize("payload", [b"", b"\x01", b"\x91\xa3abc", encode(Submit(1, 1, asking([1], 1), b""))[:-3]])
def test_malformed_message_is_an_error(payload: bytes) -> None:
    for read in (for_worker, from_worker):
        with pytest.raises(WireError):
            read(payload)


def candidate(reusable: int = 0, running: int = 0, queued: int = 0, speed: float | None = 0.001) -> Candidate:
    prefill = None if speed is None else PrefillSpeed(0.0, speed)
    return Candidate(running, 0, queued, prefill, 1.0, 4, reusable)


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        ([candidate(), candidate(640)], 1),
        ([candidate(640, queued=2000), candidate()], 1),
        ([candidate(640, running=8), candidate(running=1)], 1),
        ([candidate(speed=0.004), candidate(speed=0.001, queued=1000)], 1),
        ([candidate(running=2), candidate(running=1)], 1),
        ([candidate(960), candidate(950)], 0),
    ],
)
def test_request_is_routed_to_the_soonest_first_token(candidates: list[Candidate], chosen: int) -> None:
    assert LeastCost().choose(Prompt(1000), candidates) == chosen


def test_equal_workers_have_turns() -> None:
    rule = LeastCost()
    assert {rule.choose(Prompt(10), [candidate()] * 3) for _ in range(6)} == {0, 1, 2}
    assert [RoundRobin().choose(Prompt(10), [candidate()] * 2)] == [0]
    assert LeastLoaded().choose(Prompt(10), [candidate(running=3), candidate(running=1)]) == 1


def test_a_worker_that_joins_again_at_its_address_keeps_its_requests() -> None:
    a = FakeWorker(FormulaEngine(SLOW))
    with cluster(a=a) as router:
        received = submit(router, asking(range(9), 60))
        received.wait_for(3)
        router.join("a", a.worker.contact)
        assert received.wait().tokens == formula(range(9), 60)
        assert router.counts["resumed"] == router.counts["moved"] == 0
    assert len(a.engine.seen) == 1
