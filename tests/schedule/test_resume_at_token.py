"""Requests that resume at the token: with tails, no token of a prompt that was sent before is computed again."""

import pytest

from headwater.errors import OutOfPages
from headwater.request import Boundaries, Generation, SamplingParams
from tests.schedule.ledger import Lab, words

PAGE = 64
LENGTHS = (1, 2, 63, 64, 65, 128, 129, 700, 1536)


def lab(**sizes) -> Lab:
    return Lab(**{"n_pages": 4000, "page_size": PAGE, "tokens_per_step": 2048, "tails": True, **sizes})


@pytest.mark.parametrize("reuse", ["canonical", "none"])
def test_identical_request_computes_nothing(reuse):
    for length in LENGTHS:
        it = lab(decode_reuse=reuse)
        prompt = words(length, length)
        first = it.ask(prompt, max_tokens=3)
        prefilled = it.ledger.prefilled
        again = it.ask(prompt, max_tokens=3)
        assert again.tokens == first.tokens
        assert (again.account.resumed_at, again.account.cached_tokens) == (length, length)
        assert it.ledger.prefilled == prefilled or reuse == "canonical"


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("answer", [1, 5, 63, 64, 200])
def test_next_turn_computes_only_its_own_tokens(length, answer):
    it = lab()
    history = words(length, "question")
    for turn in range(3):
        seq = it.ask(history, max_tokens=answer)
        assert seq.account.resumed_at == (0 if turn == 0 else len(history) - 7)
        history = seq.tokens + words(7, turn)


def test_answer_on_the_page_of_its_prompt_is_cached():
    it = lab()
    seq = it.ask(words(70, "question"), max_tokens=5)
    assert it.ledger.prefilled == 75
    assert it.ask([*seq.tokens, 1]).account.resumed_at == 75


@pytest.mark.parametrize(
    ("length", "answer"), [(200, 30), (200, 100), (128, 64), (128, 5), (64, 64), (100, 5), (127, 2)]
)
def test_tails_add_no_checkpoint_to_a_chat(length, answer):
    positions = []
    for tails in (True, False):
        it, history = lab(tails=tails), words(length, "question")
        for turn in range(4):
            history = it.ask(history, max_tokens=answer).tokens + words(20, turn)
        positions.append([node.end for node in it.cache.index if node.checkpoint is not None])
    assert positions[0] == positions[1]


def test_stripped_answer_leaves_the_prompt_to_resume_at():
    it = lab()
    prompt = words(100, "question")
    it.ask(prompt, max_tokens=50, keep_output=False)
    assert it.ask(prompt + words(60, "next")).account.resumed_at == 100


@pytest.mark.parametrize("shared", [100, 127, 128, 136, 1000])
def test_third_prompt_resumes_where_two_parted(shared):
    it = lab(decode_reuse="none")
    head = words(shared, "head")
    accounts = [it.ask(head + words(300, i)).account for i in range(3)]
    assert accounts[2].resumed_at == shared


def test_simultaneous_prompts_compute_their_common_beginning_once():
    it = lab(decode_reuse="none", tokens_per_step=512)
    head = words(1000, "head")
    for i in range(8):
        it.submit(head + words(300, i), max_tokens=4)
    it.run()
    assert it.ledger.prefilled == 1000 + 8 * 300


def test_second_user_resumes_after_the_last_token_of_the_system_prompt():
    it = lab(decode_reuse="none")
    system = words(500, "system")
    for user in range(3):
        prompt = system + words(300, user)
        seq = it.ask(prompt, boundaries=Boundaries(system_end=500, query_start=500, query_end=800))
        assert seq.account.resumed_at == (500 if user else 0)


def test_two_salts_never_meet_below_a_page():
    it = lab()
    prompt = words(100, "prompt")
    it.ask(prompt, namespace="a")
    it.ask(prompt[:50], namespace="a")
    for length in (10, 50, 100):
        assert it.ask(prompt[:length], namespace="b").account.resumed_at == 0 or length > 10
    fresh = lab()
    fresh.ask(prompt, namespace="a")
    assert fresh.ask(prompt, namespace="b").account.resumed_at == 0


def test_request_without_room_for_tails_is_served_without_them():
    it = Lab(n_pages=20, tails=True)
    for first in range(5):
        seq = it.ask(words(40, first), max_tokens=20)
        assert seq.n_output == 20


def test_preempted_request_resumes_without_a_row():
    it = lab(decode_reuse="none")
    prompt = words(100, "prompt")
    seq = it.submit(prompt, max_tokens=10)
    for _ in range(4):
        it.step()
    it.scheduler.preemption.start_over(seq, OutOfPages(1, 0, 0))
    prefilled = it.ledger.prefilled
    it.run()
    assert it.ledger.prefilled == prefilled
    assert seq.n_output == 10


def test_prompt_that_is_scored_uses_no_tail():
    it = lab()
    prompt = words(100, "prompt")
    it.ask(prompt)
    seq = it.scheduler.submit(Generation(tuple(prompt), SamplingParams(max_tokens=1, prompt_logprobs=0)))
    it.run()
    assert seq.account.resumed_at == 0
