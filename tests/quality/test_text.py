"""Texts in windows, and what their log probabilities come to."""

from __future__ import annotations

import math

import pytest

from headwater.quality.text import Perplexity, Window, cut


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
