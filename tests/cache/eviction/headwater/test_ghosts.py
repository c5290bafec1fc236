"""Ghost entries of checkpoints: the table against a dict, and what is counted of those that leave it."""

from __future__ import annotations

from collections import deque
from random import Random

import numpy as np
import pytest

from headwater.cache.eviction.headwater.ghosts import Ghosts, prefix_ids
from headwater.cache.eviction.headwater.rates import BUCKETS, MIDDLES, ReuseRates, bucket

CLASSES = 4


def new_ghosts() -> Ghosts:
    rates = ReuseRates(1 / MIDDLES.reshape(1, -1).repeat(CLASSES, axis=0), group=1)
    rates._decay = 1.0
    return Ghosts(rates)


def counted(ghosts: Ghosts) -> tuple[float, float]:
    """Uses and time that were noted."""
    ghosts._rates.renew()
    return float(ghosts._rates.reuses.sum()), float(ghosts._rates.time.sum())


@pytest.mark.parametrize("seed", range(5))
def test_the_table_is_that_of_a_dict(seed: int) -> None:
    rng, ghosts = Random(seed), new_ghosts()
    expected: dict[int, tuple[int, int, int, int]] = {}  # class, uses, last use, and the last event
    for now in range(1, 3000):
        prefix = rng.choice((rng.randrange(-9, 9), rng.getrandbits(63), rng.choice([0, *expected])))
        done = rng.random()
        if done < 0.6:
            one = rng.randrange(CLASSES), rng.randrange(256), rng.randrange(now)
            ghosts.put(prefix, *one, now)
            expected[prefix] = (*one, now)
        elif done < 0.9:
            uses = ghosts.take(prefix, now)
            assert uses == expected.pop(prefix, (0, 0))[1]
        elif prefix in expected:
            (row,) = ghosts.found([prefix])
            ghosts.use(row, 1, 7, now)
            expected[prefix] = 1, 7, now, now
        if now % 500 == 0:
            deque(ghosts.renew(len(expected), now))
            assert len(ghosts) == len(expected)
            deque(ghosts.renew(40, now))
            latest = sorted(expected, key=lambda prefix: -expected[prefix][-1])[:40]
            expected = {prefix: expected[prefix] for prefix in latest}
    assert len(ghosts) == len(expected) > 40
    assert sorted(ghosts.row_of, key=lambda prefix: expected[prefix][-1]) == list(ghosts.row_of)
    for prefix, (kind, uses, time, _) in expected.items():
        (row,) = ghosts.found([prefix])
        assert (ghosts.kind[row], ghosts.uses[row], ghosts.time[row]) == (kind, uses, time)


def test_time_of_a_ghost_until_it_leaves_is_counted_once() -> None:
    ghosts = new_ghosts()
    for prefix in (1, 2, 3):
        ghosts.put(prefix, 0, 2, time=100, now=100 + 10 * prefix)
    assert counted(ghosts) == (0, 0)
    assert ghosts.take(1, 150) == 2  # 40 after it was evicted
    assert counted(ghosts) == (0, 40)
    ghosts.use(*ghosts.found([3]), 1, 3, 160)  # 30 after it was evicted
    assert counted(ghosts) == (1, 70)
    assert ghosts._rates.reuses[0, bucket(60)] == 1
    deque(ghosts.renew(1, 200))  # 80 of the second after it was evicted, 40 of the third after its use, which stays
    assert [ghosts.found([prefix]) for prefix in (1, 2, 3)] == [[], [], [0]]
    assert counted(ghosts) == (1, 190)
    deque(ghosts.renew(1, 300))
    deque(ghosts.renew(0, 310))
    assert len(ghosts) == 0
    assert counted(ghosts) == (1, 300)
    assert np.array_equal(ghosts._rates.time[2:], np.zeros((CLASSES - 2, BUCKETS)))


def test_rows_of_known_prefixes_are_found_in_order() -> None:
    ghosts = new_ghosts()
    for prefix in (5, 6):
        ghosts.put(prefix, prefix - 5, 0, 0, 1)
    assert [ghosts.kind[row] for row in ghosts.found([9, 6, 7, 5])] == [1, 0]
    assert ghosts.found([9]) == []


def test_ids_of_a_key_that_is_continued_are_those_of_the_whole() -> None:
    key = bytes(range(40))
    whole = prefix_ids(key, 4, 7)
    assert len(set(whole)) == 10
    assert whole[6:] == prefix_ids(key[24:], 4, whole[5])
    assert prefix_ids(key, 4, 8)[0] != whole[0]
    assert len(prefix_ids(key[:39], 4, 7)) == 9


def test_one_eighth_more_is_kept_for_a_while() -> None:
    ghosts = new_ghosts()
    for prefix in range(1, 10):
        ghosts.put(prefix, 0, 0, prefix, prefix)
    deque(ghosts.renew(8, 10))
    assert len(ghosts) == 9
    ghosts.put(10, 0, 0, 10, 10)
    deque(ghosts.renew(8, 11))
    assert sorted(ghosts.keys) == list(range(3, 11))
