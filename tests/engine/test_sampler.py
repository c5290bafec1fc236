from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from headwater.engine.sampler import Sampling, _most_likely, draw, uniform
from headwater.engine.step_logits import sample
from headwater.errors import InvalidLogits
from headwater.request import SamplingParams


def logits_of(probs: list[float]) -> torch.Tensor:
    return torch.tensor(probs).log()


def drawn(probs: list[float], n: int = 400, **params) -> set[int]:
    return {draw(logits_of(probs), SamplingParams(**params), uniform(0, 0, i)) for i in range(n)}


def test_greedy_takes_the_first_of_equal_maxima():
    [choice] = sample(torch.tensor([[0.0, 2.0, 2.0]]), [Sampling(SamplingParams(temperature=0), ())])
    assert choice.token == 1
    assert choice.logprob is None


def test_everything_can_be_drawn_without_filters():
    assert drawn([0.4, 0.3, 0.2, 0.1]) == {0, 1, 2, 3}


def test_top_k_keeps_the_k_most_likely():
    assert drawn([0.1, 0.4, 0.2, 0.3], top_k=2) == {1, 3}


def test_top_p_keeps_the_fewest_that_reach_p():
    assert drawn([0.4, 0.3, 0.2, 0.1], top_p=0.6) == {0, 1}
    assert drawn([0.4, 0.3, 0.2, 0.1], top_p=0.01) == {0}


def test_min_p_is_relative_to_the_most_likely():
    assert drawn([0.4, 0.3, 0.2, 0.1], min_p=0.6) == {0, 1}


def test_a_low_temperature_sharpens():
    assert drawn([0.4, 0.3, 0.2, 0.1], temperature=0.02) == {0}


def test_a_seed_gives_the_same_tokens_again_and_another_seed_others():
    def run(seed: int | None, choice: int = 0) -> list[int]:
        sampling, tokens = Sampling(SamplingParams(seed=seed, choice=choice), ()), []
        for _ in range(8):
            [drawn] = sample(torch.zeros(1, 1000), [sampling])
            sampling.take(drawn.token)
            tokens.append(drawn.token)
        return tokens

    runs = run(1), run(2), run(-1), run(1, choice=1), run(None), run(None)
    assert run(1) == runs[0]
    assert len(set(map(tuple, runs))) == len(runs)
    assert len(set(runs[0])) > 1


def test_random_number_of_a_position_does_not_depend_on_earlier_draws():
    """So rows of one sequence may be judged in one step, and a preempted request goes on with its numbers."""
    logits_V = torch.zeros(1000)
    [first] = sample(logits_V[None], [Sampling(SamplingParams(seed=3), ())])
    later = Sampling(SamplingParams(seed=3), ())
    for token in (5, 6):
        later.take(token)
    [third] = sample(logits_V[None], [later])
    assert [first.token, third.token] == [draw(logits_V, SamplingParams(), uniform(3, 0, i)) for i in (0, 2)]


def test_numbers_are_those_of_philox():
    for seed, choice, position in ((0, 0, 0), (7, 2, 3), (-1, 0, 10**6), (2**63 - 1, 127, 1)):
        bits = np.random.Philox(key=choice << 64 | seed % 2**64, counter=position)
        assert uniform(seed, choice, position) == np.random.Generator(bits).random()


def test_numbers_are_uniform_and_those_of_neighbours_independent():
    u_SP = np.array([[uniform(seed, 0, position) for position in range(100)] for seed in range(100)])
    assert abs(u_SP.mean() - 0.5) < 4 * (1 / 12 / u_SP.size) ** 0.5
    for shifted_SP in (np.roll(u_SP, 1, axis=0), np.roll(u_SP, 1, axis=1)):
        assert abs(np.corrcoef(u_SP.ravel(), shifted_SP.ravel())[0, 1]) < 4 / u_SP.size**0.5


def test_a_row_does_not_depend_on_its_neighbours():
    logits_RV = torch.randn(5, 100, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, logprobs=3)

    def sampling(i: int) -> Sampling:
        return Sampling(replace(params, seed=i), ())

    def alone(i: int):
        return sample(logits_RV[i : i + 1], [sampling(i)])[0]

    together = sample(logits_RV, [sampling(i) for i in range(5)])
    assert together == [alone(i) for i in range(5)]


def test_logprobs_are_of_the_unmodified_logits():
    logits_V = logits_of([0.5, 0.25, 0.125, 0.125])
    params = SamplingParams(temperature=0.01, top_k=1, logprobs=2)
    [choice] = sample(logits_V[None], [Sampling(params, ())])
    reference = torch.log_softmax(logits_V, -1)
    assert choice.token == 0
    assert choice.logprob == float(reference[0])
    assert [(t.token, t.logprob) for t in choice.top] == [(0, float(reference[0])), (1, float(reference[1]))]


@pytest.mark.parametrize("where", [0, 1, 37, 4095])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_row_with_an_invalid_logit_fails_and_others_do_not(where, value):
    logits_RV = torch.randn(3, 4096, generator=torch.Generator().manual_seed(1))

    def samplings() -> list[Sampling]:
        return [Sampling(SamplingParams(temperature=t, seed=1, logprobs=1), ()) for t in (0, 0.7, 1)]

    for bad in range(3):
        broken_RV = logits_RV.clone()
        broken_RV[bad, where] = value
        whole, others = sample(logits_RV, samplings()), sample(broken_RV, samplings())
        assert isinstance(others[bad], InvalidLogits)
        assert [c for i, c in enumerate(others) if i != bad] == [c for i, c in enumerate(whole) if i != bad]


def test_a_row_of_nothing_but_minus_infinity_is_invalid():
    [error] = sample(torch.full((1, 8), -torch.inf), [Sampling(SamplingParams(), ())])
    assert isinstance(error, InvalidLogits)
    assert "-inf" in str(error)


def test_tokens_of_probability_zero_are_never_drawn():
    logits_V = torch.full((5000,), -torch.inf)
    logits_V[[17, 4000]] = 1.0
    assert {draw(logits_V, SamplingParams(), uniform(0, 0, i)) for i in range(200)} == {17, 4000}


@pytest.mark.parametrize("temperature", [1e-40, 1e-12, 1e-3])
def test_a_temperature_next_to_zero_is_greedy(temperature):
    logits_V = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 50
    assert draw(logits_V, SamplingParams(temperature=temperature), 0.5) == int(logits_V.argmax())


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999])
def test_top_p_finds_the_same_tokens_as_a_sort_of_the_vocabulary(scale, top_p):
    logits_V = torch.randn(3000, generator=torch.Generator().manual_seed(3)) * scale
    probs_V = torch.softmax(logits_V, -1)
    sorted_K = probs_V.sort(descending=True).values
    before_K = sorted_K.cumsum(0, dtype=torch.float64) - sorted_K
    probs_K, token_K = _most_likely(probs_V, 0, top_p)
    assert torch.equal(probs_K, sorted_K[: int((before_K < top_p).sum())])
    assert torch.equal(probs_V[token_K], probs_K)
    assert len(token_K.unique()) == len(token_K)


def test_draws_follow_the_distribution():
    probs = [0.5, 0.3, 0.15, 0.05]
    counts = Counter(draw(logits_of(probs), SamplingParams(), uniform(0, 0, i)) for i in range(4000))
    for token, p in enumerate(probs):
        assert abs(counts[token] / 4000 - p) < 4 * (p * (1 - p) / 4000) ** 0.5
