"""Reports of a running engine: statistics, its cache's tree, and the time for which a request waited."""

from __future__ import annotations

from headwater.events import FinishedEvent
from tests.engine.test_engine import collect, generation, loaded, make
from tests.exactness.rig import words

__all__ = ["loaded", "make"]  # fixtures


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


def test_the_tree_shows_a_resumed_prefix_as_hot(make):
    with make(500) as rig:
        for _ in range(2):
            collect(rig.engine, generation(words(200, 1)))
            assert rig.engine.drain(60)
        view = rig.engine.view()
        (hot,) = view.hottest
        assert (hot.tokens, hot.hits) == (192, 1)
        assert view.total_nodes == rig.engine.stats().cache.nodes
        assert rig.engine.stats().cache.resumed_tokens == 192


def test_a_request_that_ends_tells_how_long_it_waited(make):
    with make(500) as rig:
        end = collect(rig.engine, generation(words(100, 1)))[-1]
    assert isinstance(end, FinishedEvent)
    assert end.queued_seconds is not None
    assert end.queued_seconds >= 0
