"""A server's observer reports complete answers to Marconi's tuner, in the form in which they can be replayed."""

import pytest

from headwater.cache import PrefixCache
from headwater.cache.placement import make_placement
from headwater.request import Boundaries, Generation, SamplingParams
from headwater.schedule.kinds.request import Request
from headwater.schedule.limits import Limits
from headwater.schedule.scheduler import Scheduler
from headwater.schedule.tuner import Tuner, server_tuning
from tests.cache.toy import LAYOUT, PAGE, key_of

LIMITS = Limits(4, 64, 1, 1000)
PROMPT = tuple(range(1, 4 * PAGE))


def reported(eviction: str, keep_output: bool = True, known: int = 3) -> list[object]:
    """Return the requests that the tuner has noted after one request was reported, its answer `known` tokens long."""
    scheduler = Scheduler(PrefixCache(LAYOUT, eviction), make_placement("branch"), LIMITS)
    tuning = server_tuning(scheduler)
    if tuning is None:
        return []
    assert tuning._tuner is not None
    tuning._tuner._begin = scheduler.cache.snapshot(), scheduler.placement
    tuning._tuner._requests = 100
    generation = Generation(PROMPT, SamplingParams(), "tenant", Boundaries(system_end=5), keep_output)
    seq = Request(1, generation)
    seq.tokens.extend(range(50, 50 + known))
    tuning.completed(seq)
    tuning.close()
    return list(tuning._tuner._window)


def test_a_request_is_noted_with_its_answer_in_whole_pages() -> None:
    (seen,) = reported("marconi", known=7)
    assert (seen.namespace, seen.prompt_tokens, seen.known_tokens) == ("tenant", 15, 20)  # type: ignore[attr-defined]
    assert seen.text == key_of((*PROMPT, 50, 51, 52, 53, 54))  # type: ignore[attr-defined]
    assert seen.boundaries == Boundaries(system_end=5)  # type: ignore[attr-defined]


def test_an_answer_that_is_not_kept_is_not_noted() -> None:
    (seen,) = reported("marconi", keep_output=False)
    assert (seen.known_tokens, seen.text) == (15, key_of(PROMPT))  # type: ignore[attr-defined]


def test_a_tuner_that_breaks_does_not_end_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tuning = server_tuning(Scheduler(PrefixCache(LAYOUT, "marconi"), make_placement("branch"), LIMITS))
    assert tuning is not None

    def broken(self: Tuner, request: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(Tuner, "observe", broken)
    for number in range(2):
        tuning.completed(Request(number, Generation(PROMPT, SamplingParams())))
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["no more processes"]


def test_other_policies_have_no_tuner() -> None:
    assert reported("lru") == []
