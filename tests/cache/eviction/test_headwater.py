"""The project's own: superseded checkpoints early, branch points late, and what is worth more later."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headwater.cache.eviction import make_eviction
from headwater.errors import ConfigError
from tests.cache.toy import LAYOUT, Toy, words

SMALL = replace(LAYOUT, checkpoint_pages=1, slot_pages=0)


def split(states: int) -> Toy:
    return Toy(replace(SMALL, n_pages=100, state_fraction=states / 100), "headwater")


def resumes(toy: Toy, first: int, count: int) -> int:
    return toy.match((*words(first, count), 0)).checkpoint_tokens


def test_a_checkpoint_with_a_deeper_one_below_goes_before_an_older_one_without() -> None:
    toy = split(3)
    toy.serve(words(2, 8))
    toy.serve(words(1, 8))
    toy.serve(words(2, 16))  # resumes at 8, after all that is there of the first
    toy.serve(words(3, 8))
    assert (resumes(toy, 1, 8), resumes(toy, 2, 8), resumes(toy, 2, 16)) == (8, 0, 16)


def test_a_branch_point_outlives_its_branches() -> None:
    toy = split(3)
    for branch in (2, 3, 4, 5):
        toy.serve((*words(1, 8), *words(branch, 8)), checkpoints=(8, 16))
    assert resumes(toy, 1, 8) == 8
    assert toy.cache.stats().evicted_checkpoints == 2


def test_what_was_hit_stays_longer() -> None:
    toy = split(3)
    for first in (1, 2):
        toy.serve(words(first, 8))
    toy.serve((*words(1, 8), 0), checkpoints=())
    for first in (3, 4):
        toy.serve(words(first, 8))
    assert (resumes(toy, 1, 8), resumes(toy, 2, 8)) == (8, 0)


def test_of_two_as_old_the_one_that_saves_less_a_page_goes() -> None:
    toy = split(2)
    toy.serve(words(1, 8))
    toy.serve(words(2, 40))  # 40 tokens on 11 pages, and 8 on 3: sqrt(3.6) / 2 < sqrt(2.7) / 4 when the third comes
    toy.serve(words(3, 8))
    assert (resumes(toy, 1, 8), resumes(toy, 2, 40)) == (0, 40)


def test_when_the_deeper_one_goes_the_one_above_counts_again() -> None:
    toy = split(2)
    toy.serve(words(1, 8))
    toy.serve(words(1, 16))
    deeper = next(node for node in toy.cache._index if node.end == 4)
    toy.cache._pool.states.give(toy.cache._index.drop(deeper))
    toy.serve(words(2, 8))
    toy.serve(words(3, 8))  # 2 * sqrt(8/5) of the first, which was hit, against sqrt(8/3) of the second
    assert (resumes(toy, 1, 8), resumes(toy, 2, 8)) == (0, 8)


@pytest.mark.parametrize("spelling", ["headwater(superseded=0)", "headwater(branch=-1.0)"])
def test_factors_are_above_zero(spelling: str) -> None:
    with pytest.raises(ConfigError):
        make_eviction(spelling, SMALL)
