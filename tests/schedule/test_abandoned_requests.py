"""Prefills that are given up: the same request, sent again, resumes at the state that they left."""

from __future__ import annotations

import pytest

from headwater.errors import DeadlineExceeded
from headwater.request import Boundaries
from headwater.schedule.kinds.abandoned import MIN_ABANDONED_TOKENS
from headwater.schedule.sequence import Phase
from tests.schedule.ledger import Lab, words

PAGE = 64
KNOWN = Boundaries(system_end=100, query_start=103, query_end=4990)  # no checkpoint within the long question


def lab(**settings) -> Lab:
    return Lab(**{"n_pages": 4000, "page_size": PAGE, "tokens_per_step": 512, **settings})


def left(it: Lab, prompt: list[int], steps: int, error: Exception | None = None):
    """Return a request that its client gave up after some steps."""
    seq = it.submit(prompt, boundaries=KNOWN)
    for _ in range(steps):
        it.step()
    it.scheduler.leave(seq, error)
    assert seq.phase is Phase.DONE
    return seq


def test_abandoned_prefill_hits_if_it_is_sent_again():
    it, prompt = lab(), words(5000, 1)
    left(it, prompt, 5)
    it.run()
    computed = 5 * 512 + PAGE
    assert it.ledger.prefilled == computed
    again = it.ask(prompt, boundaries=KNOWN)
    assert again.account.resumed_at == computed
    assert it.ledger.prefilled == 5000


def test_request_sent_again_at_once_waits_for_the_abandoned_state():
    it, prompt = lab(), words(5000, 1)
    left(it, prompt, 5)
    again = it.submit(prompt, boundaries=KNOWN)
    it.run()
    assert again.account.resumed_at == 5 * 512 + PAGE
    assert it.ledger.prefilled == 5000


def test_prefill_past_its_deadline_is_kept_and_its_error_reported():
    it, prompt, error = lab(), words(5000, 1), DeadlineExceeded(1.0, 0, "timeout")
    seq = left(it, prompt, 5, error)
    assert it.scheduler.failures.pop() == (seq, error)
    it.run()
    assert it.ask(prompt, boundaries=KNOWN).account.resumed_at == 5 * 512 + PAGE


@pytest.mark.parametrize("cache", [True, False])
def test_request_left_after_any_step_frees_all_its_pages(cache):
    for steps in range(14):
        it = lab(n_pages=300, tokens_per_step=256, cache=cache)
        left(it, words(3000, 1), steps)
        it.run()
        after = it.cache.stats()
        assert after.pages_private == after.pages_slot == after.leases == after.open_plans == 0
        assert after.pages_free + after.pages_kv + after.pages_checkpoint + after.pages_tail == 300
        it.cache.check()


def test_little_is_computed_after_no_long_prefill():
    it = lab(tokens_per_step=MIN_ABANDONED_TOKENS // 2)
    left(it, words(5000, 1), 1)
    assert it.scheduler.idle
    assert it.ledger.prefilled == MIN_ABANDONED_TOKENS // 2


def test_abandoned_prefill_gives_way_to_a_request_that_needs_its_memory():
    it = lab(n_pages=90, checkpoint_pages=5)
    left(it, words(4800, 1), 7)
    other = it.submit(words(5000, 2))
    it.run()
    assert other.phase is Phase.DONE
    assert other.preemptions == 0
