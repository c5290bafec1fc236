"""Penalties and bias against the formulas, token by token."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.engine.sampler import Penalties, Sampling
from headwater.engine.step_logits import sample
from headwater.request import SamplingParams

V = 12
tokens = st.lists(st.integers(0, V - 1), max_size=20)
penalty = st.integers(-20, 20).map(lambda tenths: tenths / 10)


def by_hand(logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    result = []
    for token, logit in enumerate(logits):
        if token in prompt or token in output:
            r = params.repetition_penalty
            logit = logit / r if logit > 0 else logit * r
        n = Counter(output)[token]
        logit += dict(params.logit_bias).get(token, 0.0) - n * params.frequency_penalty
        result.append(logit - params.presence_penalty if n else logit)
    return result


@given(tokens, tokens, penalty, penalty, penalty, st.integers(0, 1000))
def test_logits_are_those_of_the_formulas_after_each_token(prompt, output, repetition, presence, frequency, seed):
    params = SamplingParams(
        repetition_penalty=2.0**repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=((3, 1.5), (7, -100.0)),
    )
    logits_V = torch.randn(V, generator=torch.Generator().manual_seed(seed))
    penalties = Penalties(params, prompt)
    for n in range(len(output) + 1):
        reference_V = torch.tensor(by_hand(logits_V.tolist(), params, prompt, output[:n]))
        torch.testing.assert_close(penalties.apply(logits_V), reference_V)
        if n < len(output):
            penalties.take(output[n])


@pytest.mark.parametrize(
    "params",
    [{"repetition_penalty": 1.1}, {"presence_penalty": -0.1}, {"frequency_penalty": 0.1}, {"logit_bias": ((1, 1.0),)}],
)
def test_each_is_seen_to_be_wanted(params):
    assert Penalties.wanted(SamplingParams(**params))
    assert not Penalties.wanted(SamplingParams())


def greedy(logits_V: torch.Tensor, prompt: tuple[int, ...], n: int, **params) -> list[int]:
    """The tokens of n steps over the same logits."""
    sampling, output = Sampling(SamplingParams(temperature=0, **params), prompt), []
    for _ in range(n):
        [choice] = sample(logits_V[None], [sampling])
        sampling.take(choice.token)
        output.append(choice.token)
    return output


def test_greedy_obeys_them():
    logits_V = torch.tensor([3.0, 2.5, 1.0, -1.0])
    assert greedy(logits_V, (), 4, presence_penalty=1.0) == [0, 1, 0, 0]
    assert greedy(logits_V, (), 5, frequency_penalty=1.0) == [0, 1, 0, 1, 0]
    assert greedy(logits_V, (0,), 2, repetition_penalty=2.0) == [1, 0]
    assert greedy(logits_V, (), 1, logit_bias=((3, 100.0),)) == [3]
    assert greedy(logits_V, (0,), 1, presence_penalty=1.0) == [0], "presence does not look at the prompt"


def test_logprobs_and_the_logits_themselves_stay_the_models():
    logits_V = torch.tensor([3.0, 2.5, 1.0, -1.0])
    before_V = logits_V.clone()
    plain = SamplingParams(temperature=0, logprobs=4)
    biased = replace(plain, logit_bias=((3, 100.0),), repetition_penalty=1.5)
    [choice] = sample(logits_V[None], [Sampling(biased, (0, 1))])
    [reference] = sample(logits_V[None], [Sampling(plain, ())])
    assert (choice.token, choice.top) == (3, reference.top)
    assert choice.logprob == float(torch.log_softmax(before_V, -1)[3])
    assert torch.equal(logits_V, before_V)


def test_penalty_memory_is_allocated_with_the_first_token():
    sampling = Sampling(SamplingParams(presence_penalty=1.0), ())
    assert sampling._penalties is None
    sample(torch.zeros(1, V), [sampling])
    assert sampling._penalties is not None
