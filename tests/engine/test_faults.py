"""Faults injected where a step can break: whom they take with them, and that the engine lives on."""

import threading
from collections.abc import Callable

import pytest

from headwater.engine.detokenizer import TextStream
from headwater.engine.engine import Engine
from headwater.errors import HeadwaterError
from headwater.request import Generation, SamplingParams
from tests.exactness.rig import Rig, words

PAGES = 500
PROMPTS = [words(200, 1), words(300, 2), words(150, 3)]


class Fault(Exception):
    """Error of a kind that no code expects."""


def breaking(call: Callable, when: Callable[[int], bool], after: bool = False) -> Callable:
    """The call, which raises at those of its calls (counted from 1) for which `when` holds; `after`: when done."""
    calls = 0

    def broken(*args, **named):
        nonlocal calls
        calls += 1
        if when(calls) and not after:
            raise Fault(f"call {calls}")
        result = call(*args, **named)
        if when(calls):
            raise Fault(f"call {calls}")
        return result

    return broken


def second(call: int) -> bool:
    return call == 2


PLACES: dict[str, Callable[[Engine], tuple[object, str]]] = {
    "reserve": lambda engine: (engine.scheduler.cache, "reserve"),
    "run": lambda engine: (engine.runner, "run"),
    "forward": lambda engine: (engine.runner.model, "forward"),
    "restore": lambda engine: (engine.runner.states, "restore"),
    "commit": lambda engine: (engine.scheduler.cache, "commit"),
    "sample": lambda engine: (engine.verification, "choices"),
    "match": lambda engine: (engine.scheduler.cache, "match"),
}


@pytest.mark.parametrize(
    ("place", "after"), [*((p, False) for p in PLACES), *((p, True) for p in PLACES if p != "reserve")]
)
def test_a_fault_fails_requests_of_its_step_and_the_engine_lives_on(make, monkeypatch, place, after):
    with make(PAGES, cache=False) as rig:
        expected = [rig.ask(prompt, 6).tokens for prompt in PROMPTS]
    with make(PAGES) as rig:
        for prompt in PROMPTS:
            rig.ask(prompt[:-1], 6)  # so that there is something to match and to restore
        rig.settle()
        target, name = PLACES[place](rig.engine)
        monkeypatch.setattr(target, name, breaking(getattr(target, name), second, after))
        answers = [rig.submit(prompt, 6) for prompt in PROMPTS]
        for answer in answers:
            assert answer.done.wait(60)
        failed = [answer for answer in answers if answer.error is not None]
        assert failed
        assert all(isinstance(a.error, HeadwaterError) and "call 2" in str(a.error) for a in failed)
        assert all(a.tokens == tokens for a, tokens in zip(answers, expected, strict=True) if a.error is None)
        monkeypatch.undo()
        assert rig.engine.health()["status"] == "ok"
        rig.settle()
        assert_nothing_is_held(rig)
        assert [rig.ask(prompt, 6).tokens for prompt in PROMPTS] == expected


def test_fault_in_advancing_a_prompt_without_rows_fails_only_that_request(make, monkeypatch):
    with make(PAGES) as rig:
        expected = [rig.ask(prompt, 6).tokens for prompt in PROMPTS]
        rig.settle()
        model = rig.engine.runner.model
        monkeypatch.setattr(model, "advance", breaking(model.advance, lambda call: call == 1, False))
        broken = rig.submit(PROMPTS[0], 6)
        assert broken.done.wait(60)
        assert isinstance(broken.error, HeadwaterError)
        assert [rig.ask(prompt, 6).tokens for prompt in PROMPTS] == expected


def test_fault_in_planning_or_publishing_fails_only_that_request(make, monkeypatch):
    for name in ("reserve", "commit"):
        with make(PAGES) as rig:
            cache = rig.engine.scheduler.cache
            monkeypatch.setattr(cache, name, breaking(getattr(cache, name), second))
            answers = [rig.submit(prompt, 6) for prompt in PROMPTS]
            for answer in answers:
                assert answer.done.wait(60)
            assert [answer.error is not None for answer in answers].count(True) == 1
            monkeypatch.undo()
            rig.settle()
            assert_nothing_is_held(rig)


def test_fault_in_allocating_a_tokens_page_fails_only_that_request(make, monkeypatch):
    with make(PAGES) as rig:
        expected = rig.ask(PROMPTS[1], 6).tokens
        scheduler, commit = rig.engine.scheduler, rig.engine.scheduler.cache.commit

        def broken(plan):
            if not scheduler.workload.legs:  # no leg's: the page that an answer grows into
                raise Fault("no page")
            commit(plan)

        monkeypatch.setattr(scheduler.cache, "commit", broken)
        answer = rig.submit(words(190, 4), 6)  # its third token is the first of a page
        assert answer.done.wait(60)
        monkeypatch.undo()
        assert isinstance(answer.error, HeadwaterError)
        assert rig.engine.health()["status"] == "ok"
        assert rig.ask(PROMPTS[1], 6).tokens == expected
        rig.settle()
        assert_nothing_is_held(rig)


def test_raising_listener_ends_only_its_own_request(make):
    with make(PAGES) as rig:
        expected = rig.ask(PROMPTS[0], 6).tokens
        told = threading.Event()

        def deaf(event: object) -> None:
            told.set()
            raise Fault("nobody listens")

        params = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)
        request = rig.engine.submit(Generation(tuple(PROMPTS[2]), params), deaf)
        beside = rig.submit(PROMPTS[0], 6)
        assert told.wait(60)
        assert rig.wait(beside).tokens == expected
        rig.settle()
        assert request not in rig.engine.answering.live
        assert_nothing_is_held(rig)


def test_undecodable_token_fails_only_its_own_request(make, monkeypatch):
    with make(PAGES) as rig:
        expected = rig.ask(PROMPTS[0], 6).tokens
        monkeypatch.setattr(TextStream, "push", breaking(TextStream.push, second))
        answers = [rig.submit(PROMPTS[0], 6) for _ in range(3)]
        assert all(answer.done.wait(60) for answer in answers)
        monkeypatch.undo()
        assert [type(answer.error) for answer in answers].count(Fault) == 1
        assert all(answer.tokens == expected for answer in answers if answer.error is None)
        assert rig.engine.health()["status"] == "ok"
        rig.settle()
        assert_nothing_is_held(rig)


def test_a_fault_in_every_step_never_hangs_anybody(make, monkeypatch):
    with make(PAGES) as rig:
        monkeypatch.setattr(rig.engine.runner, "run", breaking(rig.engine.runner.run, lambda call: call % 2 == 1))
        answers = [rig.submit(words(100, i), 3) for i in range(30)]
        assert all(answer.done.wait(60) for answer in answers)
        assert any(isinstance(answer.error, HeadwaterError) for answer in answers)
        monkeypatch.undo()
        rig.settle()
        assert_nothing_is_held(rig)


def assert_nothing_is_held(rig: Rig) -> None:
    cache = rig.engine.scheduler.cache
    cache.check()
    stats = cache.stats()
    assert stats.leases == stats.open_plans == stats.pages_private == stats.pages_slot == 0
    assert not rig.engine.answering.live
    assert stats.pages_free + stats.pages_kv + stats.pages_checkpoint + stats.pages_tail == PAGES
