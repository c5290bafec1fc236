"""Warm-up: requests before the first one, of which nothing remains but what the process has loaded."""

import logging

from headwater.config import ServeConfig
from headwater.server.app import create_app
from headwater.server.warm_up import warm_up
from tests.exactness.rig import words
from tests.server.client import send_to

PAGES = 500


def config_of(rig):
    return ServeConfig(memory=PAGES * rig.engine.spec.page_bytes)


def test_warm_up_leaves_cache_and_metrics_as_at_the_start(make, caplog):
    with caplog.at_level(logging.INFO):
        rig = make(PAGES)
        app = create_app(rig.engine, config_of(rig))
        before = rig.engine.stats(), rig.engine.view(), rig.engine.backlog(), seen(app)
        warm_up(rig.engine, config_of(rig))
        assert (rig.engine.stats(), rig.engine.view(), rig.engine.backlog(), seen(app)) == before
    (line,) = (record.message for record in caplog.records if record.name.startswith("headwater"))
    assert line.startswith("warmed up in ")


def seen(app):
    """Return the metrics that count requests, and /cache without times."""
    metrics, cache = send_to(app, [("GET", "/metrics", {}), ("GET", "/cache", {})])
    counted = [line for line in metrics.text.splitlines() if line.startswith("headwater_") and "_created" not in line]
    return [line for line in counted if "outcome" not in line], cache.json()["requests"]


def test_answers_and_evictions_after_a_warm_up_are_the_same(make):
    """With less memory than the prompts need, so that the policy evicts by its history."""
    prompts = [words(300, name) for name in "abca"]

    def served(warms_up):
        rig = make(28)
        if warms_up:
            warm_up(rig.engine, config_of(rig))
        with rig:
            answers = []
            for prompt in prompts:
                answers.append(rig.ask(prompt, 8))
                rig.settle()
            return answers, rig.engine.stats().cache

    (cold, cold_cache), (warm, warm_cache) = served(False), served(True)
    assert all(a.same_bits(b) for a, b in zip(warm, cold, strict=True))
    assert [a.account for a in warm] == [a.account for a in cold]
    assert warm_cache == cold_cache
    assert sum(warm_cache.evictions_by_kind().values()) > 0


def test_failed_warm_up_is_logged_and_the_engine_answers(make, monkeypatch, caplog):
    rig = make(PAGES)
    run, calls = rig.engine.runner.run, []

    def failing(step):
        calls.append(step)
        if len(calls) == 1:
            raise RuntimeError("a fault")
        return run(step)

    monkeypatch.setattr(rig.engine.runner, "run", failing)
    warm_up(rig.engine, config_of(rig))
    assert "the warm-up failed" in caplog.text
    with rig:
        assert len(rig.ask(words(100, 1), 4).tokens) == 4
