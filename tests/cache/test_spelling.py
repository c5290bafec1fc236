"""Spelling of policies and loads: an option of another type is refused by name."""

from __future__ import annotations

import pytest

from headwater.cache.eviction import make_eviction
from headwater.cache.placement import make_placement
from headwater.errors import ConfigError
from headwater.traces.loads import make_load
from tests.cache.toy import LAYOUT


@pytest.mark.parametrize(
    ("spelling", "what"),
    [
        ("seglen(w='a')", "w is 'a', must be a number"),
        ("seglen(0.5, single_child=1)", "single_child is 1, must be True or False"),
        ("flop_aware(alpha='a')", "alpha is 'a', must be a number"),
        ("flop_aware(1e999)", "alpha is inf, must be a number"),
        ("last_n(1.5)", "n is 1.5, must be a whole number"),
        ("path_cap(k=True)", "k is True, must be a whole number"),
        ("marconi(multiplier=2.5)", "multiplier is 2.5, must be a whole number"),
        ("lru(x=1)", "unexpected keyword argument 'x'"),
        ("last_n", r"it needs n, a whole number; type 'last_n\(n=8\)'"),
    ],
)
def test_option_of_the_wrong_type_is_refused_by_name(spelling: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        make_eviction(spelling, LAYOUT)


def test_float_option_accepts_whole_numbers() -> None:
    assert make_eviction("seglen(w=1)", LAYOUT).weight == 1  # type: ignore[attr-defined]


def test_options_of_placements_and_loads_are_checked() -> None:
    with pytest.raises(ConfigError, match="k is 'x', must be a whole number"):
        make_placement("optimal(k='x')")
    with pytest.raises(ConfigError, match=r"it needs k, a whole number; type 'optimal\(beta=0.9, k=8\)'"):
        make_placement("optimal(beta=0.9)")
    with pytest.raises(ConfigError, match=r"clients is 1\.5, must be a whole number"):
        make_load("closed(clients=1.5)")
    with pytest.raises(ConfigError, match="rate is 'x', must be a number"):
        make_load("poisson(rate='x')")
