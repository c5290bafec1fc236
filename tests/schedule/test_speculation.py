"""Drafts of a scheduler's steps: which are verified, what an answer is with them, and what they cost."""

from itertools import pairwise
from unittest.mock import Mock

import pytest

from headwater.config import SPECULATION
from headwater.draft.drafter import MOST_DRAFTS, Draft, Source
from headwater.draft.ngram import PromptLookup
from headwater.draft.runs import WIDTH
from headwater.errors import OutOfPages
from headwater.request import Drafting, Generation, SamplingParams
from headwater.schedule import draft_gains as gains
from headwater.schedule.sequence import Phase
from headwater.schedule.speculation import (
    DRAFTERS,
    MAX_PAUSE_STEPS,
    MTP,
    TRY_PERIOD,
    Share,
    Speculation,
    Speculator,
    speculation_of,
)
from headwater.server.requests.sampling import SpeculationOptions
from tests.schedule.ledger import Lab, next_token, words


class Oracle:
    """Drafts the tokens that the ledger says next, of which every `wrong`th is another."""

    def __init__(self, wrong: int = 0) -> None:
        self.tokens, self.wrong, self.drafted = list[int](), wrong, 0

    def take(self, tokens) -> None:
        self.tokens += tokens

    def propose(self, most: int) -> Draft:
        draft: list[int] = []
        for _ in range(most):
            self.drafted += 1
            token = next_token([*self.tokens, *draft])
            draft.append(token + 1 if self.wrong and self.drafted % self.wrong == 0 else token)
        return Draft(draft, WIDTH)


def speculating(wrong: int = 0) -> Speculation:
    return Speculation(lambda namespace: [Oracle(wrong)])


@pytest.mark.parametrize("wrong", [0, 1, 3, 7])
@pytest.mark.parametrize("decode_reuse", ["canonical", "none"])
def test_answers_and_hits_are_those_without_drafts(wrong: int, decode_reuse: str) -> None:
    plain, drafting = Lab(decode_reuse=decode_reuse), Lab(decode_reuse=decode_reuse, speculation=speculating(wrong))
    answers = []
    for it in (plain, drafting):
        seqs = [it.submit(words(30 + 7 * i, i), max_tokens=90) for i in range(4)]
        it.run()
        again = [it.ask(seq.tokens[: seq.n_prompt + 40], max_tokens=30) for seq in seqs]
        answers.append([(seq.tokens, seq.account) for seq in (*seqs, *again)])
    assert answers[0] == answers[1]
    assert drafting.scheduler.speculation.rejected > 0 or not wrong
    assert drafting.scheduler.speculation.accepted > 0 or wrong == 1
    assert drafting.steps < plain.steps or wrong


def test_drafts_that_are_right_take_a_fraction_of_the_steps() -> None:
    it = Lab(speculation=speculating())
    seq = it.ask(words(20, 1), max_tokens=170)
    assert seq.n_output == 170
    assert len([rows for rows in it.rows if rows]) < 30


def test_request_preempted_with_accepted_drafts_has_the_same_answer() -> None:
    wanted = Lab().ask(words(60, 1), max_tokens=120).tokens
    it = Lab(speculation=speculating())
    seq = it.submit(words(60, 1), max_tokens=120)
    while not seq.accepted:
        it.step()
    it.scheduler.preemption.start_over(seq, OutOfPages(1, 0, 0))
    assert seq.accepted == 0
    it.run()
    assert seq.tokens == wanted


def test_drafts_preempt_no_request_and_short_memory_changes_no_answer() -> None:
    prompts = [words(40, i) for i in range(4)]
    expected = [Lab().ask(prompt, max_tokens=100).tokens for prompt in prompts]
    it = Lab(n_pages=60, checkpoint_pages=1, speculation=speculating(5))
    seqs = [it.submit(prompt, max_tokens=100) for prompt in prompts]
    it.run()
    assert [seq.tokens for seq in seqs] == expected
    assert it.scheduler.preemptions > 0


def test_an_answer_is_not_drafted_beyond_its_end() -> None:
    it = Lab(speculation=speculating())
    for n in (1, 2, 3):
        it.rows.clear()
        assert it.ask(words(20, n), max_tokens=n).n_output == n
        assert max((rows for step in it.rows for rows in step.values()), default=0) <= max(0, n - 1)


def test_decode_reuse_raw_is_not_drafted() -> None:
    it = Lab(decode_reuse="raw", speculation=speculating())
    it.ask(words(20, 1), max_tokens=50)
    assert max(rows for step in it.rows for rows in step.values()) == 1


def test_off_drafts_nothing() -> None:
    it = Lab(speculation=speculation_of("off"))
    seq = it.submit(words(20, 1), max_tokens=50)
    while seq.phase is not Phase.DECODE:
        it.step()
    it.step()
    assert seq.speculator is None
    assert not it.scheduler.speculation


@pytest.mark.parametrize(("drafting", "free"), [(False, 10), (True, 0)])
def test_steps_that_may_have_drafts_are_planned_one_by_one(drafting: bool, free: int) -> None:
    """A recording leaps over steps that give a token each: how many a step with drafts gives is not known before."""
    it = Lab(speculation=speculating() if drafting else speculation_of("off"))
    seq = it.submit(words(20, 1), max_tokens=50)
    while seq.phase is not Phase.DECODE:
        it.step()
    assert it.scheduler.free_steps(10) == free


def seconds(first: float, each: float, drafting: float = 0.0) -> gains.StepSeconds:
    """As measured in steps of 1 row, and of 3 and 5 rows with drafts, which take `drafting` more."""
    measured = gains.StepSeconds()
    for _ in range(200):
        measured.note(1, 0, first)
        measured.note(3, 2, first + 2 * each + drafting)
        measured.note(5, 4, first + 4 * each + drafting)
    return measured


def test_the_seconds_of_a_step_are_those_that_were_measured() -> None:
    measured = seconds(0.030, 0.005, drafting=0.020)
    assert [measured(rows, 0) for rows in (1, 5, 9)] == pytest.approx([0.030, 0.050, 0.070], rel=0.01)
    assert [measured(rows, 2) for rows in (3, 5, 9)] == pytest.approx([0.060, 0.070, 0.090], rel=0.01)
    for _ in range(2000):  # without drafts: what a row costs stays known
        measured.note(1, 0, 0.030)
    assert measured(9, 8) == pytest.approx(0.090, rel=0.01)
    measured.note(9, 8, 9.0)  # another process computed
    assert measured(9, 8) < 0.140


def test_cost_without_drafts_is_estimated_from_steps_that_have_them() -> None:
    measured = gains.StepSeconds()
    for _ in range(50):
        measured.note(3, 2, 0.030 + 2 * 0.005)
        measured.note(5, 4, 0.030 + 4 * 0.005)
    assert measured(1, 0) == pytest.approx(0.030, rel=0.01)


def test_a_step_without_drafts_is_thought_no_slower_than_one_with_them() -> None:
    """The only one was a server's first: its kernels were read."""
    measured = gains.StepSeconds()
    measured.note(1, 0, 1.0)
    for _ in range(50):
        measured.note(3, 2, 0.040)
        measured.note(5, 4, 0.050)
    assert measured(1, 0) == pytest.approx(0.045, rel=0.1)


def test_steps_that_are_thought_too_fast_are_found_out() -> None:
    """A few slow steps of many rows make a row dear, and those of few rows seem to take no time."""
    measured = gains.StepSeconds()
    for _ in range(40):
        measured.note(1, 0, 0.006)
        measured.note(17, 16, 0.040)
    for _ in range(200):
        measured.note(1, 0, 0.006)
        measured.note(3, 2, 0.007)
        measured.note(5, 4, 0.008)
    assert measured(3, 2) == pytest.approx(0.007, rel=0.2)
    assert measured(5, 4) == pytest.approx(0.008, rel=0.2)


def test_cost_of_a_row_is_estimated_from_recent_steps_until_measured() -> None:
    """The first step of a server may take a second: its kernels are read."""
    measured = gains.StepSeconds()
    for seconds_of_one in (1.0, *[0.002] * 400):
        measured.note(1, 0, seconds_of_one)
    assert 0.002 < measured(2, 1) < 0.0025
    assert measured(9, 8) < 0.004


def test_steps_without_drafts_are_measured_by_power_of_two_of_rows() -> None:
    """A larger step is recorded, a smaller one is not: the line through both would be wrong at either."""
    measured = gains.StepSeconds()
    for _ in range(gains.PLAIN_STEPS):
        measured.note(1, 0, 0.002)
        measured.note(8, 0, 0.003)
    for _ in range(100):
        measured.note(24, 16, 0.020)
    assert measured(1, 0) == pytest.approx(0.002)
    assert measured(8, 0) == pytest.approx(0.003)


def test_a_slow_first_step_without_drafts_does_not_count() -> None:
    measured = gains.StepSeconds()
    for seconds_of_one in (1.0, 0.002, 0.002):
        measured.note(1, 0, seconds_of_one)
    assert measured(1, 0) == pytest.approx(0.002)


def test_some_steps_of_each_size_are_measured_without_drafts() -> None:
    measured, due = gains.StepSeconds(), list[int]()
    for number in range(2 * gains.PLAIN_PERIOD):
        if measured.is_to_measure(3, False):
            due.append(number)
            measured.note(3, 0, 0.002)
    assert due == [*range(gains.PLAIN_STEPS), *range(gains.PLAIN_PERIOD, gains.PLAIN_PERIOD + gains.PLAIN_STEPS)]
    assert measured.is_to_measure(4, False)


def test_steps_that_compute_prompts_too_do_not_count_as_measured() -> None:
    measured, due = gains.StepSeconds(), list[int]()
    for number in range(gains.PLAIN_PERIOD):
        if measured.is_to_measure(3, False):
            due.append(number)
            if number % 3 == 2:  # the others have legs, so their seconds are not noted
                measured.note(3, 0, 0.002)
    assert due == [*range(3 * gains.PLAIN_STEPS)]


def test_drafts_are_proposed_even_if_every_step_computes_prompts() -> None:
    measured = gains.StepSeconds()
    assert sum(measured.is_to_measure(3, False) for _ in range(gains.PLAIN_PERIOD)) == gains.MAX_PLAIN_STEPS


@pytest.mark.parametrize(("of_drafts", "least", "most"), [(0.1, 0.6, 1.0), (20.0, 0.0, 0.05)])
def test_drafts_end_at_a_load_where_steps_without_them_give_more(of_drafts: float, least: float, most: float) -> None:
    """All are right, and the server has never decoded so many requests without drafts."""
    it, steps = Lab(n_pages=2000, speculation=speculating()), list[int]()
    it.seconds = lambda rows, drafts: 1.0 + of_drafts * bool(drafts)
    for i in range(8):
        it.submit(words(20, i), max_tokens=600)
    while len(steps) < 150:
        it.step()
        rows = it.rows[-1].values()
        if len(rows) == 8:
            steps.append(sum(rows) - len(rows))
    assert least <= sum(n > 0 for n in steps) / len(steps) <= most


def test_a_request_for_which_no_draft_paid_is_asked_ever_more_rarely() -> None:
    class Silent(Oracle):
        def propose(self, most: int) -> Draft:
            asked.append(it.steps)
            return Draft([])

    asked = list[int]()
    it = Lab(speculation=Speculation(lambda namespace: [Silent()]))
    it.scheduler.speculation.is_to_measure = lambda rows: False
    it.ask(words(20, 1), max_tokens=60)
    assert [after - before for before, after in pairwise(asked)] == [2, 3, 5, 9, 9, 9, 9, 9]


@pytest.mark.parametrize(("each", "most"), [(0.0, 1.0), (0.002, 0.1), (0.030, 0.01)])
def test_proposers_without_drafts_use_a_small_share_of_the_time(each: float, most: float) -> None:
    """Eight requests decode in steps of 18 ms, and each that is asked takes `each` seconds."""

    class Silent(Oracle):
        def propose(self, most: int) -> Draft:
            asked.append(it.steps)
            return Draft([])

    asked = list[int]()
    speculation = Speculation(lambda namespace: [Silent()])
    speculation.clock = lambda: each * len(asked)
    it = Lab(n_pages=2000, speculation=speculation)
    for i in range(8):
        it.submit(words(20, i), max_tokens=300)
    it.run()
    assert each * len(asked) <= 1.1 * gains.ASKING_SHARE * 0.018 * it.steps + gains.MAX_ASKING_SECONDS + each
    assert 0 < len(asked) / (8 * it.steps) <= most


def test_a_constrained_request_takes_no_time_for_asking_from_others() -> None:
    now = [0.0]

    class Slow(Oracle):
        def propose(self, most: int) -> Draft:
            now[0] += 1.0
            return Draft([])

    speculation = Speculation(lambda namespace: [Slow()])
    speculation.clock = lambda: now[0]
    speculation.propose(Speculator([Slow()], grammar=Mock()), [1, 2, 3], 4)
    assert speculation.asking.is_left
    speculation.propose(Speculator([Slow()]), [1, 2, 3], 4)
    assert not speculation.asking.is_left


def test_gains_do_not_count_before_a_step_without_drafts_was_measured() -> None:
    """Its seconds are a guess until then."""
    speculation = Speculation()
    speculation.note_step(3, 2, 0, 0.03)
    assert speculation.worth([(speculator(90), 2)], 1, 32) == [2]
    speculation.note_step(3, 2, 0, 0.03)
    assert speculation.trust.of(1) == 1
    speculation.note_step(1, 0, 0, 0.02)
    speculation.worth([(speculator(90), 2)], 1, 32)
    speculation.note_step(3, 2, 0, 0.03)
    assert speculation.trust.of(1) < 1


def test_drafts_that_gain_less_than_expected_pause_until_forgotten() -> None:
    speculation = Speculation(seconds=seconds(1.0, 0.2))
    (before,) = speculation.worth([(speculator(60), 8)], 1, 32)
    for _ in range(20):
        speculation.trust.note(1, expected=1.3, gained=0.5)
    assert before
    assert speculation.worth([(speculator(60), 8)], 1, 32) == [0]
    assert speculation.worth([(speculator(99), 8)], 1, 32) == [8]  # of which more is expected
    assert speculation.worth([(speculator(60), 8)] * 2, 2, 32) != [0, 0]  # another size
    for _ in range(1000):
        speculation.trust.relax(1)
    assert speculation.worth([(speculator(60), 8)], 1, 32) == [before]


def test_a_step_takes_no_more_drafts_than_it_has_room_for() -> None:
    speculation = Speculation(seconds=seconds(1.0, 0.01))
    assert sum(speculation.worth([(speculator(99), MOST_DRAFTS)] * 4, 4, 6)) == 6


def test_drafts_that_were_slow_for_a_while_are_tried_again() -> None:
    """As while another process computes: from then on no draft is thought to pay."""
    it = Lab(n_pages=2000, speculation=speculating())
    slow = it.scheduler.speculation.seconds
    for _ in range(200):
        slow.note(1, 0, 0.011)
        slow.note(3, 2, 0.5)
        slow.note(5, 4, 0.9)
    it.ask(words(20, 1), max_tokens=6000)
    assert it.scheduler.speculation.accepted > 4000


def test_most_requests_do_without_a_head_that_does_not_pay() -> None:
    class Head:
        pass_seconds = 1.0

        def guess(self, wanted, least):
            guessed.append(len(wanted))
            return [Draft([next_token(seq.tokens)], 0, Source.HEAD) for seq, _ in wanted]

        def forget(self, request: int) -> None:
            pass

    guessed = list[int]()
    speculation = Speculation(lambda namespace: [], kind=MTP)
    speculation.head, speculation.seconds = Head(), seconds(0.01, 0.1)
    new = [speculation.speculator(Generation((), SamplingParams())) for _ in range(16)]
    assert all(one is not None and one.uses_head for one in new)
    speculation._asks_every = 2 * TRY_PERIOD
    new = [speculation.speculator(Generation((), SamplingParams())) for _ in range(16)]
    assert sum(one is not None and one.uses_head for one in new) == 2
    other = Generation((), SamplingParams(), drafting=Drafting("ngram"))
    new = [speculation.speculator(one) for _ in range(16) for one in (other, Generation((), SamplingParams()))]
    assert sum(one is not None and one.uses_head for one in new) == 2, "of those that may have it"
    named = speculation.speculator(Generation((), SamplingParams(), drafting=Drafting(MTP)))
    assert named is not None
    assert named.uses_head


def speculator(percent: float) -> Speculator:
    one = Speculator([PromptLookup()])
    one.own[Source.COPIED] = Share(1000 * percent, 100_000)
    return one


@pytest.mark.parametrize(
    ("chance", "each", "least", "most"),
    [(99, 0.05, 12, MOST_DRAFTS), (50, 0.05, 2, 5), (10, 0.05, 1, 1), (3, 0.05, 0, 0), (50, 0.9, 0, 0)],
)
def test_as_many_drafts_are_verified_as_pay(chance: float, each: float, least: int, most: int) -> None:
    speculation = Speculation(seconds=seconds(1.0, each))
    (count,) = speculation.worth([(speculator(chance), MOST_DRAFTS)], 1, 32)
    assert least <= count <= most


def test_drafts_shrink_under_load() -> None:
    speculation = Speculation(seconds=seconds(1.0, 0.1))
    counts = [max(speculation.worth([(speculator(60), 8)] * n, n, 32)) for n in (1, 4, 16, 64)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


def test_request_with_failing_drafts_retries_less_and_less_often() -> None:
    it = Lab(speculation=speculating(1))
    it.scheduler.speculation.seconds = seconds(1.0, 0.2)
    it.scheduler.speculation.is_to_measure = lambda rows: False
    it.ask(words(20, 1), max_tokens=1200)
    drafts = sum(rows - 1 for step in it.rows for rows in step.values())
    tries = [number for number, step in enumerate(it.rows) if any(rows > 1 for rows in step.values())]
    waits = [after - before for before, after in pairwise(tries)]
    assert drafts < 30
    assert waits == sorted(waits)
    late = [wait - least for wait, least in zip(waits[-6:], (33, 65, 129, 257, 257, 257), strict=True)]
    assert all(0 <= steps <= MAX_PAUSE_STEPS for steps in late)  # it may be paused when a try is due


def test_a_request_whose_draft_was_right_tries_the_next_one_sooner() -> None:
    one = speculator(1)
    for idle, right, wait in ((3, 0, 32), (33, 0, 64), (65, 0, 128), (129, 0, 256), (257, 0, 256), (257, 1, 32)):
        one.idle = idle
        one.learn(1, right)
        assert one.tries_every == wait


def test_a_new_request_tries_as_rarely_as_tries_have_failed_for_others() -> None:
    speculation = Speculation(lambda namespace: [PromptLookup()])

    def new() -> Speculator:
        one = speculation.speculator(Generation((), SamplingParams()))
        assert one is not None
        return one

    for wait in (32, 64, 128, 256, 256):
        assert new().tries_every == wait
        failing = new()
        failing.idle = wait + 1
        failing.learn(1, 0)
    new().learn(2, 1)
    assert new().tries_every == 32


def asked_of(speculation: Speculation, context: int) -> int:
    """Drafts that a new request verifies beside seven others, where each row costs a tenth of a step."""
    speculation.seconds = seconds(1.0, 0.1)
    new = speculation.speculator(Generation((), SamplingParams()))
    assert new is not None
    new.draft = Draft([1] * MOST_DRAFTS, context)
    return speculation.worth([(new, MOST_DRAFTS)], 8, 24)[0]


def test_a_new_request_has_the_experience_of_its_server() -> None:
    for right, least, most in ((MOST_DRAFTS, 8, MOST_DRAFTS), (0, 0, 0)):
        speculation = speculating()
        for _ in range(20):
            taught = speculation.speculator(Generation((), SamplingParams()))
            assert taught is not None
            taught.draft = Draft([1] * MOST_DRAFTS, WIDTH)
            speculation.learn(taught, MOST_DRAFTS, right)
        assert least <= asked_of(speculation, WIDTH) <= most


def test_the_more_tokens_agree_the_more_are_drafted() -> None:
    speculation = speculating()
    counts = [asked_of(speculation, context) for context in (3, 16, 32)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_all_drafts_are_verified_together_if_drafting_costs_more_than_rows() -> None:
    """Up to eight drafts lose, more of them win: the first alone does not tell."""
    speculation = Speculation(seconds=seconds(1.0, 0.02, drafting=4.0))
    assert speculation.worth([(speculator(99), MOST_DRAFTS)], 1, 32) == [MOST_DRAFTS]
    assert speculation.worth([(speculator(50), MOST_DRAFTS)], 1, 32) == [0]


def asking(prompt: tuple[int, ...] = (1, 2), **asked: object) -> Generation:
    return Generation(prompt, SamplingParams(), drafting=Drafting(**asked))


def test_a_request_chooses_its_drafter_and_how_many_drafts_it_has() -> None:
    speculation = speculation_of("suffix")
    speculation.past.add("", [1, 2, 3, 4, 5, 6, 7])
    usual, copying, none = (speculation.speculator(asking(drafter=of)) for of in (None, "ngram", "off"))
    assert usual is not None
    assert copying is not None
    assert none is None
    text = [1, 2, 3]
    assert (usual.propose(text, 4), copying.propose(text, 4)) == ([4, 5, 6, 7], [])
    few = speculation.speculator(asking(tokens=2))
    assert few is not None
    assert few.propose(text, 4) == [4, 5]


@pytest.mark.parametrize(("namespace", "drafted"), [("a", [4, 5]), ("b", [])])
def test_request_drafts_only_from_answers_of_its_own_namespace(namespace: str, drafted: list[int]) -> None:
    speculation = speculation_of("suffix")
    speculation.remember("a", [1, 2, 3, 4, 5])
    one = speculation.speculator(Generation((1, 2), SamplingParams(), namespace))
    assert one is not None
    assert one.propose([1, 2, 3], 2) == drafted


def test_request_with_speculation_off_drafts_nothing() -> None:
    assert speculation_of("off").speculator(asking(drafter="ngram", prediction=(3, 4))) is None


class Letters:
    """Constraint that forces two tokens at first, and allows tokens below 10."""

    def __init__(self, forced: list[int]) -> None:
        self.left = forced

    def forced(self) -> list[int]:
        return self.left

    def allowed_length(self, tokens) -> int:
        return next((i for i, token in enumerate(tokens) if token >= 10), len(tokens))


def test_forced_tokens_come_before_predicted_ones_and_these_before_copies() -> None:
    grammar, text = Letters([8, 9]), [1, 2, 3, 40, 1, 2, 3]
    one = speculation_of("ngram").speculator(asking(tuple(text), prediction=(5, 6, 70, 7)), grammar)
    assert one is not None
    assert (one.propose(text, 9), one.draft.source) == ([8, 9], Source.FORCED)
    grammar.left = []
    assert (one.propose(text, 9), one.draft.source) == ([5, 6], Source.PREDICTED)  # 70 is not allowed
    assert one.propose([*text, 44, 1, 2, 3], 9) == []  # 40 and 44 followed
    assert one.draft.source is Source.COPIED


def test_acceptance_of_forced_tokens_does_not_change_that_of_copies() -> None:
    one = speculator(50)
    one.draft = Draft([1], 3)
    before = one.chance
    one.draft = Draft([1], 1, Source.FORCED)
    for _ in range(100):
        one.learn(4, 4)
    assert one.chance > 0.95
    one.draft = Draft([1], 3)
    assert one.chance == before


def test_settings_and_requests_name_the_same_drafters() -> None:
    taken = SpeculationOptions.model_validate
    assert ("off", *DRAFTERS) == SPECULATION
    for name in SPECULATION:
        assert taken({"drafter": name}).drafter == name
    with pytest.raises(ValueError, match="drafter"):
        taken({"drafter": "another"})
