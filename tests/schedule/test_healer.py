"""Healing over an executor that remembers everything: what is read is what was promised, and nothing is lost."""

import random

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headwater.errors import OutOfPages
from headwater.request import Generation, Healing, SamplingParams
from headwater.schedule.kinds.healing import MAX_QUEUED
from headwater.schedule.kinds.request import Request
from headwater.schedule.sequence import Phase, Purpose, key_of
from tests.schedule.ledger import Lab, Ledger, words
from tests.schedule.traffic import check_nothing_is_lost, drawn_sizes, run_traffic
from tests.support import FULL, examples

SETTINGS = settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))


class MarkedLedger(Ledger):
    """Approximate states of a prefix are not those of the same tokens computed exactly."""

    def label(self, seq: Request, n: int) -> int:
        labels = self._labels.setdefault(seq.id, [0])
        begin = len(seq.tokens) if seq.marked_from is None else seq.marked_from
        for at in range(len(labels) - 1, n):
            labels.append(hash((labels[-1], seq.tokens[at], at >= begin)))
        return labels[n]


class HealingLab(Lab):
    """Requests with `marked_from` stand for composed ones: what is cached of them is marked from there on."""

    def __init__(self, healing: Healing = Healing.IDLE, **sizes) -> None:
        super().__init__(**sizes, healing=healing)
        self.ledger = MarkedLedger(self.layout.page_size, exact=self.ledger.exact)

    def compose(self, prompt: list[int], max_tokens: int = 1, marked_from: int = 8, namespace: str = "") -> Request:
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        seq = Request(self.scheduler.new_id(), Generation(tuple(prompt), params, namespace), marked_from=marked_from)
        seq.key = seq.key_until(len(prompt))
        self.scheduler.enqueue(seq)
        return seq

    def step_until_only_healing_is_left(self) -> None:
        scheduler = self.scheduler
        while scheduler.computing or len(scheduler.waiting) or scheduler.answers:
            self.step()

    def resumes_at(self, seq: Request) -> int:
        """Return the position at which the next turn would resume, at the end of this one."""
        keys = key_of(seq.tokens), seq.key_until(len(seq.tokens))
        return max(self.cache.match(key, len(seq.tokens) + 1).checkpoint_tokens for key in keys)

    def step_until_it_heals(self) -> None:
        while self.scheduler.healer.seq is None:
            assert not self.scheduler.idle, "nothing is healed"
            self.step()


@pytest.mark.parametrize("healing", [Healing.IDLE, Healing.ALWAYS])
@SETTINGS
@given(seed=st.integers(0, 10**9))
@example(seed=4732)  # alone in the smallest arena, and what another one published beside it is held twice
def test_random_traffic_reads_only_committed_tokens_and_loses_nothing(healing: Healing, seed: int) -> None:
    rng = random.Random(seed)
    longest, sizes = drawn_sizes(rng)
    eviction, decode_reuse = rng.choice(["lru", "seglen", "headwater"]), rng.choice(["canonical", "none"])
    it = HealingLab(healing, **sizes, eviction=eviction, decode_reuse=decode_reuse)

    def ask(prompt: list[int], most: int, namespace: str) -> Request:
        if rng.random() < 0.6:
            return it.compose(prompt, most, rng.choice([2, 8, 17]), namespace)
        return it.submit(prompt, most, namespace=namespace)

    asked = run_traffic(rng, it, longest, ask)
    check_nothing_is_lost(it, asked)
    healer = it.scheduler.healer
    composed = [s for s in asked if s.marked_from is not None and len(s.tokens) // 4 * 4 > s.marked_from]
    assert healer.healed + healer.superseded + healer.given_up == len(composed)


def test_the_next_turn_resumes_exactly_where_it_would_have_resumed() -> None:
    it = HealingLab()
    first = it.compose(words(50, 1), 30)
    it.run()
    assert it.cache.branches.checkpoints(first.key_until(80), "") == (first.marked_from,)
    turn = it.ask([*first.tokens, *words(9, 2)])
    assert turn.account is not None
    assert (turn.account.resumed_at, turn.account.approximate_tokens) == (80, 0)
    assert it.scheduler.computed[Purpose.HEALING] == 80 - first.marked_from


def test_healed_request_uses_as_much_memory_as_an_exact_one() -> None:
    healed, exact = HealingLab(placement="branch"), Lab(placement="branch")
    healed.compose(words(50, 1), 30)
    healed.run()
    exact.ask(words(50, 1), 30)
    assert healed.cache.stats().pages_by_use() == exact.cache.stats().pages_by_use()


def test_a_session_that_went_on_is_healed_once() -> None:
    it = HealingLab()
    companion = it.submit(words(8, 3), 400)
    first = it.compose(words(50, 1), 6)
    while first.phase is not Phase.DONE:
        it.step()
    it.compose([*first.tokens, *words(20, 2)], 6)
    it.run()
    healer = it.scheduler.healer
    assert companion.n_output == 400
    assert (healer.healed, healer.superseded, healer.given_up) == (1, 1, 0)


def test_idle_healing_waits_for_running_requests_and_always_does_not() -> None:
    for healing, beside in ((Healing.IDLE, False), (Healing.ALWAYS, True)):
        it = HealingLab(healing)
        companion = it.submit(words(8, 3), 300)
        it.compose(words(50, 1), 6)
        it.step_until_it_heals()
        assert (companion.phase is Phase.DECODE) == beside


def test_healing_leg_is_at_most_a_shared_steps_length() -> None:
    it = HealingLab(n_pages=2000, tokens_per_step=1024)
    it.compose(words(1000, 1))
    it.step_until_it_heals()
    assert 0 < it.scheduler.computed[Purpose.HEALING] <= it.scheduler.limits.shared_step


def test_parked_healing_resumes_at_its_last_leg_and_leaves_no_checkpoint() -> None:
    it = HealingLab(n_pages=2000, tokens_per_step=16)
    first = it.compose(words(200, 1), 4)
    it.step_until_it_heals()
    for number in range(3):
        it.step()
        visitor = it.submit(words(30, "visitor", number), 3)
        it.step()
        assert it.scheduler.healer.seq is None
        assert visitor.phase is not Phase.WAITING
        it.step_until_it_heals()
    it.run()
    assert it.scheduler.computed[Purpose.HEALING] == 204, "no token twice"
    assert it.cache.branches.checkpoints(key_of(first.tokens), "") == (196, 204)


def test_the_queue_is_bounded() -> None:
    it = HealingLab(n_pages=8000)
    companion = it.submit(words(8, 0), 4000)
    for number in range(MAX_QUEUED + 3):
        seq = it.compose(words(20, number + 1))
        while seq.phase is not Phase.DONE:
            it.step()
    assert len(it.scheduler.healer.queue) == MAX_QUEUED
    assert it.scheduler.healer.given_up == 3
    it.scheduler.cancel(companion)
    it.run()
    assert it.scheduler.healer.healed == MAX_QUEUED


def test_healing_gives_way_where_a_running_request_needs_its_memory() -> None:
    it = HealingLab(Healing.ALWAYS, n_pages=36, checkpoint_pages=2, tokens_per_step=8)
    companion = it.submit(words(8, 3), 80)
    it.compose(words(40, 1), 1)
    it.run()
    assert companion.n_output == 80
    assert it.scheduler.preemptions == 0
    assert it.scheduler.healer.given_up == 1


def test_healing_without_memory_waits_until_a_running_request_ends() -> None:
    it = HealingLab(Healing.ALWAYS, n_pages=60, checkpoint_pages=2, tokens_per_step=8, decode_reuse="none")
    companion = it.submit(words(8, 3), 130)
    it.compose(words(60, 1))
    it.step_until_it_heals()
    healer = it.scheduler.healer
    while healer.seq is not None:
        it.step()
    assert (len(healer.queue), healer.given_up, healer.healed) == (1, 0, 0)
    computed = it.scheduler.computed[Purpose.HEALING]
    for _ in range(3):
        it.step()
    assert companion.phase is Phase.DECODE
    assert it.scheduler.computed[Purpose.HEALING] == computed, "it is not begun over and over"
    it.scheduler.cancel(companion)
    it.run()
    assert (healer.healed, healer.given_up, it.scheduler.preemptions) == (1, 0, 0)


def test_running_request_preempts_healing_which_resumes_later() -> None:
    it = HealingLab(Healing.ALWAYS, n_pages=100, tokens_per_step=8)
    companion = it.submit(words(8, 3), 60)
    it.compose(words(60, 1))
    it.step_until_it_heals()
    assert it.scheduler.preemption.make_room_for(companion, OutOfPages(1, 0, 0))
    healer = it.scheduler.healer
    assert (healer.seq, len(healer.queue), healer.given_up) == (None, 1, 0)
    it.run()
    assert (healer.healed, healer.given_up, it.scheduler.preemptions) == (1, 0, 0)


def test_healing_is_charged_to_no_namespace() -> None:
    it = HealingLab()
    it.compose(words(50, 1), 2, namespace="a")
    it.step_until_it_heals()
    served = dict(it.scheduler.workload.shares._served)
    it.run()
    assert it.scheduler.computed[Purpose.HEALING] > 0
    assert dict(it.scheduler.workload.shares._served) == served


POOLS = {"one": {}, "split": {"state_fraction": 0.4}, "elastic": {"state_fraction": 0.4, "elastic_pages": 7}}


@pytest.mark.parametrize("eviction", ["lru", "headwater", "gdsf", "flop_aware(2.0)", "lfu"])
@pytest.mark.parametrize("pool", POOLS)
def test_session_resumes_as_deep_with_healing_at_any_memory_size(pool: str, eviction: str) -> None:
    outcomes = set()
    for n_pages in range(140, 330, 4 if FULL else 24):
        sizes = {"n_pages": n_pages, "checkpoint_pages": 5, "max_running": 2, "eviction": eviction, **POOLS[pool]}
        it = HealingLab(**sizes)
        longest = 500 if pool == "one" else 250
        it.ask(words(12, "old"))
        seq = it.compose(words(longest, 1), 10)
        it.step_until_only_healing_is_left()
        before = it.resumes_at(seq)
        it.run()
        assert it.resumes_at(seq) >= before, f"{n_pages} pages"
        outcomes.add((it.scheduler.healer.healed, it.scheduler.healer.given_up))
    assert outcomes == {(1, 0), (0, 1)}, "there are sizes that are too small, and such as are not"


def test_healing_evicts_older_requests_before_its_own_prefix() -> None:
    it = HealingLab(n_pages=112, checkpoint_pages=2)
    old = it.ask(words(100, "old"))
    seq = it.compose(words(160, 1), 10)
    it.step_until_only_healing_is_left()
    assert it.resumes_at(old) == 96
    it.run()
    assert (it.scheduler.healer.healed, it.scheduler.healer.given_up) == (1, 0)
    assert it.resumes_at(old) < 96
    assert it.resumes_at(seq) == 168


def test_healing_that_cannot_fit_evicts_nothing() -> None:
    it = HealingLab(n_pages=60, checkpoint_pages=2)
    old = it.ask(words(12, "old"))
    it.compose(words(160, 1), 10)
    it.step_until_only_healing_is_left()
    evicted = it.cache.stats().evicted_kv_pages
    it.run()
    assert it.scheduler.healer.given_up == 1
    assert it.cache.stats().evicted_kv_pages == evicted
    assert it.resumes_at(old) == 8


def test_a_state_that_somebody_resumed_from_meanwhile_stays() -> None:
    it = HealingLab(n_pages=2000, tokens_per_step=16)
    first = it.compose(words(200, 1), 4)
    it.step_until_it_heals()
    it.step()
    at = it.scheduler.healer.seq.computed
    visitor = it.submit([*first.tokens[:at], 1, 2])
    while visitor.phase is not Phase.DONE:
        it.step()
    assert visitor.account is not None
    assert visitor.account.resumed_at == at
    it.run()
    assert it.scheduler.healer.healed == 1
    again = it.ask([*first.tokens[:at], 1, 2])
    assert again.account is not None
    assert again.account.resumed_at == at


def test_requests_with_other_marks_on_the_same_tokens_are_both_healed() -> None:
    it = HealingLab()
    companion = it.submit(words(8, 3), 400)
    for marked_from in (8, 16):
        seq = it.compose(words(50, 1), 6, marked_from)
        while seq.phase is not Phase.DONE:
            it.step()
    it.scheduler.cancel(companion)
    it.run()
    healer = it.scheduler.healer
    assert (healer.healed, healer.superseded, healer.given_up) == (2, 0, 0)
    for marked_from in (8, 16):
        marks = Request(0, seq.generation, marked_from=marked_from)
        marks.tokens = seq.tokens
        assert max(it.cache.branches.checkpoints(marks.key_until(56), ""), default=0) <= marked_from


def test_running_healing_counts_to_the_limit_of_queued_ones() -> None:
    it = HealingLab(n_pages=2000, tokens_per_step=16)
    it.compose(words(200, 1))
    it.step_until_it_heals()
    healer = it.scheduler.healer
    for number in range(MAX_QUEUED + 2):
        generation = Generation(tuple(words(20, "other", number)), SamplingParams())
        healer.remember(Request(it.scheduler.new_id(), generation, marked_from=8))
    assert (len(healer.queue), healer.given_up) == (MAX_QUEUED - 1, 3)
    it.submit(words(9, "visitor"))
    it.step()
    assert (healer.seq, len(healer.queue)) == (None, MAX_QUEUED)


def test_stopped_healer_counts_all_unfinished_healings() -> None:
    it = HealingLab(tokens_per_step=8)
    companion = it.submit(words(8, 3), 100)
    for number in range(3):
        seq = it.compose(words(50, number), 2)
        while seq.phase is not Phase.DONE:
            it.step()
    it.scheduler.cancel(companion)
    it.step_until_it_heals()
    it.scheduler.healer.stop()
    it.run()
    assert (it.scheduler.healer.healed, it.scheduler.healer.given_up) == (0, 3)


def test_a_fault_where_it_begins_costs_nothing_but_that_healing(monkeypatch: pytest.MonkeyPatch) -> None:
    it = HealingLab()
    it.compose(words(50, 1), 6)
    it.step_until_only_healing_is_left()
    monkeypatch.setattr(type(it.cache.branches), "checkpoints", lambda *_: 1 / 0)
    step = it.scheduler.plan_step()
    assert not step
    ((_, error),) = it.scheduler.failures
    assert isinstance(error, ZeroDivisionError)
    assert it.scheduler.idle
    assert it.scheduler.healer.given_up == 1
    it.cache.check()
