"""The engine tells Marconi's tuner of its requests, in the form in which they can be served again."""

from __future__ import annotations

import pytest

from headwater.cache import PrefixCache
from headwater.cache.placement import make_placement
from headwater.cache.tuning import Tuner
from headwater.engine.tuned import Tuning
from headwater.request import Boundaries, Generation, SamplingParams
from headwater.schedule.limits import Limits
from headwater.schedule.scheduler import Scheduler
from headwater.schedule.sequence import Sequence
from tests.cache.toy import LAYOUT, PAGE, key_of

LIMITS = Limits(4, 64, 1, 1000)
PROMPT = tuple(range(1, 4 * PAGE))


def told(eviction: str, keep_output: bool = True, known: int = 3) -> list[object]:
    """What the tuner has noted after it was told of one request, its answer `known` tokens long."""
    scheduler = Scheduler(PrefixCache(LAYOUT, eviction), make_placement("branch"), LAYOUT, LIMITS)
    tuning = Tuning(scheduler)
    if tuning._tuner is None:
        return []
    tuning._tuner._begin = scheduler.cache.snapshot(), scheduler.placement  # type: ignore[attr-defined]
    tuning._tuner._requests = 100
    generation = Generation(PROMPT, SamplingParams(), "tenant", Boundaries(system_end=5), keep_output)
    seq = Sequence(1, generation)
    seq.tokens.extend(range(50, 50 + known))
    tuning.seen(seq)
    tuning.close()
    return list(tuning._tuner._window)


def test_a_request_is_noted_with_its_answer_in_whole_pages() -> None:
    (seen,) = told("marconi", known=7)
    assert (seen.namespace, seen.prompt_tokens, seen.known_tokens) == ("tenant", 15, 20)  # type: ignore[attr-defined]
    assert seen.key == key_of((*PROMPT, 50, 51, 52, 53, 54))  # type: ignore[attr-defined]
    assert seen.boundaries == Boundaries(system_end=5)  # type: ignore[attr-defined]


def test_an_answer_that_is_not_kept_is_not_noted() -> None:
    (seen,) = told("marconi", keep_output=False)
    assert (seen.known_tokens, seen.key) == (15, key_of(PROMPT))  # type: ignore[attr-defined]


def test_a_tuner_that_breaks_does_not_end_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tuning = Tuning(Scheduler(PrefixCache(LAYOUT, "marconi"), make_placement("branch"), LAYOUT, LIMITS))

    def broken(self: Tuner, request: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(Tuner, "seen", broken)
    for number in range(2):
        tuning.seen(Sequence(number, Generation(PROMPT, SamplingParams())))
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["no more processes"]


def test_other_policies_have_no_tuner() -> None:
    assert told("lru") == []
