"""Random traffic over random memory: whatever comes, every read is what the plan promised and nothing is lost."""

import random

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headwater.schedule.sequence import Phase
from tests.schedule.ledger import Lab

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("eviction", ["lru", "seglen"])
@pytest.mark.parametrize("decode_reuse", ["canonical", "raw", "none"])
@SETTINGS
@given(seed=st.integers(0, 10**9))
@example(seed=104356)  # raw: a preempted sequence meets the pages of its first life
def test_random_traffic_reads_only_what_was_promised_and_loses_nothing(eviction, decode_reuse, seed):
    rng = random.Random(seed)
    checkpoint_pages = rng.choice([1, 2, 5])
    longest = rng.choice([40, 80])
    smallest = -(-longest // 4) + checkpoint_pages
    it = Lab(
        n_pages=rng.choice([smallest, smallest + 7, 3 * smallest, 300]),
        checkpoint_pages=checkpoint_pages,
        max_running=rng.choice([1, 3, 8]),
        tokens_per_step=rng.choice([4, 16, 64]),
        placement=rng.choice(["structural", "branch", "every_block(2)", "none"]),
        eviction=eviction,
        decode_reuse=decode_reuse,
    )
    heads = [[rng.randrange(5) for _ in range(longest)] for _ in range(3)]
    said: list[list[int]] = []
    asked = []
    for _ in range(rng.randrange(1, 60)):
        if rng.random() < 0.4:
            start = rng.choice(said) if said and rng.random() < 0.5 else rng.choice(heads)
            prompt = [*start[: rng.randrange(0, longest - 10)], *(rng.randrange(5) for _ in range(rng.randrange(1, 9)))]
            most = rng.randrange(1, longest - len(prompt) + 1)
            seq = it.submit(prompt, most, namespace=rng.choice(["", "", "x"]), keep_output=rng.random() < 0.8)
            asked.append(seq)
        elif rng.random() < 0.1 and asked:
            seq = rng.choice(asked)
            if seq.phase is not Phase.DONE:
                it.scheduler.cancel(seq)
                asked.remove(seq)
        else:
            it.step()
        said += [s.tokens for s in asked if s.phase is Phase.DONE][-2:]
    it.run()
    assert all(s.n_output == s.generation.params.max_tokens for s in asked)
    stats = it.cache.stats()
    assert stats.pages_private == stats.pages_slot == stats.leases == stats.open_plans == 0
    assert stats.pages_free + stats.pages_kv + stats.pages_checkpoint == it.layout.n_pages
