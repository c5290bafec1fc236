"""Promises about hits, request by request, with the default placement."""

import random
from dataclasses import replace

import pytest

from headwater.account import Reason
from headwater.cache.placement.base import Placed, Placement, PlacementQuery
from headwater.errors import OutOfPages, RequestTooLarge
from headwater.request import Boundaries
from headwater.schedule.sequence import Phase
from tests.schedule.ledger import Lab, words
from tests.support import FULL

PAGE = 64


def lab(**settings) -> Lab:
    return Lab(**{"n_pages": 4000, "page_size": PAGE, "tokens_per_step": 2048, **settings})


def test_shared_prefix_of_raw_token_prompts_hits_on_the_second_request():
    for shared, own in ((3000, 1000), (1000, 500), (500, 2000), (200, 150)):
        it = lab()
        head = words(shared, "head")
        first = it.ask(head + words(own, 1))
        second = it.ask(head + words(own, 2))
        assert first.account.reason is Reason.COLD
        assert second.account.resumed_at >= shared - (shared + own) // 8 - PAGE
        third = it.ask(head + words(own, 3))
        assert third.account.resumed_at == shared // PAGE * PAGE
        assert third.account.reason is Reason.DIVERGED


def test_shared_system_prompt_of_chats_hits_on_the_second_request():
    it = lab()
    system = words(1000, "system")
    known = Boundaries(system_end=1000, query_start=1003, query_end=1100)
    it.ask(system + words(200, 1), boundaries=known)
    second = it.ask(system + words(200, 2), boundaries=known)
    assert second.account.resumed_at == 960


def test_an_identical_request_skips_all_but_its_last_page():
    for length in (65, 128, 129, 700, 1536, 2048, 2049, 5000):
        it = lab()
        prompt = words(length, length)
        it.ask(prompt)
        again = it.ask(prompt)
        assert again.account.resumed_at == (length - 1) // PAGE * PAGE
        assert again.account.reason is Reason.FULL


def test_eight_simultaneous_prompts_with_one_prefix_compute_it_once():
    for tokens_per_step in (512, 2048, 16384):
        it = lab(tokens_per_step=tokens_per_step, decode_reuse="none")
        head = words(3000, "head")
        for i in range(8):
            it.submit(head + words(300, i), max_tokens=4)
        it.run()
        shared = 3000 // PAGE * PAGE
        assert it.ledger.prefilled == shared + 8 * (3300 - shared)


def test_first_waiting_request_leads_after_the_leader_is_cancelled():
    it = lab(tokens_per_step=512, decode_reuse="none")
    head = words(3000, "head")
    seqs = [it.submit(head + words(300, i), max_tokens=4) for i in range(4)]
    it.step()
    it.step()
    assert [s.phase for s in seqs] == [Phase.PREFILL, *[Phase.WAITING] * 3]
    it.scheduler.cancel(seqs[0])
    it.step()
    assert [s.phase for s in seqs[1:]] == [Phase.PREFILL, Phase.WAITING, Phase.WAITING]
    assert seqs[1].account.resumed_at > 0  # what the first one committed is not lost
    it.run()
    assert all(s.n_output == 4 for s in seqs[1:])
    assert it.ledger.prefilled <= 3000 + 3 * (300 + PAGE) + 512


def test_a_chat_that_grows_resumes_after_the_last_answer():
    it = lab()
    history, longest_sent = words(700, "system and first query"), 0
    for turn in range(6):
        before = len(history)
        seq = it.ask(
            history,
            max_tokens=100,
            boundaries=Boundaries(system_end=500, query_start=before - 100, query_end=before - 3),
        )
        if turn:
            assert seq.account.resumed_at == longest_sent // PAGE * PAGE
        longest_sent = len(seq.tokens)
        history = seq.tokens + words(90, "query", turn)


def test_immediate_chat_turn_waits_for_the_answer_being_prefilled():
    it = lab(tokens_per_step=64)
    first = it.submit(words(200, 1), max_tokens=200)
    while first.phase is not Phase.DONE:
        it.step()
    it.step()  # the answer's prefill has begun
    second = it.submit(first.tokens + words(80, 2))
    before = it.ledger.prefilled
    it.run()
    assert it.ledger.prefilled - before <= 200 + 80 + 2 * PAGE
    assert second.account.resumed_at == 384


@pytest.mark.parametrize("decode_reuse", ["canonical", "none"])
def test_an_answer_of_another_engine_is_prefilled_as_one_of_its_own(decode_reuse):
    """Its next turn resumes after it; it gives way to requests, and the oldest are dropped beyond as many as run."""
    mine, other = lab(decode_reuse=decode_reuse), lab(decode_reuse=decode_reuse)
    prompt = words(200, 1)
    seq = mine.ask(prompt, max_tokens=200)
    other.ask(prompt, keep_output=False)
    asked = replace(seq.generation, prompt=tuple(seq.tokens[:384]), namespace="other")
    other.scheduler.keep_answer(asked)
    other.scheduler.keep_answer(replace(asked, namespace=""))
    assert [answer.generation.namespace for answer in other.scheduler.answers] == (
        ["other", ""] if decode_reuse == "canonical" else []
    )
    other.run()
    turn = seq.tokens + words(80, 2)
    found = [it.ask(turn).account.resumed_at for it in (mine, other)]
    assert found == ([384, 384] if decode_reuse == "canonical" else [192, 192])
    for n in range(20):
        other.scheduler.keep_answer(replace(asked, namespace=str(n)))
    assert len(other.scheduler.answers) == (other.scheduler.limits.max_running if decode_reuse == "canonical" else 0)


def test_a_chat_turn_with_stripped_reasoning_resumes_at_the_last_user_query():
    it = lab()
    prompt = words(900, "history")
    known = Boundaries(system_end=300, query_start=700, query_end=890)
    it.ask(prompt, max_tokens=500, boundaries=known, keep_output=False)
    following = prompt[:890] + words(300, "answer without its reasoning, and the next query")
    second = it.ask(following, boundaries=Boundaries(system_end=300, query_start=1100, query_end=1180))
    assert second.account.resumed_at == 890 // PAGE * PAGE


def test_an_output_that_the_template_will_strip_is_not_computed_again():
    it = lab()
    it.ask(words(640, 1), max_tokens=500, keep_output=False)
    assert it.ledger.prefilled == 640


def test_kv_without_a_checkpoint_is_reported_as_stranded():
    it = lab(placement="branch")
    head = words(1000, "head")
    it.ask(head + words(500, 1))
    second = it.ask(head + words(500, 2))
    assert second.account.resumed_at == 0
    assert second.account.stranded_tokens == 960
    assert second.account.reason is Reason.NO_CHECKPOINT
    third = it.ask(head + words(500, 3))
    assert third.account.resumed_at == 960


def test_two_salts_never_meet():
    it = lab()
    prompt = words(1000, 1)
    it.ask(prompt, namespace="alice")
    bob = it.ask(prompt, namespace="bob")
    assert bob.account.resumed_at == 0
    assert bob.account.reason is Reason.OTHER_NAMESPACE
    assert it.ask(prompt, namespace="alice").account.resumed_at == 960


def test_cancelled_request_frees_all_its_pages():
    for steps in range(0, 12):
        it = lab(n_pages=300, tokens_per_step=128)
        it.ask(words(300, "before"))
        baseline = it.cache.stats()
        seq = it.submit(words(900, 1), max_tokens=200)
        for _ in range(steps):
            it.step()
        it.scheduler.cancel(seq)
        it.run()
        after = it.cache.stats()
        assert after.pages_private == after.pages_slot == after.leases == after.open_plans == 0
        assert after.pages_free + after.pages_kv + after.pages_checkpoint + after.pages_tail == 300
        assert after.pages_free <= baseline.pages_free


def test_smallest_legal_arena_serves_every_fitting_request_in_turn():
    longest, checkpoint_pages = 1000, 5
    smallest = -(-longest // PAGE) + checkpoint_pages
    it = lab(n_pages=smallest, checkpoint_pages=checkpoint_pages, tokens_per_step=256)
    rng = random.Random(0)
    prompts = [words(rng.randrange(1, 900), i) for i in range(12)]
    for i in range(150 if FULL else 12):
        prompt = rng.choice(prompts)[: rng.randrange(1, 900)] + words(rng.randrange(0, 60), i)
        seq = it.ask(prompt, max_tokens=rng.randrange(1, longest - len(prompt) + 1))
        assert seq.preemptions == 0
    with pytest.raises(RequestTooLarge, match=rf"{smallest + 1:,} pages of memory, there are {smallest:,}"):
        it.submit(words(longest, "too large"), max_tokens=25)


def test_a_request_that_can_never_fit_is_refused_at_once():
    it = lab(n_pages=20, max_model_len=5000)
    with pytest.raises(RequestTooLarge, match=r"1,300 tokens need 23 pages of memory, there are 20"):
        it.submit(words(1200, 1), max_tokens=100)
    with pytest.raises(RequestTooLarge, match=r"together are 5,100 tokens, the server takes 5,000"):
        it.submit(words(5000, 1), max_tokens=100)
    assert it.scheduler.idle


def test_one_request_after_short_chats_can_use_95_percent_for_kv():
    it = lab(n_pages=400, checkpoint_pages=10, max_running=8, max_model_len=30_000)
    for i in range(8):
        it.submit(words(100, i), max_tokens=20)
    it.run()
    seq = it.ask(words(int(0.95 * 400) * PAGE, "long"), max_tokens=1, namespace="other")
    assert seq.n_output == 1


@pytest.mark.parametrize("decode_reuse", ["canonical", "none", "raw"])
def test_last_request_is_preempted_without_pages_and_its_answer_is_unchanged(decode_reuse):
    prompts = [words(200, i) for i in range(4)]
    roomy = lab(decode_reuse=decode_reuse)
    expected = [roomy.ask(p, max_tokens=300).tokens for p in prompts]
    tight = lab(n_pages=26, checkpoint_pages=1, decode_reuse=decode_reuse)
    seqs = [tight.submit(p, max_tokens=300) for p in prompts]
    tight.run()
    assert [s.tokens for s in seqs] == expected
    assert seqs[0].preemptions == 0
    assert tight.scheduler.preemptions > 0


@pytest.mark.parametrize("decode_reuse", ["canonical", "none", "raw"])
def test_a_preempted_answer_is_replayed_many_rows_a_step(decode_reuse):
    it, wanted = lab(decode_reuse=decode_reuse), lab(decode_reuse=decode_reuse).ask(words(200, 1), max_tokens=150)
    seq = it.submit(words(200, 1), max_tokens=150)
    while seq.n_output < 100:
        it.step()
    it.scheduler.preemption.start_over(seq, OutOfPages(1, 0, 0))
    while seq.phase is not Phase.DECODE:
        it.step()
    ends = []
    while seq.n_output == 100:
        it.step()
        ends.append(seq.computed)
    published = decode_reuse == "raw"  # pages, with the states at their ends
    assert ends == ([232, 256, 288, 300] if published else [232, 264, 296, 300])
    it.run()
    assert seq.tokens == wanted.tokens


class Taught(Placement):
    """Placement that notes the prompts from which it learns."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def place(self, query: PlacementQuery) -> Placed:
        return Placed((query.last_page,))

    def learn(self, query: PlacementQuery) -> None:
        self.lengths.append(query.length)


def test_a_placement_learns_once_from_a_request_that_is_preempted():
    it = lab(tokens_per_step=128)
    it.scheduler.planner.placement = taught = Taught()
    seq = it.submit(words(1000, 1), max_tokens=4)
    it.step()
    it.step()
    assert 0 < seq.computed < 1000
    it.scheduler.preemption.start_over(seq, OutOfPages(1, 0, 0))
    it.run()
    assert seq.preemptions == 1
    assert taught.lengths == [1000]


def all_started_over(it, n):
    """Requests that have said something, and are going to be replayed."""
    seqs = [it.submit(words(60 + i, i), max_tokens=100) for i in range(n)]
    while any(seq.n_output < 80 for seq in seqs):
        it.step()
    for seq in seqs:
        it.scheduler.preemption.start_over(seq, OutOfPages(1, 0, 0))
    it.rows.clear()


def test_a_step_replays_32_rows_of_all_answers_together():
    it = lab(decode_reuse="none")
    all_started_over(it, 3)
    it.run()
    assert max(sum(rows.values()) for rows in it.rows) == 32
    assert max(len(rows) for rows in it.rows) == 3


@pytest.mark.parametrize("tokens_per_step", [4, 16])
def test_a_step_replays_no_more_rows_than_it_may_have(tokens_per_step):
    it = lab(decode_reuse="none", tokens_per_step=tokens_per_step)
    all_started_over(it, 1)
    it.run()
    assert max(sum(rows.values()) for rows in it.rows) == tokens_per_step


@pytest.mark.parametrize("free", [0, 1, 2])
def test_rows_that_are_replayed_leave_pages_to_the_next_row_of_others(free):
    """The answer that is replayed came first; it takes what its last page has room for, and pages that are left."""
    for before in range(57, 61):
        it = lab(decode_reuse="none", page_size=4, tokens_per_step=64)
        seq = it.submit(words(61, 1), max_tokens=100)
        while seq.n_output < 80:
            it.step()
        other = it.submit(words(before, 2), max_tokens=500)
        while other.phase is not Phase.DECODE:
            it.step()
        it.scheduler.preemption.start_over(seq, OutOfPages(1, 0, 0))
        while seq.phase is not Phase.DECODE:
            it.step()
        if other.computed % 4 == 0 and seq.computed == 61:
            break
    else:
        pytest.fail("no step in which the other request needs a page")
    it.scheduler.planner.extend = with_free_pages(it.scheduler.planner.extend, 1 + free)
    it.step()
    assert [seq.preemptions, other.preemptions] == [1, 0]
    assert seq.computed == 64 + 4 * free
    assert other.computed % 4 == 1


def with_free_pages(extend, free):
    def extended(seq, end):
        nonlocal free
        while len(seq.table) * 4 < end:
            if not free:
                raise OutOfPages(1, 0, 0)
            free -= 1
            extend(seq, len(seq.table) * 4 + 1)

    return extended


@pytest.mark.parametrize("legs", [0, 1], ids=["first", "later"])
def test_failing_completion_of_a_leg_fails_only_its_request_and_frees_memory(monkeypatch, legs):
    it = lab(n_pages=200, tokens_per_step=128)
    seq = it.submit(words(600, "broken"), 4)
    for _ in range(legs):
        it.step()
    with monkeypatch.context() as broken:
        broken.setattr(type(seq), "complete", lambda self, plan: 1 / 0)
        it.scheduler.plan_step()
    assert [(failed, type(error)) for failed, error in it.scheduler.failures] == [(seq, ZeroDivisionError)]
    it.scheduler.failures.clear()
    it.cache.check()
    assert not it.cache.leases
    assert it.ask(words(300, "after"), 4).computed


class Fixed(Placement):
    """Positions at two and four pages, the first of which is a learned one or an optional one."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def place(self, query: PlacementQuery) -> Placed:
        return replace(Placed((2 * PAGE, 4 * PAGE)), **{self._kind: (2 * PAGE,)})


@pytest.mark.parametrize("kind", ["learned", "optional"])
@pytest.mark.parametrize(("n_pages", "taken"), [(20, [2, 4]), (10, [4]), (8, [])])
def test_positions_are_given_up_in_order_when_pages_are_short(kind: str, n_pages: int, taken: list[int]):
    it = lab(n_pages=n_pages, decode_reuse="none")
    it.scheduler.planner.placement = Fixed(kind)
    it.ask(words(5 * PAGE - 1, "prompt"))  # five pages, two for its slot, and two for each checkpoint
    assert sorted(at // PAGE for _, _, at in it.cache.checkpoints()) == taken
