"""The lab composes the same segments as an engine that runs the model, request by request."""

import random
from array import array
from pathlib import Path

import pytest

from headwater.engine.proof.selfcheck import SelfCheck
from headwater.lab.cost import StepCost, load_device
from headwater.lab.replay import replay
from headwater.lab.serving import Engine, Serving
from headwater.lab.setup import Setup
from headwater.models.load import LoadedModel
from headwater.models.profiles import profile_of
from headwater.request import Fidelity, Span
from headwater.traces.loads import make_arrivals
from headwater.traces.request import Request, Trace
from tests.exactness.rig import Answer, Make, words

OUTPUT, TOKENS_PER_STEP = 20, 512
SETTINGS = {"placement": "structural", "eviction": "lru", "healing": "off"}
DOCUMENTS = [words(n, "document", n) for n in (200, 90, 333, 150, 40, 260)]


def sessions(make: Make, pages: int, fidelity: Fidelity) -> tuple[list[Answer], list[tuple[Span, ...]], object]:
    """Two questions each of three of the documents, in any order; and what the cache did."""
    rng, answers, spans = random.Random(3), [], []
    with make(pages, max_tokens_per_step=TOKENS_PER_STEP, **SETTINGS) as rig:
        for session in range(6):
            prompt, found = words(150, "lead"), []
            for document in rng.sample(DOCUMENTS, 3):
                found.append(Span(len(prompt), len(prompt) + len(document)))
                prompt = prompt + document
            for turn in range(2):
                prompt = prompt + words(40, session, turn)
                answer = rig.ask(prompt, OUTPUT, segments=tuple(found), fidelity=fidelity)
                rig.settle()
                prompt = answer.everything
                answers.append(answer)
                spans.append(tuple(found))
        return answers, spans, rig.engine.scheduler.cache.stats()


def recorded(answers: list[Answer], spans: list[tuple[Span, ...]], fidelity: Fidelity) -> Trace:
    requests = [
        Request(
            str(number),
            array("i", answer.everything).tobytes(),
            len(answer.prompt),
            OUTPUT,
            len(answer.everything),
            at=100.0 * number,
            segments=segments,
            fidelity=fidelity,
        )
        for number, (answer, segments) in enumerate(zip(answers, spans, strict=True))
    ]
    return Trace("recorded", requests)


@pytest.mark.parametrize("fidelity", [Fidelity.FAST, Fidelity.BALANCED])
@pytest.mark.parametrize("pages", [34, 600])
@pytest.mark.parametrize("served", ["qwen3_5", "qwen3_window"], indirect=True)
def test_lab_and_engine_compose_the_same_segments(
    served: tuple[LoadedModel, Path], pages: int, fidelity: Fidelity
) -> None:
    loaded, path = served
    answers, spans, stats = sessions(Make(loaded, SelfCheck(True, None, "compiled")), pages, fidelity)
    trace = recorded(answers, spans, fidelity)
    profile = profile_of(loaded.spec, path)
    setup = Setup(profile, pages * loaded.spec.page_bytes, "structural", "lru")
    lab = Serving(trace, setup, Engine(StepCost(profile, load_device("h100")), tokens_per_step=TOKENS_PER_STEP))
    tally = lab.run(make_arrivals(trace))
    accounts = [answer.account for answer in answers if answer.account is not None]
    assert [one.resumed_at for one in tally.outcomes] == [account.resumed_at for account in accounts]
    assert [one.composed_tokens for one in tally.outcomes] == [account.composed_tokens for account in accounts]
    assert [one.reason for one in tally.outcomes] == [str(account.reason) for account in accounts]
    assert lab.cache.stats() == stats
    assert sum(account.composed_tokens for account in accounts) > 0
    # Of `balanced` fewer segments are stored; where slots and checkpoints take a page each, there is room for those.
    evicts = pages == 34 and (fidelity is Fidelity.FAST or loaded.spec.checkpoint_pages > 1)
    assert (stats.evicted_segments > 0) == evicts  # type: ignore[attr-defined]
    one_by_one = replay(trace, setup, make_arrivals(trace))
    if pages == 340:
        assert [one.hit_tokens for one in one_by_one.outcomes] == [one.hit_tokens for one in tally.outcomes]
        assert one_by_one.row.made_tokens == lab.work.made_tokens == lab.scheduler.segment_tokens
