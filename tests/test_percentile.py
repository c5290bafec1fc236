"""The percentile of every report: interpolated, as the standard library's inclusive quantiles."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.percentile import percentile


def test_percentiles_interpolate():
    assert [percentile([1.0, 2.0, 4.0], p) for p in (0, 25, 50, 75, 100)] == [1.0, 1.5, 2.0, 3.0, 4.0]
    assert percentile([4.0, 1.0, 2.0], 75) == 3.0
    assert percentile([7.0], 99) == 7.0
    with pytest.raises(ValueError, match="at least 1 value"):
        percentile([], 50)


@given(values=st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=2, max_size=50))
def test_percentiles_are_those_of_the_standard_library(values):
    hundredths = statistics.quantiles(values, n=100, method="inclusive")
    for percent in (1, 50, 90, 95, 99):
        assert percentile(values, percent) == pytest.approx(hundredths[percent - 1], rel=1e-9, abs=1e-9)
