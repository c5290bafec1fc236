from dataclasses import replace

import torch

from headwater.engine.sampler import Sampling, draw, sample
from headwater.types import SamplingParams


def logits_of(probs: list[float]) -> torch.Tensor:
    return torch.tensor(probs).log()


def drawn(probs: list[float], n: int = 400, **params) -> set[int]:
    generator = torch.Generator().manual_seed(0)
    return {draw(logits_of(probs), SamplingParams(**params), generator) for _ in range(n)}


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
    def run(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return [draw(torch.zeros(1000), SamplingParams(), generator) for _ in range(8)]

    assert run(1) == run(1)
    assert run(1) != run(2)


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
