"""Real engines with disk tiers behind a router: what memory has lost goes to the worker that has it stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headwater.cluster.messages import SEGMENTS, STATES
from headwater.engine.meter import Backlog
from headwater.schedule.prefill_seconds import PrefillSpeed
from headwater.schedule.sequence import key_of
from tests.cluster.fake import until
from tests.cluster.test_parallel_segments import cold, composed, turned
from tests.cluster.test_routed_answers import (
    RealWorker,
    ask,
    cluster,
    generation,
    load,  # noqa: F401  a fixture
    model,  # noqa: F401  likewise
    settle,
)
from tests.exactness.rig import words

PAGES = 60
PROMPT = words(1300, "stored")  # a whole run of KV, and a ragged one
END = 1280  # its last page
MEDIUM = "STORAGE"


def queued(worker: RealWorker, tokens: int) -> None:
    """Let a worker report `tokens` tokens in its queue, and a millisecond for each token that it computes."""
    tiers = worker.engine.scheduler.tiers
    tiers.prefill_seconds = lambda tokens: 1e-3 * tokens
    tiers.prefilled = lambda tokens, seconds: None
    speed = PrefillSpeed(0.0, 1e-3)
    worker.engine.backlog = lambda: Backlog(0, 0, tokens, speed, 1.0, pull=tiers.pull_speed, loads=tiers.load_speeds)


@contextmanager
def lost_from_memory(model, folder: Callable[[str], Path]) -> Iterator:  # noqa: F811
    """Yield a router, its workers and pictures, the worker that had a prompt and lost it in memory, and its answer."""
    with cluster(model, PAGES, folder, a="one", b="one") as (router, workers):
        for worker in workers.values():
            queued(worker, 0)
        pictures = {name: router.links[name].follower.picture for name in workers}
        first = ask(router, generation("greedy", PROMPT, 8)).wait()
        for worker in workers.values():
            worker.engine.drain(60)
            until(lambda worker=worker: not worker.engine.scheduler.tiers.busy)
        settle(router)
        (had,) = (name for name, one in workers.items() if one.engine.scheduler.cache.stats().checkpoints)
        for n in range(4):
            others = ask(workers[had].engine, generation("greedy", words(1300, "other", n), 8)).wait()
            assert others.error is None
        workers[had].engine.drain(60)
        cache = workers[had].engine.scheduler.cache
        assert not cache.match(key_of(tuple(PROMPT)), len(PROMPT), "").checkpoint_tokens
        queued(workers[had], 200)
        settle(router)
        until(lambda: router.links[had].backlog.queued_tokens == 200)
        yield router, workers, pictures, had, first


def test_a_prefix_on_a_workers_own_disk_is_loaded_there(model, tmp_path: Path) -> None:  # noqa: F811
    with lost_from_memory(model, lambda name: tmp_path / name) as (router, workers, pictures, had, first):
        assert pictures[had].stored[MEDIUM][STATES]
        again = ask(router, generation("greedy", PROMPT, 8)).wait()
        counts = dict(router.counts)
        loaded = {name: one.engine.stats().loaded_tokens for name, one in workers.items()}
    assert loaded == {had: END, "b" if had == "a" else "a": 0}
    assert again.comparable == first.comparable
    account = again.finished.account
    assert (account.loaded_from, account.loaded_tokens) == ("disk", END)
    wanted = {"expected_loads": 1, "loaded": 1, "missed_loads": 0, "cached_as_predicted": 2}
    assert {name: counts.get(name, 0) for name in wanted} == wanted


def test_a_folder_that_workers_share_is_not_published_and_serves_each(model, tmp_path: Path) -> None:  # noqa: F811
    """The other worker, which has an empty queue, loads what the first one has stored."""
    with lost_from_memory(model, lambda name: tmp_path) as (router, workers, pictures, had, first):
        assert not any(one.stored.get(MEDIUM, {}).get(STATES) for one in pictures.values())
        again = ask(router, generation("greedy", PROMPT, 8)).wait()
        loaded = {name: one.engine.stats().loaded_tokens for name, one in workers.items()}
        counts = dict(router.counts)
    assert loaded == {had: 0, "b" if had == "a" else "a": END}
    assert again.comparable == first.comparable
    assert (counts.get("expected_loads", 0), counts["loaded"], counts["cached_as_predicted"]) == (0, 1, 2)


@contextmanager
def segments_lost_from_memory(model, folder: Callable[[str], Path]) -> Iterator:  # noqa: F811
    """Yield a router, its workers, one that has built a prompt's segments and lost them in memory, and the prompt.

    The prompt has the same segments in another order, so that no prefix is there.
    """
    with cluster(model, folder=folder, a="one", b="one") as (router, workers):
        first, had = composed("stored"), workers["a"]
        pictures = [router.links[name].follower.picture for name in "ab"]
        queued(had, 0)
        queued(workers["b"], 100_000)
        until(lambda: router.links["b"].backlog.queued_tokens)
        assert ask(router, first).wait().error is None
        until(lambda: not had.engine.scheduler.tiers.busy)
        assert had.engine.stats().segment_tokens == cold(first), "they were built at one worker"
        with had.engine.changed:
            while had.engine.scheduler.cache.segments.evict():
                pass
        assert ask(had.engine, generation("greedy", words(9, "a step"), 2)).wait().error is None
        until(lambda: not pictures[0].held[SEGMENTS])
        queued(had, 200)
        queued(workers["b"], 0)
        until(lambda: [router.links[name].backlog.queued_tokens for name in "ab"] == [200, 0])
        yield router, workers, pictures, turned(first)


def test_segments_on_a_workers_own_disk_are_loaded_there(model, tmp_path: Path) -> None:  # noqa: F811
    with segments_lost_from_memory(model, lambda name: tmp_path / name) as (router, workers, pictures, asked):
        assert len(pictures[0].stored[MEDIUM][SEGMENTS]) == len(asked.segments)
        again = ask(router, asked).wait()
        counts = dict(router.counts)
        loaded = {name: one.engine.stats().loaded_segments for name, one in workers.items()}
    assert loaded == {"a": len(asked.segments), "b": 0}
    assert again.finished.account.loaded_from == "disk"
    wanted = {"combined": 0, "expected_loads": 1, "loaded": 1, "missed_loads": 0}
    assert {name: counts.get(name, 0) for name in wanted} == wanted


def test_segments_in_a_folder_that_workers_share_are_not_published(model, tmp_path: Path) -> None:  # noqa: F811
    """The router takes them to be cold, and has them prepared at both workers."""
    with segments_lost_from_memory(model, lambda name: tmp_path) as (router, _, pictures, asked):
        assert not any(one.stored.get(MEDIUM, {}).get(SEGMENTS) for one in pictures)
        assert ask(router, asked).wait().error is None
        assert (router.counts["combined"], router.counts["expected_loads"]) == (1, 0)
