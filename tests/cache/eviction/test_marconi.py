"""Marconi's policy before and after its alpha is known."""

from __future__ import annotations

import pytest

from headwater.cache.eviction import make_eviction
from headwater.cache.eviction.marconi import Marconi
from headwater.errors import ConfigError
from tests.cache.toy import LAYOUT, Toy, words


def made(spelling: str) -> Marconi:
    policy = make_eviction(spelling, LAYOUT)
    assert isinstance(policy, Marconi)
    return policy


def served(spelling: str) -> Toy:
    toy = Toy(LAYOUT, spelling)
    for number in range(80):
        toy.serve(words(number % 7, 4 * (1 + number % 5)) + words(100 + number, 12))
    assert toy.cache.stats().evicted_checkpoints
    return toy


def test_alpha_without_tuning_is_0() -> None:
    assert made("marconi").alpha == 0.0
    toys = [served(spelling) for spelling in ("marconi", "flop_aware(0.0)")]
    assert toys[0].cache.stats() == toys[1].cache.stats()


def test_alpha_may_be_set_while_it_runs() -> None:
    policy = made("marconi")
    policy.alpha = 0.7
    assert policy.alpha == 0.7
    assert policy.weight == 0.7


def test_replayed_policy_has_the_same_options() -> None:
    policy = made("marconi(multiplier=7, recency='linear', memory='prefix')")
    assert policy.multiplier == 7
    assert policy.static(0.3) == "flop_aware(0.3, recency='linear', memory='prefix')"
    assert make_eviction(policy.static(0.3), LAYOUT)._recency == policy._recency  # type: ignore[attr-defined]


@pytest.mark.parametrize("option", ["multiplier=0", "over='none'", "depth=3"])
def test_options_that_make_no_sense_are_config_errors(option: str) -> None:
    with pytest.raises(ConfigError, match=r"marconi.*cannot be made"):
        made(f"marconi({option})")
