"""Drafters of tokens: what they propose, where they stop, and that a namespace's answers stay its own."""

import random
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile

import pytest

from headwater.draft.drafter import NO_DRAFT, Draft, Drafter, Source, accepted, steps_of
from headwater.draft.forced import ForcedTokens, allowed
from headwater.draft.ngram import PromptLookup
from headwater.draft.prediction import PredictedAnswer
from headwater.draft.runs import NO_TOKEN, WIDTH, Runs, key_of
from headwater.draft.suffix import LEAST, REACH, PastAnswers, SuffixDrafter
from headwater.errors import ConstraintError

DRAFTERS = {"ngram": PromptLookup, "suffix": lambda tokens=(): SuffixDrafter(PastAnswers(), "", tokens)}


@pytest.fixture(params=DRAFTERS)
def drafter(request):
    """Constructor of each drafter."""
    return DRAFTERS[request.param]


def occurrences(tokens: list[int], run: list[int]) -> list[int]:
    """Indices after the run that a token follows, the last one first, found one by one."""
    n = len(run)
    return [end for end in range(len(tokens) - 1, n - 1, -1) if tokens[end - n : end] == run]


def test_runs_know_every_place() -> None:
    rng = random.Random(3)
    tokens: list[int] = []
    runs = Runs()
    for _ in range(300):
        tokens.append(rng.randrange(3))
        runs.extend(tokens[-1:])
        if len(tokens) >= WIDTH:
            found = list(runs.places(key_of(tokens[-WIDTH:]), 1000))
            assert found == occurrences(tokens, tokens[-WIDTH:])
            assert list(runs.places(key_of(tokens[-WIDTH:]), 2)) == found[:2]
    for end in range(WIDTH, len(tokens)):
        agreed = runs.agreement(end, runs.tokens, 20)
        assert tokens[end - agreed : end] == tokens[len(tokens) - agreed :]
        assert agreed in (20, end) or tokens[end - 1 - agreed] != tokens[-1 - agreed]


def test_largest_vocabularies_have_distinct_runs() -> None:
    large = 2**BITS_OF_VOCABULARY - 1
    assert len({key_of(run) for run in ((0, 0, large), (0, large, 0), (large, 0, 0), (0, 1, large), (1, 0, 0))}) == 5
    assert large < NO_TOKEN


BITS_OF_VOCABULARY = 18  # Qwen3.5's 248,320 tokens


def test_drafter_proposes_the_tokens_that_followed_before(drafter) -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 9, 9, 1, 2, 3, 4]
    assert drafter(text).propose(3).tokens == [5, 6, 7]
    assert drafter(text).propose(1).tokens == [5]
    assert drafter(text).propose(0).tokens == []


def test_without_an_earlier_occurrence_nothing_is_proposed(drafter) -> None:
    assert drafter().propose(4).tokens == []
    assert drafter([5, 6]).propose(4).tokens == []
    assert drafter(range(50)).propose(4).tokens == []


def test_accepted_tokens_become_part_of_the_drafters_text(drafter) -> None:
    one = drafter([1, 2, 3, 4, 5])
    one.take([8, 1, 2])
    assert one.propose(2).tokens == []
    one.take([3])
    assert one.propose(2).tokens == [4, 5]


def test_longest_context_wins(drafter) -> None:
    #      a longer context, earlier   a shorter one, later
    text = [4, 1, 2, 3, 50, 51, 52, 53, 9, 1, 2, 3, 60, 61, 62, 63, 4, 1, 2, 3]
    assert drafter(text).propose(2).tokens == [50, 51]


def test_prompt_lookup_continues_a_periodic_text(drafter) -> None:
    assert PromptLookup([7, 1, 2] * 3).propose(7).tokens == [7, 1, 2, 7, 1, 2, 7]


def test_most_frequent_continuation_is_proposed_and_an_unlikely_one_not() -> None:
    past = PastAnswers()
    for following in (5, 6, 5, 5, 6):
        past.add("", [1, 2, 3, following, 8])
    assert SuffixDrafter(past, "", [9, 1, 2, 3]).propose(2).tokens == [5, 8]
    for following in range(100, 130):
        past.add("", [4, 2, 3, following])
    assert SuffixDrafter(past, "", [9, 4, 2, 3]).propose(2).tokens == []  # each has a chance of 1 / 30


def voted(texts: list[list[int]], context: int, most: int) -> list[int]:
    """Return the chain that occurrences of the last `context` tokens of the first text vote for, one by one."""
    own, chain, chance = texts[0], list[int](), 1.0
    places = [
        text[end:]
        for text in texts
        for end in range(len(text) - (text is own), context - 1, -1)
        if text[end - context : end] == own[len(own) - context :]
    ]
    while len(chain) < most:
        following = [rest for rest in places if rest]
        if not following:
            break
        (token, votes), *_ = Counter(rest[0] for rest in following).most_common(1)
        chance *= votes / len(places)
        if chance < LEAST:
            break
        chain.append(token)
        places = [rest[1:] for rest in following if rest[0] == token]
    return chain


@pytest.mark.parametrize("seed", range(40))
def test_chain_is_the_one_that_occurrences_vote_for(seed: int) -> None:
    """Texts of few tokens, so that contexts of all lengths come up; the draft is the chain of its own context."""
    rng, past = random.Random(seed), PastAnswers()
    pieces = [rng.choices(range(5), k=rng.randint(1, 9)) for _ in range(4)]
    own, *answers = ([token for piece in rng.choices(pieces, k=4) for token in piece] for _ in range(3))
    for answer in answers:
        past.add("", answer)
    draft = SuffixDrafter(past, "", own).propose(12)
    if draft.tokens:
        # answers stand in one text one after the other; of equally frequent tokens the last occurrence's is taken
        texts = [own, answers[1], answers[0]]
        assert draft.tokens == voted(texts, draft.agreed, min(12, REACH * draft.agreed))


@pytest.mark.parametrize("seed", range(40))
def test_agreement_is_counted_token_by_token(seed: int) -> None:
    rng = random.Random(seed)
    runs, context = Runs(rng.choices(range(2), k=60)), array("i", rng.choices(range(2), k=20))
    for end in range(61):
        before = runs.tokens[:end][::-1]
        agreed = len([*takewhile(lambda pair: pair[0] == pair[1], zip(before, context[::-1], strict=False))])
        assert runs.agreement(end, context, 8) == min(8, agreed)


def test_draft_is_no_longer_than_its_context_promises() -> None:
    past = PastAnswers()
    past.add("", list(range(100)))
    assert SuffixDrafter(past, "", [77, 10, 11, 12]).propose(50).tokens == list(range(13, 19))
    assert SuffixDrafter(past, "", range(20, 30)).propose(50).tokens == list(range(30, 50))


def test_drafts_end_with_the_answer_that_they_come_from() -> None:
    past = PastAnswers()
    past.add("", [1, 2, 3, 4])
    past.add("", [70, 71])
    assert SuffixDrafter(past, "", [1, 2, 3]).propose(4).tokens == [4]


def test_suffix_drafter_reads_answers_of_its_namespace_only() -> None:
    past = PastAnswers()
    past.add("a", [1, 2, 3, 4, 5])
    assert SuffixDrafter(past, "a", [1, 2, 3]).propose(2).tokens == [4, 5]
    assert SuffixDrafter(past, "b", [1, 2, 3]).propose(2).tokens == []


def test_past_answers_are_bounded() -> None:
    past = PastAnswers(part=10, namespaces=2)
    for first in range(0, 100, 5):
        past.add("a", list(range(first, first + 5)))
    kept = [list(runs.tokens) for runs in past.texts("a")]
    assert all(len(runs) <= 11 for runs in kept)
    assert kept[1][-6:] == [95, 96, 97, 98, 99, NO_TOKEN]
    past.add("a", list(range(200, 300)))  # its last tokens
    assert list(past.texts("a")[1].tokens) == [*range(290, 300), NO_TOKEN]
    for namespace in "bc":
        past.add(namespace, [1, 2, 3])
    assert [bool(past.texts(namespace)) for namespace in "abc"] == [False, True, True]


def predicted(prediction: Iterable[int], prompt: Iterable[int] = (), answer: Iterable[int] = ()) -> PredictedAnswer:
    prompt = list(prompt)
    drafter = PredictedAnswer(list(prediction), len(prompt))
    drafter.take([*prompt, *answer])
    return drafter


def test_predicted_answer_is_drafted_from_its_beginning() -> None:
    prediction = range(10, 30)
    assert predicted(prediction).propose(3) == Draft([10, 11, 12], 0, Source.PREDICTED)
    assert predicted(prediction, prompt=[12, 13, 14]).propose(2).tokens == [10, 11]
    assert predicted(prediction, [5] * 7, [10, 11, 12]).propose(4) == Draft([13, 14, 15, 16], 3, Source.PREDICTED)
    assert predicted(prediction, answer=range(10, 29)).propose(4).tokens == [29]
    assert predicted(prediction, answer=prediction).propose(4).tokens == []
    assert predicted(prediction).propose(0).tokens == []


def test_prompt_of_a_predicted_answer_may_come_in_parts() -> None:
    drafter = PredictedAnswer([1, 2, 3, 4], 5)
    for part in ([9, 9], [9, 9], [9, 1], [2]):
        drafter.take(part)
    assert drafter.propose(9) == Draft([3, 4], 2, Source.PREDICTED)


def test_changed_answer_resumes_the_prediction_after_the_place_it_left() -> None:
    prediction = [1, 2, 3, 50, 1, 2, 3, 60, 7, 8, 1, 2, 3, 70]
    left = [1, 2, 3, 50, 99]  # something else instead of the prediction
    assert predicted(prediction, answer=left).propose(1).tokens == []
    assert predicted(prediction, answer=[*left, 1, 2]).propose(1).tokens == []
    assert predicted(prediction, answer=[*left, 1, 2, 3]).propose(2) == Draft([60, 7], WIDTH, Source.PREDICTED)
    behind_all = [*left, *prediction[4:], 98, 1, 2, 3]
    assert predicted(prediction, answer=behind_all).propose(1).tokens == [70]


class Rules:
    """Constraint that leaves some tokens, and is beyond its limits if there are none."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)

    def forced(self) -> list[int]:
        if not self.tokens:
            raise ConstraintError("beyond its limits")
        return self.tokens

    def allowed_length(self, tokens: Sequence[int]) -> int:
        return accepted(self.forced(), tokens)


def test_forced_tokens_are_drafted_up_to_the_limit() -> None:
    drafter = ForcedTokens(Rules(4, 5, 6))
    drafter.take([1, 2])
    assert drafter.propose(9) == Draft([4, 5, 6], 3, Source.FORCED)
    assert drafter.propose(2).tokens == [4, 5]


def test_constraint_cuts_drafts_and_one_beyond_its_limits_has_none() -> None:
    draft = Draft([4, 5, 9, 9], 7)
    assert allowed(Rules(4, 5, 6), draft) == Draft([4, 5], 7)
    assert allowed(Rules(1), draft).tokens == []
    assert allowed(Rules(), draft) == ForcedTokens(Rules()).propose(3) == NO_DRAFT


class Oracle:
    """Drafter that knows the answer, but for every fourth token."""

    def __init__(self, answer: list[int]) -> None:
        self.answer, self.at = answer, 0

    def take(self, tokens: Iterable[int]) -> None:
        self.at += len(list(tokens))

    def propose(self, most: int) -> Draft:
        places = range(self.at, min(self.at + most, len(self.answer)))
        return Draft([-1 if i % 4 == 3 else self.answer[i] for i in places])


def test_step_accepts_right_drafts_and_one_token_more() -> None:
    answer = list(range(12))
    assert steps_of(Oracle(answer), answer, 6) == [(6, 3), (6, 3), (3, 3)]
    assert steps_of(Oracle(answer), answer, 2) == [(2, 2), (2, 0), (2, 2), (2, 0), (2, 2), (0, 0)]
    assert accepted([1, 2, 3], [1, 2]) == 2


def test_steps_with_any_drafts_yield_the_whole_answer(drafter) -> None:
    rng = random.Random(7)
    for _ in range(20):
        prompt, answer = ([rng.randrange(4) for _ in range(rng.randrange(1, 60))] for _ in range(2))
        one: Drafter = drafter(prompt)
        steps = steps_of(one, answer, rng.randrange(1, 9))
        assert sum(right + 1 for _, right in steps) == len(answer)
        assert all(right <= drafted for drafted, right in steps)
