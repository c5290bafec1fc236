"""Answers that another engine began: they go on after any of their tokens with the same bits."""

import threading
from collections.abc import Sequence

import pytest

from headwater.config import ServeConfig
from headwater.engine.engine import Engine
from headwater.errors import QueueFull
from headwater.events import Event, FinishedEvent, TokenEvent
from headwater.request import Constraint, Fidelity, Generation, SamplingParams, Span
from headwater.schedule.handover import Handover
from tests.engine.test_engine import collect
from tests.exactness.rig import words

PROMPT = words(150, "resumed")
FORM = '{"type": "object", "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}}, "required": ["n"]}'
KINDS = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1.1, "seed": 5, "top_p": 0.9, "logprobs": 3},
    "second choice": {"temperature": 1.0, "seed": 5, "choice": 1},
    "penalties": {"temperature": 0.8, "seed": 6, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "bias": {"temperature": 0, "presence_penalty": 0.5, "logit_bias": ((5, 1.0), (9, -4.0)), "min_tokens": 8},
    "form": {"temperature": 0.7, "seed": 7, "constraint": Constraint("json_schema", FORM), "ignore_eos": False},
    "prompt scores": {"temperature": 0, "logprobs": 1, "prompt_logprobs": 2},
}


@pytest.fixture
def engine(load) -> Engine:
    loaded, check = load("qwen3_5", "float32", 2)
    with started(loaded, check) as one:
        yield one


class started:
    """Context with a started engine."""

    def __init__(self, *model, **settings) -> None:
        self.engine = Engine.over(*model, ServeConfig(memory=2000 * model[0].spec.page_bytes, **settings))

    def __enter__(self) -> Engine:
        self.engine.start()
        return self.engine

    def __exit__(self, *_: object) -> None:
        self.engine.stop()
        self.engine.scheduler.cache.check()


def asked(engine: Engine, generation: Generation, output: Sequence[int] = ()) -> list[Event]:
    """Return the events of a request whose answer begins with `output`."""
    return collect(engine, generation, Handover(tuple(output)))


def said(events: list[Event]) -> list[TokenEvent]:
    return [event for event in events if isinstance(event, TokenEvent)]


def end(events: list[Event]) -> tuple[object, ...]:
    last = events[-1]
    assert isinstance(last, FinishedEvent), last
    return last.finish_reason, last.text, last.output_tokens, last.stop


def generation(kind: str, **more: object) -> Generation:
    params = {"max_tokens": 40, "ignore_eos": True, **KINDS[kind]}
    return Generation(tuple(PROMPT), SamplingParams(**params), **more)


@pytest.mark.parametrize("kind", KINDS)
def test_answer_resumes_after_any_of_its_tokens(load, engine: Engine, kind: str) -> None:
    whole = asked(engine, generation(kind))
    tokens = said(whole)
    assert len(tokens) > 4
    with started(*load("qwen3_5", "float32", 2)) as other:
        for n in sorted({1, 2, len(tokens) // 2, len(tokens) - 1}):
            rest = asked(other, generation(kind), [event.token for event in tokens[:n]])
            assert said(rest) == tokens[n:]
            assert end(rest) == end(whole)


def test_a_stop_string_is_found_that_began_before(engine: Engine) -> None:
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    plain = said(asked(engine, Generation(tuple(PROMPT), params)))
    text = "".join(event.text for event in plain)
    middle = len("".join(event.text for event in plain[:20]))
    stop = text[middle - 2 : middle + 3]
    stopping = Generation(tuple(PROMPT), SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, stop=(stop,)))
    whole = asked(engine, stopping)
    n = len(said(whole))
    for known in range(n - 3, n):
        rest = asked(engine, stopping, [event.token for event in said(whole)[:known]])
        assert said(rest) == said(whole)[known:]
        assert end(rest) == end(whole)
        assert end(rest)[3] == stop


def test_resumed_answer_is_the_same_with_other_requests_and_preemptions(load, engine: Engine) -> None:
    whole = said(asked(engine, generation("drawn")))
    loaded, check = load("qwen3_5", "float32", 2)
    small = Engine.over(loaded, check, ServeConfig(memory=30 * loaded.spec.page_bytes))
    small.start()
    try:
        results: dict[int, list[TokenEvent]] = {}

        def ask(n: int) -> None:
            results[n] = said(asked(small, generation("drawn"), [event.token for event in whole[:n]]))

        threads = [threading.Thread(target=ask, args=(n,)) for n in (1, 7, 20, 33)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        small.stop()
    assert {n: whole[n:] for n in results} == results
    assert len(results) == 4


def test_composed_answers_resume(load, engine: Engine) -> None:
    spans = (Span(10, 80), Span(80, 140))
    composed = generation("drawn", segments=spans, fidelity=Fidelity.FAST)
    whole = asked(engine, composed)
    assert whole[-1].account.composed_tokens
    with started(*load("qwen3_5", "float32", 2)) as other:
        rest = asked(other, composed, [event.token for event in said(whole)[:17]])
        assert rest[-1].account.composed_tokens
    assert said(rest) == said(whole)[17:]


def test_with_drafts_it_is_the_same(load, engine: Engine) -> None:
    whole = said(asked(engine, generation("greedy")))
    with started(*load("qwen3_5", "float32", 2), speculation="suffix") as other:
        rest = said(asked(other, generation("greedy"), [event.token for event in whole[:9]]))
    assert rest == whole[9:]


def test_another_beginning_gives_another_answer(engine: Engine) -> None:
    """The control: what is given is what the answer goes on from."""
    whole = said(asked(engine, generation("greedy")))
    other = [event.token for event in whole[:9]]
    other[4] = (other[4] + 1) % 1000
    assert said(asked(engine, generation("greedy"), other)) != whole[9:]


def test_an_answer_that_began_elsewhere_is_neither_refused_nor_displaced(load) -> None:
    """By a full queue, which other requests in it leave for those of a namespace that waits less."""
    engine = started(*load("qwen3_5", "float32", 2), max_waiting=2).engine  # not started: nobody leaves the queue

    def submit(namespace: str = "", **more: object) -> int:
        one = Generation(tuple(words(9, "any")), SamplingParams(max_tokens=4), namespace=namespace)
        return engine.submit(one, lambda event: None, Handover(**more))

    def waiting() -> list[int]:
        return [seq.id for seq in engine.scheduler.waiting]

    first, second = submit(), submit()
    with pytest.raises(QueueFull):
        submit()
    prefilled, resumed = submit(begun=True), submit(output=tuple(words(2, "sent")), begun=True)
    assert waiting() == [first, second, prefilled, resumed]
    other = submit("other")
    assert waiting() == [first, prefilled, resumed, other]
    another = submit("another")
    assert waiting() == [prefilled, resumed, other, another]
    with pytest.raises(QueueFull):
        submit("last")
    engine.stop()
