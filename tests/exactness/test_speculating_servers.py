"""Speculation changes no bit: answers with drafts against answers without, with and without the cache."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch

from headwater.draft.drafter import Draft
from headwater.events import FinishedEvent
from headwater.request import Constraint, Drafting, Generation, SamplingParams
from headwater.schedule.speculation import Speculation, speculation_of
from tests.covering import cells
from tests.exactness.rig import Answer, Make, Rig, verify_every_draft, words
from tests.support import FULL

PAGES, TOKENS = 600, 60
IN_CHAT = TOKENS if FULL else 30  # of an answer in a conversation
NARROW = ("qwen3_5", "qwen3_window", "kimi_linear")  # test_hybrid.py has drafts of all mixers, without servers
FAMILIES = ("qwen3_5", "qwen3_window", "bamba", "mamba2", "minimax", "ring", "jamba", "kimi_linear", "qwen3_5_moe")


def is_quick(family: str, dtype: str) -> bool:
    return family in NARROW and (dtype == "float32") == (family != "qwen3_5")


class Script:
    """Drafts what an earlier server said to the same prompt; every third token is another one, if it `errs`."""

    def __init__(self, texts: list[list[int]], errs: bool = True) -> None:
        self.texts, self.tokens, self.drafted, self.errs = texts, list[int](), 0, errs

    def take(self, tokens: Iterable[int]) -> None:
        self.tokens += tokens

    def propose(self, most: int) -> Draft:
        n = len(self.tokens)
        known = next((text[n : n + most] for text in self.texts if text[:n] == self.tokens), [])
        self.drafted += 1
        wrong = [self.errs and (i + self.drafted) % 3 == 0 for i in range(len(known))]
        return Draft([token ^ 1 if is_wrong else token for token, is_wrong in zip(known, wrong, strict=True)])


@contextmanager
def drafting(make: Make, texts: list[list[int]], **settings: object) -> Iterator[Rig]:
    with make(PAGES, **settings) as rig:
        rig.engine.scheduler.speculation = Speculation(lambda namespace: [Script(texts)])
        verify_every_draft(rig.engine.scheduler.speculation)
        yield rig


def sampled(
    rig: Rig, prompt: list[int], drafts: Drafting | None = None, tokens: int = TOKENS, **params: object
) -> Answer:
    """Submit a request with sampling parameters of its own."""
    answer = Answer(list(prompt), tokens)
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, **params)
    generation = Generation(tuple(prompt), sampling, drafting=drafts or Drafting())
    with rig._lock:
        request = rig.engine.submit(generation, rig._listener(answer))
        rig._answers[request] = answer
    return answer


def conversation(rig: Rig) -> list[Answer]:
    """Several at once, then turns that continue them: greedy ones, seeds, penalties and a bias."""
    system = words(140, "system")
    kinds = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 7, "logprobs": 2},
        {"temperature": 1.2, "seed": 8, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"temperature": 0, "presence_penalty": 0.5, "logit_bias": ((5, 1.0), (9, -4.0))},
        {"temperature": 0.7, "seed": 9, "top_k": 20, "min_tokens": 8},
    ]
    first = [sampled(rig, system + words(20 + 9 * i, i), tokens=IN_CHAT, **kind) for i, kind in enumerate(kinds)]
    for answer in first:
        rig.wait(answer)
    rig.settle()
    turns = enumerate(zip(first, kinds, strict=True))
    second = [sampled(rig, one.everything + words(11, i), tokens=IN_CHAT, **kind) for i, (one, kind) in turns]
    return [rig.wait(answer) for answer in (*first, *second)]


@pytest.mark.parametrize(("family", "dtype"), cells(product(FAMILIES, ("float32", "bfloat16")), is_quick))
def test_drafts_change_no_bit_of_an_answer_and_no_hit(load, family: str, dtype: str) -> None:
    loaded, check = load(family, dtype, 2)
    make = Make(loaded, check)
    with make(PAGES) as rig:
        expected = conversation(rig)
    texts = [answer.everything for answer in expected]
    for settings in ({}, {"cache": False}):
        with drafting(make, texts, **settings) as rig:
            found = conversation(rig)
            speculation = rig.engine.scheduler.speculation
        assert min(speculation.accepted, speculation.rejected) > 20
        assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
        assert all(one.same_bits(other) for one, other in zip(found, expected, strict=True))
        if not settings:
            hits = [[answer.account.cached_tokens for answer in answers] for answers in (found, expected)]
            assert hits[0] == hits[1]
            assert sum(hits[0]) > 0


def test_right_draft_after_a_stop_token_is_not_sampled(load) -> None:
    loaded, check = load("qwen3_5", "float32", 2)
    make, prompt = Make(loaded, check), words(100, "stop")
    with make(PAGES) as rig:
        whole = rig.ask(prompt, 40)
        at = next(at for at in range(20, 40) if whole.tokens[at] not in whole.tokens[:at])
        params = {"temperature": 0, "stop_token_ids": (whole.tokens[at],)}
        expected = rig.wait(sampled(rig, prompt, **params))
    with make(PAGES) as rig:
        rig.engine.scheduler.speculation = Speculation(lambda namespace: [Script([whole.everything], errs=False)])
        verify_every_draft(rig.engine.scheduler.speculation)
        found = rig.wait(sampled(rig, prompt, **params))
        rig.settle()
        assert rig.engine.scheduler.speculation.accepted > 0
    assert found.tokens == expected.tokens
    assert len(found.logits) == len(expected.logits) == at + 1


KEYS = ("first name", "last name", "street and number")
FORM = {
    "type": "object",
    "properties": {key: {"enum": ["yes", "no"]} for key in KEYS},
    "required": list(KEYS),
    "additionalProperties": False,
}


def test_forced_and_predicted_tokens_change_no_bit(load) -> None:
    """A form whose keys are forced, an answer that is predicted but for a part, and a request that asks for few."""
    loaded, check = load("qwen3_5", "float32", 2)
    make, prompt = Make(loaded, check), words(90, "asked")
    form = Constraint("json_schema", json.dumps(FORM))
    kinds = ({"constraint": form}, {}, {"temperature": 0.8, "seed": 4})

    def answers(rig: Rig, asked: list[Drafting]) -> list[Answer]:
        both = zip(kinds, asked, strict=True)
        return [rig.wait(sampled(rig, prompt, drafting, **{"temperature": 0, **kind})) for kind, drafting in both]

    with make(PAGES) as rig:
        expected = answers(rig, [Drafting()] * 3)
    edited = [[*answer.tokens[:20], 7, 8, *answer.tokens[24:]] for answer in expected]
    wanted = [Drafting(), Drafting(prediction=tuple(edited[1])), Drafting("suffix", 3, tuple(edited[2]))]
    for asked, accepted in ((wanted, True), ([Drafting("off")] * 3, False)):
        with make(PAGES) as rig:
            speculation = rig.engine.scheduler.speculation = speculation_of("ngram")
            verify_every_draft(speculation)
            found = answers(rig, asked)
        for one, other in zip(found, expected, strict=True):
            assert one.tokens == other.tokens
            assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))  # the form ends before the others
        assert (speculation.accepted > 60) == accepted
        assert not (speculation.accepted + speculation.rejected) or accepted


def test_a_request_that_is_preempted_amid_drafts_changes_no_bit(load) -> None:
    loaded, check = load("qwen3_5", "float32", 2)
    make = Make(loaded, check)
    prompts = [words(300 + i, i) for i in range(4)]
    with make(PAGES) as rig:
        expected = [rig.ask(prompt, TOKENS) for prompt in prompts]
    texts = [answer.everything for answer in expected]
    with drafting(make, texts) as rig:
        answers = [rig.submit(prompt, TOKENS) for prompt in prompts]
        preempted = []

        def plan(whole=rig.engine.scheduler.plan_step):
            for seq in list(rig.engine.scheduler.running.values()):
                if getattr(seq, "accepted", 0) and seq.n_output > 20 and seq.preemptions == 0:
                    rig.engine.scheduler.preemption.preempt(seq)
                    rig.engine.scheduler.workload.gate.is_crowded = False
                    preempted.append(seq)
            return whole()

        rig.engine.scheduler.plan_step = plan
        for answer in answers:
            rig.wait(answer)
    assert preempted
    assert all(one.same_bits(other) for one, other in zip(answers, expected, strict=True))


def test_an_end_within_a_draft_ends_the_answer(load) -> None:
    """A token after the end was drafted, and right: the answer has none of it."""
    loaded, check = load("qwen3_5", "float32", 2)
    make, prompt = Make(loaded, check), words(100, "end")
    with make(PAGES) as rig:
        expected = rig.ask(prompt, TOKENS)
    stop = expected.tokens[25]
    ends = expected.tokens.index(stop)
    with drafting(make, [expected.everything]) as rig:
        done, events = Answer(prompt, TOKENS), []
        params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, stop_token_ids=(stop,))
        listener = rig._listener(done)
        rig.engine.submit(Generation(tuple(prompt), params), lambda event: (events.append(event), listener(event)))
        rig.wait(done)
    assert done.tokens == expected.tokens[:ends]
    (last,) = [event for event in events if isinstance(event, FinishedEvent)]
    assert (last.finish_reason, last.stop) == ("stop", stop)
    assert last.accepted_drafts + last.rejected_drafts > 0


def test_draft_accepted_without_sampling_is_detected(load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the state continues with a wrong draft."""
    from headwater.schedule.scheduler import Scheduler

    loaded, check = load("qwen3_5", "float32", 2)
    make, prompt = Make(loaded, check), words(100, "control")
    with make(PAGES) as rig:
        expected = rig.ask(prompt, TOKENS)
    whole = Scheduler.accept

    def also_a_wrong_one(self, seq, drafted, right):
        whole(self, seq, drafted, right)
        seq.accepted = min(right + 1, drafted)

    monkeypatch.setattr(Scheduler, "accept", also_a_wrong_one)
    with drafting(make, [expected.everything]) as rig:
        found = rig.ask(prompt, TOKENS)
    assert not torch.equal(torch.stack(found.logits), torch.stack(expected.logits))
