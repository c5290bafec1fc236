"""Texts in windows, and what their log probabilities come to."""

from __future__ import annotations

import gzip
import math
from types import SimpleNamespace

import pytest
import zstandard

from headwater.errors import ConfigError
from headwater.evaluate.perplexity import Perplexity, Window, check_equal, cut, read_utf8, window_of
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
