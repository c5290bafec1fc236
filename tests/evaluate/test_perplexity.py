"""Perplexity, divergence, and the intervals around their means."""

import gzip
import math
import random
from types import SimpleNamespace

import pytest
import zstandard

from headwater.errors import ConfigError
from headwater.evaluate.divergence import Divergence, Pair, divergence
from headwater.evaluate.perplexity import Perplexity, Window, check_equal, cut, read_utf8, window_of
from headwater.evaluate.summary import Estimate, estimate
from headwater.load.endpoint import ServerError


@pytest.mark.parametrize(("n", "window"), [(2, 2), (10, 4), (11, 4), (12, 4), (13, 4), (5, 100), (3, 3)])
def test_each_token_but_the_first_is_scored_once(n, window):
    stretches = cut(range(n), window)
    assert [token for stretch in stretches for token in stretch[1:]] == list(range(1, n))
    assert all(2 <= len(stretch) <= window for stretch in stretches)


def test_perplexity_is_of_the_mean_and_bits_are_of_the_bytes():
    windows = [Window((math.log(0.5),) * 3, ({},) * 3, first_bytes=1), Window((math.log(0.125),), ({},), first_bytes=9)]
    found = Perplexity.of("naïve", windows)
    assert (found.tokens, found.bytes) == (4, 5)  # of six bytes the first token's is not scored
    assert found.per_token == pytest.approx(2 ** (6 / 4))
    assert found.bits_per_byte == pytest.approx(6 / 5)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
def test_a_file_is_read_plain_or_packed(tmp_path, pack):
    (tmp_path / "text").write_bytes(pack("naïve".encode()))
    assert read_utf8(tmp_path / "text") == "naïve"


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"\xff\xfe", "not UTF-8"),
        (gzip.compress(b"text" * 99, mtime=0)[:-9], "cannot be unpacked"),
        (zstandard.compress(b"text")[:-2] + b"\0\0\0\0", "cannot be unpacked"),
    ],
    ids=["bytes", "gzip", "zstd"],
)
def test_file_that_is_not_text_is_named(tmp_path, content, part):
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(ConfigError, match=f"text .*{part}"):
        read_utf8(tmp_path / "text")


HERE, THERE = (SimpleNamespace(url=url) for url in ("http://here", "http://there"))


@pytest.mark.parametrize(("theirs", "equal"), [([1, 2, 4], 2), ([1, 2], 2), ([7, 2, 3, 4], 0)])
def test_two_servers_with_other_tokens_are_not_compared(theirs, equal):
    check_equal([1, 2, 3], HERE, [1, 2, 3], THERE)
    with pytest.raises(ServerError, match=f"here has 3 .*there {len(theirs)}; the first {equal} of them"):
        check_equal([1, 2, 3], HERE, theirs, THERE)


def test_missing_top_tokens_are_an_error_if_requested():
    told = {"token_logprobs": [None, -1.0], "top_logprobs": [None, None], "text_offset": [0, 1]}
    answer = {"choices": [{"text": "ab", "logprobs": told}]}
    assert window_of(HERE, answer, 2, 0) == Window((-1.0,), ({},), 1)
    with pytest.raises(ServerError, match="here: the answer has 0 of 20 most likely tokens"):
        window_of(HERE, answer, 2, 20)


def test_equal_values_have_an_interval_without_width():
    assert estimate([1.0] * 6, [0, 0, 1, 1, 2, 2]) == Estimate(1.0, 1.0, 1.0)


def test_one_group_has_no_interval():
    assert estimate([0.0, 1.0], [7, 7]) == Estimate(0.5, None, None)


def test_no_values_have_no_mean():
    with pytest.raises(ValueError, match="0 values"):
        estimate([], [])


def test_an_equal_seed_gives_an_equal_interval():
    values, groups = [0.0, 1.0, 1.0, 0.0, 1.0], [0, 1, 2, 3, 4]
    assert estimate(values, groups, seed=3) == estimate(values, groups, seed=3)


def test_interval_of_two_groups_spans_both():
    # with half of all draws each, a quarter of the resamples is all of one group
    assert estimate([0.0, 1.0], [0, 1]) == Estimate(0.5, 0.0, 1.0)


def test_items_count_equally_in_groups_of_any_size():
    assert estimate([1.0, 1.0, 1.0, 0.0], [0, 0, 0, 1]).mean == 0.75


def test_interval_of_independent_items_is_near_the_binomial_one():
    values = [1.0] * 80 + [0.0] * 320
    found = estimate(values, list(range(400)))
    assert found.low == pytest.approx(0.2 - 1.96 * 0.02, abs=0.005)  # the standard error is sqrt(0.2 * 0.8 / 400)
    assert found.high == pytest.approx(0.2 + 1.96 * 0.02, abs=0.005)


def test_copies_within_a_group_make_it_no_narrower():
    drawn = random.Random(0)
    values = [float(drawn.random() < 0.5) for _ in range(50)]
    once = estimate(values, list(range(50)))
    copied = estimate([v for v in values for _ in range(10)], [g for g in range(50) for _ in range(10)])
    assert (copied.mean, copied.low, copied.high) == pytest.approx((once.mean, once.low, once.high))


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
