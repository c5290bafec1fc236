"""Results of a load, and their report."""

import io

import pytest
from rich.console import Console

from headwater.load.report import LiveProgress
from headwater.load.results import Distribution, Result, Slo, Summary


def result(number=0, outcome="ok", due=0.0, sent=0.0, ended=1.0, **more):
    return Result(number, "s", 0, "", outcome, due, sent, ended, **more)


def test_unknown_values_are_left_out():
    assert Distribution.of([None, None]) is None
    assert Distribution.of([None, 3.0, 1.0]) == Distribution(
        2, 2.0, *(pytest.approx(v) for v in (2, 2.8, 2.9, 2.98)), 3.0
    )


def test_a_summary_adds_up():
    results = [
        result(
            0, ended=2.0, ttft=0.5, gaps=(0.1, 0.1), prompt_tokens=100, cached_tokens=64, output_tokens=3, reason="full"
        ),
        result(
            1,
            due=1.0,
            sent=3.0,
            ended=5.0,
            ttft=0.5,
            prompt_tokens=100,
            cached_tokens=0,
            output_tokens=1,
            reason="cold",
        ),
        result(2, ended=4.0, ttft=0.1, gaps=(0.9,), prompt_tokens=50, output_tokens=2),
        result(3, "refused", detail="full up"),
        result(4, "error", detail="boom"),
        result(5, "skipped", sent=9.0, ended=9.0),
    ]
    summary = Summary.of(results, Slo(ttft=1.0, itl=0.2))
    assert summary.outcomes == {"ok": 3, "refused": 1, "error": 1, "skipped": 1}
    assert summary.errors == {"full up": 1, "boom": 1}
    assert summary.reasons == {"full": 1, "cold": 1}
    assert summary.wall == 5.0  # skipped requests were never sent
    assert summary.good == 1  # the second waited 2 s to be sent, the third was slow between its tokens
    assert summary.requests_per_s == pytest.approx(3 / 5)
    assert summary.goodput_per_s == pytest.approx(1 / 5)
    assert summary.output_tokens_per_s == pytest.approx(6 / 5)
    assert (summary.prompt_tokens, summary.cached_tokens, summary.output_tokens) == (250, 64, 6)
    assert summary.hit_rate == pytest.approx(64 / 200)  # of the prompts with reported cached tokens
    assert (summary.ttft.max, summary.ttft_from_due.max) == (0.5, 2.5)
    assert (summary.itl.count, summary.itl.max) == (3, 0.9)


def test_summary_without_answers_does_not_divide_by_zero():
    summary = Summary.of([result(0, "error", ended=0.0)], Slo())
    assert (summary.requests_per_s, summary.hit_rate, summary.ttft) == (0.0, None, None)
    assert Summary.of([], Slo()).requests == 0


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_bar_is_shown_only_on_a_terminal(terminal):
    out = io.StringIO()
    with LiveProgress(Console(file=out, force_terminal=terminal, width=150)) as progress:
        progress.phase("2x", 4)
        for number, outcome in enumerate(("ok", "ok", "refused")):
            tokens = {"prompt_tokens": 100, "cached_tokens": 75, "output_tokens": 8} if outcome == "ok" else {}
            progress.result(Result(number, "s", 0, "", outcome, 0.0, 0.0, 2.0, **tokens))
    shown = out.getvalue()
    assert ("2x" in shown and "3/4" in shown and "ok 2 refused 1, 8 tok/s, hits 75%" in shown) == terminal
    assert bool(shown) == terminal
