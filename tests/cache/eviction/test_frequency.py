"""lfu and gdsf: how often, and for gdsf how much for its size."""

from __future__ import annotations

from dataclasses import replace

from headwater.plan import PrefillFlops
from tests.cache.toy import LAYOUT, Toy, words

SPLIT = replace(LAYOUT, n_pages=60, checkpoint_pages=1, slot_pages=0, state_fraction=0.05)
ONE = replace(LAYOUT, n_pages=10, checkpoint_pages=1, slot_pages=0)


def hit(toy: Toy, first: int, count: int = 8) -> int:
    """Serve the text that begins with `first`, without new checkpoints; return the position at which it resumes."""
    return toy.serve((*words(first, count), 0), checkpoints=()).checkpoint_tokens


def kept(toy: Toy, first: int, count: int = 8) -> bool:
    return toy.match((*words(first, count), 0)).checkpoint_tokens == count


def test_lfu_keeps_what_was_hit_more_often_however_long_ago() -> None:
    toy = Toy(SPLIT, "lfu")
    for first in (1, 2, 3):
        toy.serve(words(first, 8))
    assert [hit(toy, first) for first in (1, 1, 2, 3)] == [8] * 4
    toy.serve(words(4, 8))
    assert [kept(toy, first) for first in (1, 2, 3, 4)] == [True, False, True, True]


def test_lfu_forgets_the_count_of_what_went() -> None:
    toy = Toy(SPLIT, "lfu")
    for first in (1, 2, 3):
        toy.serve(words(first, 8))
        hit(toy, first)
    toy.serve(words(4, 8))
    toy.serve(words(1, 8))
    assert [kept(toy, first) for first in (1, 2, 3, 4)] == [True, True, True, False]


def test_gdsf_keeps_what_saves_more_for_its_size() -> None:
    toy = Toy(replace(ONE, n_pages=9, flops=PrefillFlops(1.0, 1.0)), "gdsf")
    toy.serve(words(1, 12))  # 12 + 144 FLOPs on 4 pages
    toy.serve(words(2, 8))  # 8 + 64 on 3, and used later
    toy.serve(words(3, 8))
    assert kept(toy, 1, 12)
    assert not kept(toy, 2)


def test_gdsf_lets_age_what_was_frequent() -> None:
    toy = Toy(ONE, "gdsf")
    toy.serve(words(1, 8))
    for _ in range(3):
        hit(toy, 1)  # H = 4 * 8/3; the others begin at L + 8/3, and every second one that goes raises L by 8/3
    for first in range(2, 10):
        toy.serve((*words(first, 8), 0))
        assert kept(toy, 1)
    for first in range(10, 13):
        toy.serve((*words(first, 8), 0))
    assert not kept(toy, 1)


def test_gdsf_values_a_checkpoint_by_what_the_one_above_it_leaves() -> None:
    toy = Toy(replace(SPLIT, state_fraction=4 / 60), "gdsf")
    toy.serve(words(1, 8))
    toy.serve(words(2, 24), checkpoints=(20, 24))  # the one at 24 saves 4 tokens over the one at 20
    toy.serve(words(3, 8))
    toy.serve(words(4, 8))
    assert toy.match((*words(2, 24), 0)).checkpoint_tokens == 20
    assert kept(toy, 1)
