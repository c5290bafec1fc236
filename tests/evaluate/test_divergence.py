"""Divergences that are known, and what an API leaves out."""

from __future__ import annotations

import math

import pytest

from headwater.evaluate.divergence import Divergence, Pair, divergence
from headwater.load.endpoint import ServerError


def of(**parts):
    return {token: math.log(part) for token, part in parts.items()}


@pytest.mark.parametrize(
    ("p", "q", "nats"),
    [
        (of(a=0.5, b=0.5), of(a=0.5, b=0.5), 0.0),
        (of(a=0.5, b=0.5), of(a=0.25, b=0.75), 0.5 * math.log(2) + 0.5 * math.log(2 / 3)),
        (of(a=0.5), of(a=0.25), 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)),  # the rest is a bucket
        (of(a=0.5, b=0.3), of(a=0.5, c=0.3), 0.0),  # b and c are in the bucket: nothing tells them apart
        (of(a=0.9, b=0.1), {"a": 0.0, "b": -9999.0}, 0.9 * math.log(0.9) + 0.1 * (math.log(0.1) + 9999)),
        (of(a=0.5, b=0.1), of(c=0.5, d=0.1), 0.0),  # nothing in common: only a bucket
    ],
)
def test_divergence_covers_commonly_reported_tokens_and_a_bucket(p, q, nats):
    assert divergence(p, q) == pytest.approx(nats)


def test_divergence_is_at_most_that_of_the_whole_distributions():
    p, q = of(a=0.4, b=0.3, c=0.2, d=0.1), of(a=0.1, b=0.2, c=0.3, d=0.4)
    whole = divergence(p, q)
    assert whole == pytest.approx(sum(math.exp(p[t]) * (p[t] - q[t]) for t in p))
    for told in ("ab", "ac", "a"):  # with all but one the bucket is that one
        part = divergence({t: p[t] for t in told}, {t: q[t] for t in told})
        assert 0 < part < whole


def test_a_bucket_that_the_other_has_not_costs_much_and_no_more():
    assert divergence(of(a=0.9), of(a=1.0)) == pytest.approx(0.9 * math.log(0.9) + 0.1 * math.log(0.1 / 1e-9))


def test_positions_and_failures_are_summed_up():
    near, far = Pair(of(a=0.5), of(a=0.5), 0), Pair(of(a=0.9, b=0.1), of(a=0.1, b=0.9), 1)
    found = Divergence.of([near, near, near, far], {"gone": 2}, 0)
    assert (found.positions, found.same_first, found.failed) == (4, 3, {"gone": 2})
    assert found.max == pytest.approx(0.8 * math.log(9))
    assert found.mean.mean == pytest.approx(found.max / 4)
    assert found.p50 == 0
    assert (found.mean.low, found.mean.high) == (0, found.max)


def test_missing_log_probabilities_are_a_fault_with_a_reason():
    with pytest.raises(ServerError, match="gone"):
        Divergence.of([], {"gone": 2}, 0)
