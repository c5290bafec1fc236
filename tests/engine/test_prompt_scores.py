"""Log probabilities of prompts: the model's own, whatever is cached and whoever runs beside them."""

import time

import pytest
import torch

from headwater.account import Reason
from headwater.engine.sampler import PromptScores
from headwater.errors import InvalidLogits
from headwater.events import FinishedEvent, PromptEvent, TokenEvent
from headwater.mixers.linear import Linear
from tests.engine.test_engine import begin, generation
from tests.exactness.rig import words
from tests.support import Bench

PROMPT = words(600, 1)  # three legs


class Asked:
    """A request on its way."""

    def __init__(self, engine, prompt, k=0, **params):
        asked = generation(prompt, **{"prompt_logprobs": k, "max_tokens": 0, **params})
        self.events, self._done = begin(engine, asked)

    def wait(self):
        assert self._done.wait(60)
        return self

    @property
    def tokens(self):
        (event,) = (event for event in self.events if isinstance(event, PromptEvent))
        return event.tokens

    @property
    def end(self):
        return self.events[-1]


def reference(loaded, prompt):
    """Log probabilities [n, V] after each token, by the model itself."""
    bench = Bench(loaded.model)
    return torch.log_softmax(bench.prefill(bench.sequence(len(prompt)), prompt), -1)


def test_prompt_scores_match_the_log_softmax_of_the_models_forward(make, loaded):
    with make(500) as rig:
        asked = Asked(rig.engine, PROMPT, k=3).wait()
    logprobs_NV = reference(loaded, PROMPT)
    first, *others = asked.tokens
    assert (first.token, first.logprob, first.top) == (PROMPT[0], None, ())
    assert [token.token for token in others] == PROMPT[1:]
    own_N = logprobs_NV[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    assert torch.allclose(torch.tensor([token.logprob for token in others]), own_N, rtol=0, atol=1e-5)
    top_NK = torch.tensor([[top.logprob for top in token.top] for token in others])
    assert torch.allclose(top_NK, logprobs_NV[:-1].topk(3).values, rtol=0, atol=1e-5)
    assert [[top.token for top in token.top] for token in others] == logprobs_NV[:-1].topk(3).indices.tolist()


def test_prompt_scores_ignore_the_cache_and_leave_nothing_in_it(make):
    with make(500) as rig:
        cold = Asked(rig.engine, PROMPT).wait()
        assert rig.engine.drain(60)
        assert rig.engine.stats().cache.pages_free == 500
        rig.ask(PROMPT)
        rig.settle()
        held, computed = rig.engine.stats().cache.pages_by_use(), rig.engine.stats().prefill_tokens
        warm = Asked(rig.engine, PROMPT).wait()
        assert rig.engine.drain(60)
        assert rig.engine.stats().prefill_tokens - computed == len(PROMPT)
        assert rig.engine.stats().cache.pages_by_use() == held
        assert rig.ask(PROMPT).account.reason is Reason.FULL
    assert warm.tokens == cold.tokens
    for account in (cold.end.account, warm.end.account):
        assert (account.cached_tokens, account.stranded_tokens) == (0, 0)
        assert account.reason is Reason.PROMPT_LOGPROBS


def test_without_a_cache_that_is_the_reason(make):
    with make(500, cache=False) as rig:
        assert Asked(rig.engine, PROMPT).wait().end.account.reason is Reason.CACHE_OFF


def test_company_changes_no_bit(make):
    with make(500) as rig:
        alone = Asked(rig.engine, PROMPT, k=2).wait()
        chatting = [rig.submit(words(90, seed), 40) for seed in "ab"]
        asked = [Asked(rig.engine, PROMPT, k=2), Asked(rig.engine, words(130, 2)), Asked(rig.engine, PROMPT, k=2)]
        assert {one.wait().tokens for one in (asked[0], asked[2])} == {alone.tokens}
        for answer in chatting:
            rig.wait(answer)


def test_a_preempted_request_tells_them_once_and_the_same(make):
    with make(500) as rig:
        alone = [Asked(rig.engine, words(130, seed), max_tokens=100).wait() for seed in "ab"]
    pages = alone[0].end.account.prompt_tokens // 64 * 2
    with make(2 * rig.engine.scheduler.layout.slot_pages + pages + 3) as rig:
        asked = [Asked(rig.engine, words(130, seed), max_tokens=100) for seed in "ab"]
        both = [one.wait() for one in asked]
    assert sum(one.end.account.preemptions for one in both) > 0
    for one, other in zip(both, alone, strict=True):
        assert one.events[:-1] == other.events[:-1]


@pytest.mark.parametrize("decode_reuse", ["raw", "none"])
def test_however_answers_are_cached_nothing_of_a_scored_prompt_is(make, decode_reuse):
    with make(500, decode_reuse=decode_reuse) as rig:
        asked = Asked(rig.engine, PROMPT, max_tokens=100).wait()
        assert rig.engine.drain(60)
        assert rig.engine.stats().cache.pages_free == 500
    assert len(asked.tokens) == len(PROMPT)


def test_prompt_without_wanted_tokens_is_scored_and_generates_no_text(make):
    with make(500) as rig:
        asked = Asked(rig.engine, PROMPT[:1]).wait()
    assert asked.tokens == (TokenEvent(PROMPT[0], ""),)
    assert len(asked.events) == 2
    assert (asked.end.finish_reason, asked.end.output_tokens, asked.end.text) == ("length", 0, "")


def test_prompt_scores_come_before_the_first_token(make):
    with make(500) as rig:
        asked = Asked(rig.engine, PROMPT, max_tokens=3).wait()
        plain = rig.ask(PROMPT, 3)
    assert [type(event) for event in asked.events] == [PromptEvent, *[TokenEvent] * 3, FinishedEvent]
    assert [event.token for event in asked.events[1:4]] == plain.tokens


def test_nan_logits_of_a_scored_prompt_fail_only_its_request(make, monkeypatch):
    with make(500) as rig:
        run = rig.engine.runner.run

        def broken(step):
            logits_RV = run(step).clone()
            if any(leg.n_scored == 129 for leg in step.legs):
                logits_RV[-1] = torch.nan
            return logits_RV

        monkeypatch.setattr(rig.engine.runner, "run", broken)
        failed, other = Asked(rig.engine, words(130, 1)).wait(), Asked(rig.engine, PROMPT).wait()
        assert isinstance(failed.end.error, InvalidLogits)
        assert "nan" in str(failed.end.error)
        assert isinstance(other.end, FinishedEvent)
        assert rig.engine.drain(60)
        assert rig.engine.stats().cache.pages_free == 500


def test_scored_request_with_a_raising_listener_ends(make):
    def deaf(event):
        raise RuntimeError("no")

    with make(500) as rig:
        rig.engine.submit(generation(PROMPT, prompt_logprobs=0), deaf)
        assert rig.engine.drain(60)
        assert rig.engine.stats().running == 0


def test_scores_of_a_repeated_leg_replace_earlier_ones():
    scores = PromptScores([1, 0, 1], 1)
    scores.take(0, torch.zeros(2, 2))
    scores.take(0, torch.tensor([[0.0, 100.0]]))
    scores.take(1, torch.tensor([[0.0, 100.0]]))
    assert [token.logprob for token in scores.event().tokens] == [None, -100.0, 0.0]
    with pytest.raises(InvalidLogits, match="token 1 "):
        scores.take(1, torch.tensor([[float("nan"), 0.0]]))


def first_tokens(make):
    """Return the first logits of an answer alone, among seven that decode, and beside a prompt that is scored."""
    prompt, found = words(130, "first"), []
    with make(500, cache=False) as rig:
        found.append(rig.ask(prompt, 1))
        others = [rig.submit(words(90 + at, "other", at), 100) for at in range(7)]
        wait_until(lambda: all(other.tokens for other in others))
        found.append(rig.ask(prompt, 1))
        assert not any(other.done.is_set() for other in others)
        for other in others:
            rig.wait(other)
        scored = Asked(rig.engine, PROMPT, k=2)
        found.append(rig.ask(prompt, 1))
        scored.wait()
    return [answer.logits[0] for answer in found]


def wait_until(reached):
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_first_logits_do_not_depend_on_other_requests_or_a_scored_prompt(make):
    alone, among, beside = first_tokens(make)
    assert torch.equal(among, alone)
    assert torch.equal(beside, alone)


def test_a_head_that_depends_on_the_number_of_its_rows_is_seen(make, monkeypatch):
    product = Linear.__call__
    monkeypatch.setattr(Linear, "__call__", lambda self, x, *n: product(self, x, *n) * (1 + (len(x) == 1) * 1e-3))
    alone, among, beside = first_tokens(make)
    assert not torch.equal(among, alone)
    assert not torch.equal(beside, alone)
