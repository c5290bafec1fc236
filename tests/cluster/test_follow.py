"""Prefixes that are read from another worker while it computes them: no bit changes, and no page is lost."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq

from headwater.account import TierOutcome
from headwater.cache.segments.compose import marked
from headwater.cluster import peer_memory
from headwater.cluster.hosting import info_of
from headwater.cluster.sockets import opened
from headwater.cluster.wire import FollowMessage, Ping, Submit, encode
from headwater.cluster.worker import Worker as ClusterWorker
from headwater.engine.tiers.peers import STALL_SECONDS
from headwater.errors import OutOfPages, QueueFull, RequestTooLarge
from headwater.request import Constraint, Fidelity, Generation, SamplingParams
from headwater.schedule.sequence import key_of
from headwater.schedule.tiers import Peers
from tests.cluster.fake import FakeWorker, FormulaEngine, until
from tests.cluster.test_pulls import Worker, changing, pool, words
from tests.exactness.rig import Answer
from tests.support import Clock

PROMPT = 600  # tokens: two whole runs of KV, and a ragged one
STEP = 128
END = (PROMPT - 1) // 64 * 64
pytestmark = pytest.mark.usefixtures("short_runs")


class Gate:
    """Steps of an engine, which wait until they are let through."""

    def __init__(self, worker: Worker) -> None:
        self._steps, self._open = threading.Semaphore(0), threading.Event()
        run = worker.rig.engine.loop.execute

        def waiting(*given) -> None:
            while not (self._open.is_set() or self._steps.acquire(timeout=0.01)):
                pass
            run(*given)

        worker.rig.engine.loop.execute = waiting

    def let(self, steps: int) -> None:
        for _ in range(steps):
            self._steps.release()

    def open(self) -> None:
        self._open.set()


@contextmanager
def followed(make, **of_other) -> Iterator[tuple[Worker, Worker, Gate, Answer]]:
    """Yield a worker, whose prefill waits, one that follows it, the first one's gate, and its answer."""
    a, b = Worker(make, max_tokens_per_step=STEP), Worker(make, **of_other)
    with pool(a, b):
        gate = Gate(a)
        try:
            first = a.rig.submit(words(PROMPT, "follow"), 8)
            yield a, b, gate, first
        finally:
            gate.open()


def follow(b: Worker, a: Worker, first: Answer) -> int:
    return b.rig.engine.follow(a.incarnation, "", key_of(first.prompt))


def asking(b: Worker, first: Answer, number: int, *peers: Worker) -> Callable[[], Answer]:
    """Ask on a thread; return a function that waits for the answer."""
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(b.ask(first.prompt, *peers, follows=number)))
    thread.start()

    def wait() -> Answer:
        thread.join(60)
        return answers[0]

    return wait


def held_back(a: Worker) -> threading.Event:
    """Hold back the parts that a worker sends, until the event is set."""
    goes_on = threading.Event()

    def waiting(pieces: list[bytes]) -> list[bytes]:
        assert goes_on.wait(60)
        return pieces

    changing(a, waiting)
    return goes_on


def read(b: Worker) -> int:
    return b.counts.get("read", 0)


def free(worker: Worker) -> int:
    with worker.rig.engine.changed:
        return worker.cache.pool.free


def follows(b: Worker):
    return b.tiers.peers.follows


def test_kv_travels_while_the_prefill_runs(make, same_bits_as_without_a_cache) -> None:
    with followed(make) as (a, b, gate, first):
        number = follow(b, a, first)
        for steps, parts in ((2, 1), (2, 2)):
            gate.let(steps)
            until(lambda parts=parts: read(b) == parts)
            assert not first.done.is_set()
        assert b.cache.match(key_of(first.prompt), PROMPT).kv_tokens == 0, "nothing is published yet"
        gate.open()
        a.rig.wait(first)
        again = b.ask(first.prompt, a, follows=number)
        assert read(b) == a.pulling.sending.parts.sent == 5, "the tail is read once the request has come"
        assert not follows(b).open
    account = again.account
    assert (account.loaded_tokens, account.cached_tokens, account.loaded_from) == (PROMPT, PROMPT, "peer")
    assert account.tier_outcome == TierOutcome.LOADED
    assert all(same_bits_as_without_a_cache(make, [first, again]))


def test_pages_are_reserved_before_the_prefill_begins(make) -> None:
    """They are those of the whole prefix and its state, and are given back if the worker that prefills is lost."""
    with followed(make) as (a, b, _, first):
        before = free(b)
        number = follow(b, a, first)
        assert free(b) == before - END // 64 - make.checkpoint_pages
        assert a.cache.match(key_of(first.prompt), PROMPT).kv_tokens == 0, "nothing is computed yet"
        a.pulling.sending.close()
        a.pulling.sending.close = lambda: None
        b.pulling.know({b.peer})
        until(lambda: free(b) == before)
        b.rig.engine.unfollow(number)


def test_prefix_without_free_pages_is_not_followed(make, same_bits_as_without_a_cache) -> None:
    """A prompt that is followed later has its pages."""
    with followed(make) as (a, b, gate, first):
        reserve = b.cache.reserve
        b.cache.reserve = _no_pages
        number = follow(b, a, first)
        assert follows(b).open[number].is_over
        b.cache.reserve = reserve
        another = follow(b, a, first)
        assert follows(b).open[another].load is not None, "it joins none that is over"
        gate.open()
        a.rig.wait(first)
        again = b.ask(first.prompt, a, follows=another)
        b.rig.engine.unfollow(number)
    assert again.account.loaded_tokens == PROMPT
    assert all(same_bits_as_without_a_cache(make, [first, again]))


def _no_pages(*given) -> None:
    raise OutOfPages(1, 0, 0)


def test_a_request_that_comes_before_the_last_parts_waits_for_them(make, same_bits_as_without_a_cache) -> None:
    with followed(make) as (a, b, gate, first):
        number = follow(b, a, first)
        goes_on = held_back(a)
        gate.open()
        a.rig.wait(first)
        asked = asking(b, first, number, a)
        until(lambda: not follows(b).open)  # it has arrived
        goes_on.set()
        again = asked()
        assert read(b) == a.pulling.sending.parts.sent == 5, "no part was read twice"
    assert again.account.loaded_tokens == PROMPT
    assert all(same_bits_as_without_a_cache(make, [first, again]))


def test_a_request_whose_router_names_no_peers_joins_its_follow(make, same_bits_as_without_a_cache) -> None:
    with followed(make) as (a, b, gate, first):
        number = follow(b, a, first)
        gate.let(2)
        until(lambda: read(b) == 1)
        goes_on = held_back(a)
        gate.open()
        a.rig.wait(first)
        asked = asking(b, first, number)
        until(lambda: not follows(b).open)  # it has arrived
        goes_on.set()
        again = asked()
    assert (again.account.loaded_tokens, again.account.loaded_from) == (END, "peer")
    assert all(same_bits_as_without_a_cache(make, [first, again]))


@pytest.mark.parametrize("how", ["cancelled", "pages are short", "the holder is lost"])
def test_a_follow_that_is_given_up_gives_its_pages_back(make, monkeypatch, how) -> None:
    monkeypatch.setattr(peer_memory, "PART_SECONDS", 0.3)
    with followed(make) as (a, b, gate, first):
        before = free(b)
        number = follow(b, a, first)
        gate.let(2)
        until(lambda: read(b) == 1)
        assert free(b) < before
        if how == "cancelled":
            b.rig.engine.unfollow(number)
        elif how == "pages are short":
            with b.rig.engine.changed:
                b.tiers.make_room()
        else:
            a.pulling.sending.close()
            a.pulling.sending.close = lambda: None
        until(lambda: free(b) == before)
        b.rig.engine.unfollow(number)
        assert not follows(b).open


@pytest.mark.parametrize("error", [OSError, MemoryError])
def test_a_read_that_raises_ends_the_follow(make, error) -> None:
    def fail(*given) -> None:
        raise error("of the test")

    with followed(make) as (a, b, gate, first):
        before = free(b)
        b.tiers.peers.store._pieces = fail
        follow(b, a, first)
        gate.open()
        a.rig.wait(first)
        (one,) = follows(b).open.values()
        until(lambda: one.load is not None and one.load.is_finished)
        assert one.load.failed == TierOutcome.FAILED
        until(lambda: free(b) == before)
        assert not b.tiers.busy


def test_a_follow_without_progress_is_given_up(make, monkeypatch) -> None:
    clock = Clock()
    monkeypatch.setattr("headwater.engine.tiers.peers.time", clock)
    with followed(make) as (a, b, gate, first):
        before = free(b)
        follow(b, a, first)
        gate.let(2)
        until(lambda: read(b) == 1)
        clock.ahead = STALL_SECONDS + 1
        until(lambda: free(b) == before)
        assert not b.tiers.busy


def test_requests_of_one_prompt_share_a_read(make, same_bits_as_without_a_cache) -> None:
    """It continues until the last of them is cancelled."""
    with followed(make) as (a, b, gate, first):
        before = free(b)
        numbers = [follow(b, a, first) for _ in range(3)]
        gate.let(2)
        until(lambda: read(b) == 1)
        one = before - free(b)
        numbers.append(follow(b, a, first))
        b.rig.engine.unfollow(numbers.pop(0))
        gate.let(2)
        until(lambda: read(b) == 2)
        assert before - free(b) == one
        gate.open()
        a.rig.wait(first)
        answers = [b.ask(first.prompt, a, follows=number) for number in numbers]
        assert read(b) == a.pulling.sending.parts.sent == 5
        assert not follows(b).open
    assert [answer.account.cached_tokens for answer in answers] == [PROMPT] * 3
    assert all(same_bits_as_without_a_cache(make, [first, *answers]))


def test_a_shared_follow_is_given_up_with_its_last_request(make) -> None:
    with followed(make) as (a, b, gate, first):
        before = free(b)
        numbers = [follow(b, a, first) for _ in range(2)]
        gate.let(2)
        until(lambda: read(b) == 1)
        for number in numbers:
            assert free(b) < before
            b.rig.engine.unfollow(number)
        until(lambda: free(b) == before)


def test_another_request_with_the_prompt_ends_no_follow(make, same_bits_as_without_a_cache) -> None:
    with followed(make) as (a, b, gate, first):
        number = follow(b, a, first)
        gate.let(2)
        until(lambda: read(b) == 1)
        other = b.rig.ask(first.prompt)
        assert not follows(b).open[number].has_ended
        gate.open()
        a.rig.wait(first)
        again = b.ask(first.prompt, a, follows=number)
        assert read(b) == 4
    assert other.account.loaded_tokens == 0
    assert again.account.cached_tokens >= END
    assert all(same_bits_as_without_a_cache(make, [first, other, again]))


@contextmanager
def sent_to(worker: ClusterWorker, *messages) -> Iterator[None]:
    """Send a router's messages."""
    with opened(zmq.DEALER) as socket:
        socket.connect(worker.contact.address)
        for message in (Ping(is_first=True), *messages):
            socket.send(encode(message))
        yield


@pytest.mark.parametrize("error", [None, QueueFull(1, 1, 1.0), RequestTooLarge("of the test")], ids=str)
@pytest.mark.parametrize("constraint", [None, Constraint("regex", "a*")], ids=["no constraint", "constraint"])
def test_a_refused_request_gives_its_follow_up(error, constraint) -> None:
    """Constraints are compiled on another thread."""
    engine = FormulaEngine()
    engine.raises = error
    fake, prompt = FakeWorker(engine), key_of(words(100, "follow"))
    submit = Submit(1, 2, Generation((), SamplingParams(max_tokens=4, constraint=constraint)), prompt)
    with sent_to(fake.worker, FollowMessage(1, 1, "", prompt, b"x"), submit):
        until(lambda: engine.unfollowed or engine.submitted_follows)
    fake.worker.close()
    engine.close()
    assert (engine.submitted_follows, engine.unfollowed) == (([1], []) if error is None else ([], [1]))


def test_a_prefill_that_cannot_be_followed_ends_no_worker(make, caplog) -> None:
    """An engine that pulls nothing ignores the prefill; a prompt with a part of a token is an error."""
    b, prompt = Worker(make), key_of(words(100, "follow"))
    info = info_of(b.rig.engine, "one", 4, ("", ""))
    worker = ClusterWorker(b.rig.engine, info, b"i" * 16, "tcp://127.0.0.1:*")
    submit = Submit(3, 1, Generation((), SamplingParams(max_tokens=1)), prompt)
    worker.start()
    with pool(b):
        b.tiers.peers, peers = Peers(), b.tiers.peers
        with sent_to(worker, FollowMessage(1, 1, "", prompt, b"x")):
            until(lambda: list(worker._follows.values()) == [0])
        b.tiers.peers = peers
        with sent_to(worker, FollowMessage(2, 1, "", b"\1" * 1001, b"x"), submit):
            until(lambda: b.rig.engine.scheduler.cache.match(prompt, 101).kv_tokens)
        worker.close()
    assert "a prefill is not followed: ValueError" in caplog.text
    assert 2 not in {request for _, request in worker._follows}


def test_unfinished_parts_are_offered_to_no_other_request(make, same_bits_as_without_a_cache) -> None:
    """Another request pulls the present parts and does not wait; the followed ones still arrive."""
    with followed(make) as (a, b, gate, first):
        number = follow(b, a, first)
        gate.let(3)
        until(lambda: read(b) == 1)
        other = b.ask(first.prompt, a)
        assert b.counts.get("gone", 0) == 0, "nothing was asked for that is not there"
        gate.open()
        a.rig.wait(first)
        until(lambda: follows(b).open[number].load.is_finished)
        assert follows(b).open[number].load.failed is None
        again = b.ask(first.prompt, a, follows=number)
    assert other.account.tier_outcome == TierOutcome.LOADED
    assert 0 < other.account.loaded_tokens < END
    assert all(same_bits_as_without_a_cache(make, [first, other, again]))


def test_a_late_answer_about_progress_costs_no_other_pull(make, monkeypatch) -> None:
    """It waits behind the parts that the holder is sending."""
    monkeypatch.setattr(peer_memory, "FIND_SECONDS", 0.1)

    def slow(pieces: list[bytes]) -> list[bytes]:
        time.sleep(0.3)
        return pieces

    with followed(make) as (a, b, gate, first):
        changing(a, slow)
        gate.let(4)
        until(lambda: a.cache.match(key_of(first.prompt), PROMPT).kv_tokens >= 512)
        number = follow(b, a, first)
        until(lambda: read(b) == 2)
        channel = b.pulling.memory.channels[a.incarnation]
        assert channel.usable
        assert not follows(b).open[number].is_over
        monkeypatch.setattr(peer_memory, "PART_SECONDS", 0.1)
        a.pulling.sending.parts.progress = lambda prefix: time.sleep(0.3)
        until(lambda: follows(b).open[number].load.is_finished)
        assert channel.usable


def test_followed_prefix_is_sent_again_to_a_holder_that_forgot_it(make) -> None:
    with followed(make) as (a, b, gate, first):
        number = follow(b, a, first)
        gate.let(2)
        until(lambda: read(b) == 1)
        a.pulling.sending._prefixes.clear()
        gate.open()
        a.rig.wait(first)
        until(lambda: follows(b).open[number].load.is_finished)
        assert follows(b).open[number].load.failed is None
        assert read(b) == 4


def test_short_pages_go_to_requests_before_a_follow(make, same_bits_as_without_a_cache) -> None:
    """A request that needs the pages of a follow gets them, and the followed one is computed or pulled later."""
    with followed(make, pages=14 - 10 * make.checkpoint_pages) as (a, b, gate, first):
        number = follow(b, a, first)
        gate.let(2)
        until(lambda: read(b) == 1)
        other = b.rig.ask(words(PROMPT, "another"))
        (given_up,) = follows(b).open.values()
        assert given_up.load.is_finished
        assert given_up.load.failed == TierOutcome.FAILED
        gate.open()
        a.rig.wait(first)
        again = b.ask(first.prompt, a, follows=number)
    assert all(same_bits_as_without_a_cache(make, [first, other, again]))


def test_a_part_changed_on_the_way_spoils_the_whole(make, same_bits_as_without_a_cache) -> None:
    def flipped(pieces: list[bytes]) -> list[bytes]:
        pieces[2] = bytes([pieces[2][0] ^ 1]) + pieces[2][1:]
        return pieces

    with followed(make) as (a, b, gate, first):
        before = free(b)
        number = follow(b, a, first)
        gate.let(2)
        until(lambda: read(b) == 1)
        changing(a, flipped)
        gate.open()
        a.rig.wait(first)
        until(lambda: free(b) == before)
        assert b.counts["corrupt"] >= 1
        again = b.ask(first.prompt, a, follows=number)
    assert again.account.cached_tokens == 0
    assert all(same_bits_as_without_a_cache(make, [first, again]))


def test_a_state_that_was_not_kept_is_not_waited_for(make, same_bits_as_without_a_cache) -> None:
    """The prefill has ended without a state at the prefix's end: the request pulls what there is."""
    with followed(make) as (a, b, gate, first):
        parts = a.pulling.sending.parts
        progress = parts.progress
        parts.progress = lambda prefix: (progress(prefix)[0], 0)
        number = follow(b, a, first)
        gate.open()
        a.rig.wait(first)
        again = b.ask(first.prompt, a, follows=number)
    assert again.account.loaded_tokens == PROMPT, "by an ordinary load"
    assert all(same_bits_as_without_a_cache(make, [first, again]))


def test_cached_parts_are_not_read(make, same_bits_as_without_a_cache) -> None:
    with followed(make) as (a, b, gate, first):
        own = b.rig.ask(first.prompt[:375])
        number = follow(b, a, first)
        gate.open()
        a.rig.wait(first)
        again = b.ask(first.prompt, a, follows=number)
        assert read(b) == 4, "a run that begins there, the ragged one, the state and the tail"
    assert again.account.cached_tokens == PROMPT
    assert again.account.loaded_tokens == PROMPT - 375
    assert all(same_bits_as_without_a_cache(make, [first, own, again]))


def test_short_and_approximate_prompts_are_not_followed(make) -> None:
    """The control is a prompt of one page and a token, which is exact."""
    with followed(make) as (a, b, _, _):
        exact = key_of([1] * 65)
        for key in (key_of([1] * 64), marked(exact, 0, Fidelity.FAST), marked(exact, 63, Fidelity.FAST)):
            b.rig.engine.follow(a.incarnation, "", key)
        assert not follows(b).open
        number = b.rig.engine.follow(a.incarnation, "", exact)
        assert list(follows(b).open) == [number]


def test_an_unknown_worker_is_not_followed(make) -> None:
    with followed(make) as (_, b, _, first):
        before = free(b)
        number = b.rig.engine.follow(b"unknown", "", key_of(first.prompt))
        one = follows(b).open[number]
        until(lambda: one.is_over)
        b.rig.engine.unfollow(number + 10**9)
        assert follows(b).open == {number: one}
        b.rig.engine.unfollow(number)
        assert not follows(b).open
        until(lambda: one.load.is_finished)
        assert (one.load.failed, free(b)) == (TierOutcome.FAILED, before)
