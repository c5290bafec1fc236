"""The engine's thread: what it tells, and that it lives on."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from headwater.cli.machine_findings import OK, Finding
from headwater.cli.model_findings import of_dtype
from headwater.engine.answering import NoObserver
from headwater.engine.engine import Engine
from headwater.engine.loop import Deadlines
from headwater.engine.meter import PROBED
from headwater.engine.proof.fingerprint import Probe
from headwater.errors import (
    DeadlineExceeded,
    EngineStopped,
    HeadwaterError,
    QueueFull,
    RequestTooLarge,
)
from headwater.events import Event, FailedEvent, FinishedEvent, TokenEvent
from headwater.mixers.numerics import prepare_process
from headwater.models.load import load_model
from headwater.request import Boundaries, Generation, SamplingParams
from headwater.schedule.handover import Handover
from headwater.schedule.sequence import Sequence, key_of
from tests.exactness.rig import PATIENCE, Make, Rig, words


def begin(engine: Engine, generation: Generation, *handover: Handover) -> tuple[list[Event], threading.Event]:
    """Submit a request; return the list of its events, and an event that is set with the last of them."""
    events, done = list[Event](), threading.Event()

    def on_event(event: Event) -> None:
        events.append(event)
        if isinstance(event, FinishedEvent | FailedEvent):
            done.set()

    engine.submit(generation, on_event, *handover)
    return events, done


def collect(engine: Engine, generation: Generation, *handover: Handover) -> list[Event]:
    """Return all events of a request."""
    events, done = begin(engine, generation, *handover)
    assert done.wait(PATIENCE), "no answer"
    return events


def generation(prompt: list[int], **params) -> Generation:
    return Generation(
        tuple(prompt), SamplingParams(**{"max_tokens": 8, "temperature": 0, "ignore_eos": True, **params})
    )


def test_a_request_ends_with_its_length_and_account(make):
    with make(500) as rig:
        *tokens, end = collect(rig.engine, generation(words(100, 1)))
    assert [type(t) for t in tokens] == [TokenEvent] * 8
    assert isinstance(end, FinishedEvent)
    assert (end.finish_reason, end.output_tokens, end.account.prompt_tokens) == ("length", 8, 100)


def test_cached_prefix_is_published_before_the_answer_ends(make):
    """A next turn may follow at once, and be routed by what was published."""
    with make(500) as rig:
        engine, prompt, at_the_end, done = rig.engine, words(100, 1), [], threading.Event()
        cache, key = engine.scheduler.cache, key_of(prompt)
        published = [cache.match(key, 100).checkpoint_tokens]
        engine.stepped = lambda: published.append(cache.match(key, 100).checkpoint_tokens)

        def on_event(event) -> None:
            if not isinstance(event, TokenEvent):
                at_the_end.extend((published[-1], cache.match(key, 100).checkpoint_tokens))
                done.set()

        engine.submit(generation(prompt, max_tokens=1), on_event)
        assert done.wait(60)
    assert published[0] == 0
    assert at_the_end[0] == at_the_end[1] > 0


def test_joined_texts_are_the_decoded_tokens(make):
    with make(500) as rig:
        *tokens, end = collect(rig.engine, generation(words(100, 1), max_tokens=30))
        text = "".join(t.text for t in tokens) + end.text
        assert text == rig.engine.tokenizer.decode([t.token for t in tokens])


def test_a_stop_string_ends_the_text_before_it_also_across_token_borders(make):
    with make(500) as rig:
        *tokens, end = collect(rig.engine, generation(words(100, 1), max_tokens=30))
        whole = "".join(t.text for t in tokens) + end.text
        stop = whole[40:52]
        *tokens, end = collect(rig.engine, generation(words(100, 1), max_tokens=30, stop=(stop,)))
    assert "".join(t.text for t in tokens) + end.text == whole[: whole.index(stop)]
    assert (end.finish_reason, end.stop) == ("stop", stop)


def test_an_end_token_ends_the_answer_unless_it_is_to_be_ignored(make):
    with make(500) as rig:
        *tokens, _ = collect(rig.engine, generation(words(100, 1)))
        third = tokens[2].token
        first = next(i for i, t in enumerate(tokens) if t.token == third)
        *cut, end = collect(rig.engine, generation(words(100, 1), stop_token_ids=(third,)))
    assert [t.token for t in cut] == [t.token for t in tokens[:first]]
    assert (end.finish_reason, end.stop, end.output_tokens) == ("stop", third, first + 1)


def test_a_seed_gives_the_same_answer_hit_or_not(make):
    def tokens(rig: Rig) -> list[int]:
        return [e.token for e in collect(rig.engine, generation(words(300, 1), temperature=1.0, seed=7))[:-1]]

    with make(500) as rig:
        first, hit = tokens(rig), tokens(rig)
    with make(500, cache=False) as rig:
        cold = tokens(rig)
    assert first == hit == cold


def test_logprobs_are_those_of_the_logits(make):
    with make(500) as rig:
        answer = rig.ask(words(100, 1), 8)
        *tokens, _ = collect(rig.engine, generation(words(100, 1), logprobs=2))
    for event, logits_V in zip(tokens, answer.logits, strict=True):
        reference = torch.log_softmax(logits_V, -1)
        assert event.logprob == float(reference[event.token])
        assert [t.logprob for t in event.top] == reference.topk(2).values.tolist()


def test_two_engines_and_a_doctor_in_one_process_change_no_bit(make, loaded):
    def examine() -> list[Finding]:
        prepare_process(2)
        return list(of_dtype(loaded.spec, recheck=True))

    prompts = [words(200, name) for name in "ab"]
    with make(500) as rig:
        alone = [rig.ask(prompt, 20) for prompt in prompts]
    other = replace(make, loaded=load_model(loaded.path, "float32"))
    with make(500) as one, other(500) as two, ThreadPoolExecutor(1) as pool:
        doctor, rounds = pool.submit(examine), 0
        while not doctor.done() or rounds < 2:
            asked = [rig.submit(prompt, 20) for rig, prompt in zip((one, two), prompts, strict=True)]
            answers = [rig.wait(answer) for rig, answer in zip((one, two), asked, strict=True)]
            assert [a.same_bits(b) for a, b in zip(answers, alone, strict=True)] == [True, True]
            rounds += 1
        assert {finding.level for finding in doctor.result()} == {OK}


def test_failing_step_fails_only_its_own_requests(make, monkeypatch):
    with make(500) as rig:
        run = rig.engine.runner.run
        monkeypatch.setattr(rig.engine.runner, "run", lambda step: 1 / 0)
        [event] = collect(rig.engine, generation(words(100, 1)))
        assert isinstance(event, FailedEvent)
        assert isinstance(event.error, HeadwaterError)
        assert "division by zero" in str(event.error)
        monkeypatch.setattr(rig.engine.runner, "run", run)
        rig.engine.scheduler.cache.check()
        assert rig.engine.scheduler.cache.stats().pages_free == 500
        assert rig.ask(words(100, 1)).tokens
        assert rig.engine.health()["status"] == "ok"


def test_failed_engine_reports_the_error_to_waiting_and_new_requests(make, monkeypatch):
    rig = make(500)
    monkeypatch.setattr(rig.engine.scheduler, "plan_step", lambda: 1 / 0)
    rig.engine.start()
    [event] = collect(rig.engine, generation(words(100, 1)))
    assert isinstance(event, FailedEvent)
    assert rig.engine.health()["status"] == "failed: division by zero"
    with pytest.raises(EngineStopped, match="division by zero"):
        rig.engine.submit(generation(words(10, 1)), lambda event: None)


def test_stop_fails_waiting_requests(make):
    rig = make(500)
    answer = rig.submit(words(100, 1), 8)  # before the thread runs
    with rig._lock:
        rig.engine.loop.stopping = True
    rig.engine.start()
    rig.engine.stop()
    assert isinstance(answer.error, EngineStopped)
    with pytest.raises(EngineStopped):
        rig.submit(words(10, 1), 1)


def test_a_cancelled_request_is_gone_from_memory(make):
    with make(500) as rig:
        begun = threading.Event()
        request = rig.engine.submit(generation(words(600, 1), max_tokens=5000), lambda event: begun.set())
        assert begun.wait(60)
        rig.engine.cancel(request)
        rig.engine.cancel(request)
        rig.settle()
        stats = rig.engine.scheduler.cache.stats()
    assert stats.leases == stats.pages_private == stats.pages_slot == 0


def test_abandoned_prefill_hits_with_the_same_bits_when_sent_again(make):
    """The question is long, and has no checkpoint that a placement policy would have taken."""
    prompt, parts = words(1200, 1), Boundaries(system_end=100, query_start=103, query_end=1190)
    with make(500) as rig:
        cold = rig.ask(prompt, 3, boundaries=parts)
    with make(500, max_tokens_per_step=64) as rig:
        asked = Generation(tuple(prompt), SamplingParams(max_tokens=3), boundaries=parts)
        with rig.engine.changed:
            request = rig.engine.submit(asked, lambda event: None)
            rig.engine.stepped = lambda: (
                rig.engine.cancel(request) if rig.engine.prefilled(request) == (640, 1200) else None
            )
        rig.settle()
        assert rig.engine.prefilled(request) is None
        assert rig.engine.stats().cache.leases == 0
        again = rig.ask(prompt, 3, boundaries=parts)
    assert again.account.resumed_at == 704
    assert again.same_bits(cold)


def test_a_request_that_cannot_fit_is_refused_at_once(make):
    with make(40) as rig, pytest.raises(RequestTooLarge, match="the server takes"):
        rig.submit(words(40 * 64, 1), 10)


def test_request_beyond_the_trained_length_is_served_with_a_warning(make, caplog):
    with make(40) as rig:
        made_for = rig.engine.spec.max_length
        rig.engine.spec = replace(rig.engine.spec, max_length=100)
        rig.ask(words(90, 1), 10)
        assert not caplog.records
        rig.ask(words(91, 1), 10)
    assert made_for > 100
    assert caplog.messages == ["a request has 101 tokens, the model is made for 100"]


def test_request_past_its_deadline_fails_with_its_tokens_and_frees_memory(make):
    with make(500) as rig:
        late = replace(generation(words(100, 1), max_tokens=8000), deadline=0.2)
        *tokens, end = collect(rig.engine, late)
        assert isinstance(end, FailedEvent)
        assert isinstance(end.error, DeadlineExceeded)
        assert end.error.output_tokens == len(tokens)
        assert end.error.seconds == 0.2
        assert "0.2 s, the limit of timeout; " in str(end.error)
        rig.settle()
        assert rig.engine.stats().expired == 1
        assert rig.engine.stats().cache.leases == 0
        *tokens, end = collect(rig.engine, replace(generation(words(100, 1)), deadline=60))
        assert isinstance(end, FinishedEvent)
        assert len(tokens) == 8


def test_deadlines_of_ended_requests_are_forgotten():
    deadlines = Deadlines()
    for request in range(10):
        deadlines.add(10 - request, request)
    deadlines.forget_all_but({2, 3, 7})
    assert len(deadlines) == 3
    assert deadlines.take_passed(7.5) == [7, 3]
    assert deadlines.take_passed(7.9) == []


def test_full_queue_refuses_with_both_numbers_and_a_retry_time(make):
    rig = make(500, max_waiting=3)  # not started: nobody leaves the queue
    for i in range(3):
        rig.submit(words(10, i), 1)
    with pytest.raises(QueueFull, match="3 requests wait, the server takes 3; retry after") as refused:
        rig.submit(words(10, 9), 1)
    assert 1 <= refused.value.retry_after <= 60
    assert rig.engine.stats().refused == 1


def test_a_full_queue_makes_way_for_a_namespace_that_waits_less(make):
    rig = make(500, max_waiting=3)
    flood = [rig.submit(words(10, i), 1) for i in range(3)]
    rig.engine.submit(replace(generation(words(10, 9)), namespace="other"), lambda event: None)
    rig.engine.start()
    assert all(answer.done.wait(60) for answer in flood)
    assert [type(answer.error) for answer in flood] == [type(None), type(None), QueueFull]
    rig.engine.drain(60)
    rig.engine.stop()


def test_unservable_request_displaces_no_waiting_request(make):
    rig = make(500, max_waiting=3)
    for i in range(3):
        rig.submit(words(10, i), 1)
    too_large = replace(generation(words(10, 9)), namespace="other", params=SamplingParams(max_tokens=10**9))
    with pytest.raises(RequestTooLarge):
        rig.engine.submit(too_large, lambda event: None)
    assert len(rig.engine.scheduler.waiting) == 3


def test_drain_of_a_stopped_engine_returns_at_once(make):
    rig = make(500)
    rig.submit(words(10, 1), 1)
    rig.engine.stop()  # never started: the request stays where it is
    assert not rig.engine.drain()


def test_draining_engine_refuses_new_requests_and_finishes_running_ones(make):
    with make(500) as rig:
        answer = rig.submit(words(300, 1), 50)
        rig.engine.refuse_new()
        with pytest.raises(EngineStopped):
            rig.submit(words(10, 1), 1)
        assert rig.engine.health()["status"] == "draining"
        assert len(rig.wait(answer).tokens) == 50


def test_turn_seconds_grow_within_a_step_and_are_zero_between_steps(make, monkeypatch):
    with make(500) as rig:
        engine, run, entered, leave = rig.engine, rig.engine.runner.run, threading.Event(), threading.Event()

        def held(step):
            entered.set()
            leave.wait(PATIENCE)
            return run(step)

        assert engine.turn_seconds() == 0
        monkeypatch.setattr(engine.runner, "run", held)
        answer = rig.submit(words(100, 1), 1)
        assert entered.wait(PATIENCE)
        first = engine.turn_seconds()
        assert engine.turn_seconds() > first >= 0
        leave.set()
        rig.wait(answer)
        assert engine.drain(PATIENCE)
        assert engine.turn_seconds() == 0


def test_stats_count_computed_tokens(make):
    with make(500) as rig:
        rig.ask(words(300, 1), 8)
        rig.settle()
        stats = rig.engine.stats()
        assert (stats.prefill_tokens, stats.decode_tokens, stats.answer_tokens) == (300, 7, 8)
        rig.ask(words(300, 1), 30)  # its answer fills a page
        rig.settle()
        stats = rig.engine.stats()
    assert stats.prefill_tokens == 300
    assert (stats.decode_tokens, stats.answer_tokens) == (7 + 29, 8 + 30 - 8)
    assert stats.running == stats.waiting == stats.answers_waiting == stats.failed_steps == 0
    assert stats.step_seconds > 0
    assert stats.steps >= 8 + 30


def test_short_prompts_do_not_change_the_probes_estimate_for_long_ones(make: Make) -> None:
    with make(500) as rig:
        rig.engine.note_probe(Probe("", 0.5))
        speed = rig.engine.backlog().prefill
        assert speed.seconds(0, PROBED) == pytest.approx(0.5)
        for n in range(1, 10):
            collect(rig.engine, generation(words(n, n)))
        assert rig.engine.backlog().prefill.seconds(0, 8192) == speed.seconds(0, 8192)
        collect(rig.engine, generation(words(400, 99)))
        assert rig.engine.backlog().prefill.seconds(0, 8192) < speed.seconds(0, 8192), "half a second is slow"


def test_an_observer_sees_each_complete_answer_and_the_end(make: Make) -> None:
    seen: list[object] = []

    class Listener:
        def completed(self, seq: Sequence) -> None:
            seen.append(seq.n_output)

        def close(self) -> None:
            seen.append("closed")

    with make(pages=32) as rig:
        assert isinstance(rig.engine.answering.observer, NoObserver)
        rig.engine.answering.observer = Listener()
        for length in (3, 5):
            collect(rig.engine, generation(words(1, 40), max_tokens=length))
    assert seen == [3, 5, "closed"]


def test_stats_report_computed_tokens_and_held_pages(make):
    with make(500) as rig:
        collect(rig.engine, generation(words(200, 1)))
        assert rig.engine.drain(60)
        stats = rig.engine.stats()
        assert stats.prefill_tokens == 200
        assert stats.decode_tokens > 0
        assert stats.cache.checkpoints > 0
        assert stats.running == stats.waiting == stats.answers_waiting == 0
        assert sum(stats.cache.pages_by_use().values()) == stats.cache.pages_total


def test_idle_engine_provides_the_memory_that_a_next_turn_takes(make, monkeypatch):
    with make(500) as rig:
        layout, pool = rig.engine.scheduler.layout, rig.engine.scheduler.cache.pool
        provided, all_of_them = set(), threading.Event()

        def provide(page: int) -> None:
            provided.add(page)
            if len(provided) == 2 * (1 + layout.checkpoint_pages + max(layout.tail_pages)):
                all_of_them.set()

        monkeypatch.setattr(rig.engine.runner.arena, "provide", provide)
        collect(rig.engine, generation(words(100, 1)))
        assert all_of_them.wait(PATIENCE)
        ahead, free = set(provided), set(pool.kv.free_ids())
        collect(rig.engine, generation(words(100, 1) + words(20, 2)))
        assert rig.engine.drain(60)
        assert free - set(pool.kv.free_ids()) <= ahead


def test_the_tree_shows_a_resumed_prefix_as_hot(make):
    with make(500) as rig:
        for _ in range(2):
            collect(rig.engine, generation(words(200, 1)))
            assert rig.engine.drain(60)
        view = rig.engine.view()
        (hot,) = view.hottest
        assert (hot.tokens, hot.hits) == (192, 1)  # its checkpoint; the request resumed 8 tokens later
        assert view.total_nodes == rig.engine.stats().cache.nodes
        assert rig.engine.stats().cache.resumed_tokens == 200


def test_a_request_that_ends_tells_how_long_it_waited(make):
    with make(500) as rig:
        end = collect(rig.engine, generation(words(100, 1)))[-1]
    assert isinstance(end, FinishedEvent)
    assert end.queued_seconds is not None
    assert end.queued_seconds >= 0
