"""The request-level lines of a production engine's behaviour that cost its users hits or memory, each better here.

Ids (r01 ... n02) and numbers are those of the table that was made by running that engine: page 64, `sys` 1,000 tokens,
`a`, `b`, `u0` ... 500 each, D of 4,000, E of 1,536. Default placement, ample memory, parts of the prompt unknown.
"""

import pytest

from headwater.schedule.sequence import Phase
from tests.schedule.ledger import Lab, words

PAGE = 64
SYS = words(1000, "sys")
A, B = SYS + words(500, "a"), SYS + words(500, "b")
D, E = words(4000, "D"), words(1536, "E")


@pytest.fixture
def lab() -> Lab:
    return Lab(n_pages=4000, page_size=PAGE, tokens_per_step=2048)


def hits(lab: Lab, *prompts: list[int]) -> list[int]:
    return [lab.ask(prompt).account.resumed_at for prompt in prompts]


def test_r01_the_end_of_the_prompt_and_the_output_are_kept(lab):
    first = lab.ask(A, max_tokens=100)
    assert lab.ask(first.tokens + words(10, "next")).account.resumed_at == 1600  # there: 1,472


def test_r03_equal_prompt_on_the_grid_hits_from_its_second_request(lab):
    assert hits(lab, E, E, E, E) == [0, 1472, 1472, 1472]  # there: 0, 0, 1,472, 1,472


def test_r04_a_shared_system_prompt_hits_from_its_second_request_on(lab):
    found = hits(lab, *(SYS + words(500, "u", i) for i in range(4)))
    assert found[0] == 0
    assert found[1] >= 1000 - 1500 // 8 - PAGE  # there: 0
    assert found[2:] == [960, 960]


def test_r05_request_that_sets_the_fork_state_keeps_its_end(lab):
    found = hits(lab, A, B, B, B)
    assert found[1] > 0
    assert found[2:] == [1472, 1472]  # there: 960, 1,472


def test_r06_checkpoints_do_not_grow_with_the_number_of_chunks(lab):
    lab.ask(words(30_000, "long")[:9000], max_tokens=1)
    assert lab.cache.stats().checkpoints <= 9  # the last full page, and eight that go first if memory is short
    for tokens_per_step in (256, 1024, 8192):
        other = Lab(n_pages=4000, page_size=PAGE, tokens_per_step=tokens_per_step)
        assert hits(other, D, D) == [0, 3968]
        assert other.cache.stats().checkpoints <= 9


def test_r08_two_requests_that_extend_one_hold_one_slot_each(lab):
    lab.ask(A)
    one, two = (lab.submit(A + words(80, i), max_tokens=30) for i in range(2))
    while one.phase is not Phase.DECODE or two.phase is not Phase.DECODE:
        lab.step()
    assert lab.cache.stats().pages_slot == 2 * lab.layout.slot_pages  # there: three each


def test_r11_two_requests_in_flight_share_from_the_start(lab):
    one, two = lab.submit(A), lab.submit(B)
    lab.run()
    assert one.account.resumed_at == 0
    assert two.account.resumed_at == 960
    assert lab.ledger.prefilled == 1500 + 540  # there: 2 x 1,500


def test_r13_without_room_for_a_slot_a_request_waits(lab):
    tight = Lab(n_pages=16, page_size=PAGE, checkpoint_pages=3)
    first, second = (tight.submit(words(500, i), max_tokens=60) for i in range(2))
    tight.run()  # there: an assertion fails
    assert (first.n_output, second.n_output) == (60, 60)


def test_n01_outputs_do_not_keep_a_shared_prompt_from_hitting(lab):
    found = [lab.ask(SYS + words(500, "u", i), max_tokens=20).account.resumed_at for i in range(4)]
    assert found[1] > 0  # there: 0, 0, 0, 0
    assert found[2:] == [960, 960]


def test_n02_an_equal_prompt_hits_from_its_second_request_on(lab):
    assert hits(lab, A, A, A) == [0, 1472, 1472]  # there: 0, 0, 0
