"""Prompts whose log probabilities are wanted: computed as a whole, beside the cache and not through it."""

from headwater.account import Reason
from headwater.request import Generation, SamplingParams
from headwater.schedule.limits import SCORED_LEG_TOKENS
from headwater.schedule.sequence import Purpose
from tests.schedule.ledger import Lab, words

SCORED = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)


def scored(lab, prompt):
    return lab.scheduler.submit(Generation(tuple(prompt), SCORED))


def test_all_of_a_cached_prompt_is_computed_and_nothing_kept():
    lab, prompt = Lab(), words(100, 1)
    lab.ask(prompt)
    before, free = lab.scheduler.computed[Purpose.PROMPT], lab.cache.stats().pages_free
    seq = scored(lab, prompt)
    lab.run()
    assert lab.scheduler.computed[Purpose.PROMPT] - before == 100
    assert lab.cache.stats().pages_free == free
    assert (seq.account.cached_tokens, seq.account.reason) == (0, Reason.PROMPT_LOGPROBS)


def test_scored_prompt_and_equal_prompts_do_not_wait_for_each_other():
    lab, prompt = Lab(), words(200, 1)
    seqs = [scored(lab, prompt), lab.submit(prompt), scored(lab, prompt)]
    lab.run()
    assert [seq.waited for seq in seqs] == [False] * 3


def test_finished_answer_stays_for_unscored_requests():
    lab, prompt = Lab(), words(60, 1)
    first = lab.submit(prompt, max_tokens=8)
    while not lab.scheduler.answers:
        lab.step()
    scored(lab, first.tokens)
    lab.run()
    assert lab.ask([*first.tokens, *words(8, 2)]).account.cached_tokens >= 64


def test_legs_of_a_scored_prompt_have_at_most_scored_leg_tokens():
    lab = Lab(tokens_per_step=2048, n_pages=600)
    seq = scored(lab, words(600, 1))
    step = lab.scheduler.plan_step()
    assert [(leg.plan.end, leg.n_scored) for leg in step.legs] == [(SCORED_LEG_TOKENS, SCORED_LEG_TOKENS)]
    lab.scheduler.abandon_step(step)
    assert seq.slot is None


def test_the_last_token_of_a_prompt_has_none_after_it():
    lab = Lab(tokens_per_step=64)
    scored(lab, words(70, 1))
    rows = []
    while not lab.scheduler.idle:
        step = lab.scheduler.plan_step()
        rows += [leg.n_scored for leg in step.legs]
        for seq in lab.scheduler.finish_step(step):
            seq.tokens.append(0)
            lab.scheduler.finish(seq)
    assert rows == [64, 5]
