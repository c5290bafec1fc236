"""Segments in parallel: cold ones are computed by several workers and combined by one, and no bit changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headwater.engine.meter import Backlog
from headwater.request import Fidelity, Generation, Span
from headwater.schedule.tier_load import PullSpeed
from tests.cluster.fake import until
from tests.cluster.test_routed_answers import ask, cluster, generation
from tests.exactness.conftest import load  # noqa: F401  a fixture
from tests.exactness.rig import words

FAST = PullSpeed(0.001, 1e-7)
LENGTHS = (200, 130, 90, 170)
LEAD, QUESTION = 40, 30


def composed(seed: str, kind: str = "greedy", lengths=LENGTHS, **more: object) -> Generation:
    """Return a request whose prompt has segments of these lengths between a leading part and a question."""
    more = {"fidelity": Fidelity.FAST, "max_tokens": 12, **more}
    at, spans = LEAD, []
    for length in lengths:
        spans.append(Span(at, at + length))
        at += length
    return generation(kind, words(at + QUESTION, seed), segments=tuple(spans), **more)


@contextmanager
def workers_of(model, *names: str) -> Iterator[tuple]:
    """Yield a router over workers of one fingerprint that say they are idle, equally fast, and pull fast."""
    with cluster(model, **dict.fromkeys(names, "one")) as (router, workers):
        for worker in workers.values():
            worker.engine.backlog = lambda: Backlog(0, 0, 0, 0.001, 1.0, pull=FAST)
        until(lambda: all(link.backlog.pull == FAST for link in router._links.values()))
        yield router, workers


@pytest.fixture
def model(load):  # noqa: F811
    return load("qwen3_5", "float32", 2)


def built(worker) -> int:
    """Return the segment tokens that a worker has computed."""
    return worker.engine.stats().segment_tokens


def test_cold_segments_computed_by_two_workers_have_the_bits_of_one(model) -> None:
    asked = composed("slice")
    with workers_of(model, "a") as (router, _):
        plain = ask(router, asked).wait()
        assert router.counts["combined"] == 0
    with workers_of(model, "a", "b") as (router, workers):
        answer = ask(router, asked).wait()
        assert (router.counts["combined"], router.counts["segments_apart"]) == (1, 2), router.counts
        assert sorted(built(worker) for worker in workers.values()) == sorted([200 + 90 - 16, 130 + 170 - 16])
    assert answer.comparable == plain.comparable
    assert plain.finished.account.segments == answer.finished.account.segments == 4
