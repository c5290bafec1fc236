from array import array

import pytest

from headwater.traces.request import Request
from papers.figure import quantile
from papers.marconi.workloads import Reuse


def request(*tokens, prompt=None):
    text = array("i", tokens).tobytes()
    return Request("s", text, prompt or len(tokens), 0, len(tokens))


def test_blocks_count_once_for_kv_and_resumed_state():
    reuse = Reuse(block=2)
    reuse.add(request(1, 2, 3, 4, 5), resumed_at=0)  # two full blocks
    assert (reuse.computed, reuse.kv_used, reuse.states_used) == (2, 0, 0)
    reuse.add(request(1, 2, 3, 4, 6, 7), resumed_at=4)  # both blocks' KV, the second one's state, and a third block
    assert (reuse.computed, reuse.kv_used, reuse.states_used) == (3, 2, 1)
    reuse.add(request(1, 2, 3, 4, 8, 9), resumed_at=4)  # used again: they count as used already
    assert (reuse.computed, reuse.kv_used, reuse.states_used) == (4, 2, 1)
    assert reuse.percent() == (50.0, 25.0)


def test_recomputed_block_is_another_block():
    reuse = Reuse(block=2)
    for _ in range(2):
        reuse.add(request(1, 2), resumed_at=0)
    reuse.add(request(1, 2, 3), resumed_at=2)
    assert (reuse.computed, reuse.kv_used, reuse.states_used) == (2, 1, 1)


def test_equal_tokens_after_other_prefixes_are_other_blocks():
    reuse = Reuse(block=2)
    reuse.add(request(1, 2, 3, 4), resumed_at=0)
    reuse.add(request(9, 9, 3, 4, 5), resumed_at=4)
    assert (reuse.kv_used, reuse.states_used) == (0, 0)


def test_quantile_lies_between_two_values_in_proportion():
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile([0, 10], 0.95) == pytest.approx(9.5)
    assert quantile([7], 0.05) == 7
