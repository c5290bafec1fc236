"""Random traffic over random memory: whatever comes, every read is what the plan promised and nothing is lost."""

import random
from itertools import product

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.covering import cells
from tests.schedule.ledger import Lab
from tests.schedule.traffic import check_nothing_is_lost, drawn_sizes, run_traffic
from tests.support import examples

SETTINGS = settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))


BOTH = product(("canonical", "raw", "none"), ("lru", "seglen"))


@pytest.mark.parametrize(("reuse", "eviction"), cells(BOTH, lambda *cell: cell.count("lru") == cell.count("canonical")))
@SETTINGS
@given(seed=st.integers(0, 10**9))
@example(seed=104356)  # raw: a preempted sequence meets the pages of its first life
@example(seed=570)  # raw: it starts over, and holds twice what it published before
def test_random_traffic_reads_only_committed_tokens_and_loses_nothing(eviction, reuse, seed):
    rng = random.Random(seed)
    longest, sizes = drawn_sizes(rng)
    it = Lab(**sizes, eviction=eviction, decode_reuse=reuse, tails=rng.random() < 0.5)

    def ask(prompt, most, namespace):
        return it.submit(prompt, most, namespace=namespace, keep_output=rng.random() < 0.8)

    check_nothing_is_lost(it, run_traffic(rng, it, longest, ask))
