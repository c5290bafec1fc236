"""Tokens that were drawn before sampling had kernels: the same numbers give them by torch and by kernels.

The numbers were those of torch's generator then.
"""

import pytest
import torch

from headwater import kernels
from headwater.engine import sampler, step_logits
from headwater.engine.passes import Passes, passes
from headwater.engine.sampler import Sampling
from headwater.engine.step_logits import sample
from headwater.request import SamplingParams

PROMPT, ROWS = (5, 17, 17, 4000), 3
SETTINGS = {
    "plain": {},
    "cool": {"temperature": 0.7},
    "hot": {"temperature": 1.6},
    "top_k": {"top_k": 20},
    "top_k of many": {"top_k": 700, "temperature": 1.3},
    "top_p": {"temperature": 0.7, "top_p": 0.9},
    "top_p of many": {"temperature": 1.5, "top_p": 0.995},
    "min_p": {"min_p": 0.05},
    "all filters": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    "penalties": {"temperature": 0.3, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "bias": {"logit_bias": ((11, 9.0), (12, -100.0)), "top_p": 0.8},
    "greedy": {"temperature": 0.0, "frequency_penalty": 1.0, "logprobs": 2},
}


# by (vocabulary, whether logits are rounded to bfloat16): the tokens of three requests in four steps
TOKENS = {
    (6_000, False): {
        "plain": [[5601, 3630, 1387, 5100], [0, 887, 946, 271], [5982, 891, 4540, 2632]],
        "cool": [[4678, 7, 14, 3733], [0, 7, 14, 21], [5982, 2001, 5996, 2015]],
        "hot": [[5795, 4188, 2747, 5448], [289, 1101, 1166, 953], [5506, 595, 4141, 3136]],
        "top_k": [[2887, 3995, 14, 954], [0, 7, 14, 21], [2465, 5989, 3129, 5006]],
        "top_k of many": [[3871, 5837, 4208, 515], [0, 4817, 946, 2015], [1652, 2001, 3843, 1579]],
        "top_p": [[3365, 7, 14, 4009], [0, 7, 14, 21], [2465, 5989, 4999, 2015]],
        "top_p of many": [[5055, 4888, 2603, 4553], [1994, 3351, 1651, 2562], [4340, 3787, 3480, 358]],
        "min_p": [[4121, 7, 14, 4009], [0, 7, 14, 21], [5982, 2001, 4999, 2015]],
        "all filters": [[3988, 7, 14, 1394], [0, 7, 14, 21], [997, 5989, 4999, 2015]],
        "penalties": [[0, 7, 14, 21], [0, 7, 14, 21], [5982, 2001, 5996, 2015]],
        "bias": [[1680, 11, 1387, 1394], [0, 11, 11, 1018], [3906, 5989, 11, 5145]],
        "greedy": [[0, 7, 14, 21], [0, 7, 14, 21], [5982, 5989, 5996, 3]],
    },
    (60_000, True): {
        "plain": [[57547, 40718, 27168, 53627], [4318, 14619, 15309, 11700], [53493, 5989, 39335, 29931]],
        "cool": [[52614, 32908, 32915, 46880], [6979, 17953, 17960, 15973], [47856, 4992, 29924, 28934]],
        "hot": [[58096, 42447, 27282, 54950], [3895, 13875, 14382, 10960], [54874, 5920, 42411, 31925]],
        "top_k": [[24925, 2001, 46873, 7997], [17946, 17953, 17960, 17967], [6119, 29917, 25936, 32922]],
        "top_k of many": [[53950, 55042, 24484, 27511], [19940, 10974, 14144, 31925], [12145, 32908, 55666, 14782]],
        "top_p": [[6336, 21941, 25936, 23955], [17946, 17953, 17960, 17967], [29679, 29917, 21887, 20958]],
        "top_p of many": [[39888, 7166, 16902, 54377], [22931, 42119, 59112, 16970], [29966, 57836, 32806, 37416]],
        "min_p": [[47856, 33032, 32915, 46880], [4653, 17953, 17960, 13979], [47856, 4992, 29924, 25943]],
        "all filters": [[7976, 6986, 25936, 14976], [17946, 17953, 17960, 17967], [15952, 29917, 25936, 32922]],
        "penalties": [[46859, 32908, 32915, 32922], [17946, 17953, 17960, 17967], [29910, 4992, 29924, 29931]],
        "bias": [[52106, 5886, 57561, 36529], [11, 43463, 33977, 33919], [1903, 11, 47317, 47521]],
        "greedy": [[32901, 32908, 32915, 32922], [17946, 17953, 17960, 17967], [29910, 29917, 29924, 29931]],
    },
}


@pytest.fixture(params=["torch", "kernels"])
def _passes(request, monkeypatch):
    """The passes over the vocabulary, by torch and by kernels."""
    if request.param == "kernels" and not kernels.available():
        pytest.skip("numba is not installed")
    chosen = Passes() if request.param == "torch" else passes()
    for module in (sampler, step_logits):
        monkeypatch.setattr(module, "passes", lambda: chosen)


@pytest.fixture(autouse=True)
def _numbers(monkeypatch):
    """Each seed's numbers in turn."""
    generators: dict[int, torch.Generator] = {}

    def uniform(seed: int, choice: int, position: int) -> float:
        generator = generators.setdefault(seed, torch.Generator().manual_seed(seed))
        if position == 0:
            generator.manual_seed(seed)
        return float(torch.rand(1, dtype=torch.float64, generator=generator))

    monkeypatch.setattr(sampler, "uniform", uniform)


def logits_of(size: int, halves: bool) -> torch.Tensor:
    """Logits [3, V]: a likely few, and of halves many that are equal."""
    generator = torch.Generator().manual_seed(size)
    logits_RV = torch.randn(ROWS, size, generator=generator) * 2
    logits_RV[:, ::997] += 6
    return logits_RV.bfloat16().float() if halves else logits_RV


def tokens_of(setting: str, size: int, halves: bool, steps: int = 4) -> list[list[int]]:
    """The tokens of three requests, step by step."""
    logits_RV = logits_of(size, halves)
    samplings = [Sampling(SamplingParams(seed=row, **SETTINGS[setting]), PROMPT) for row in range(ROWS)]
    output: list[list[int]] = [[] for _ in range(ROWS)]
    for step in range(steps):
        for row, choice in enumerate(sample(logits_RV.roll(7 * step, 1), samplings)):
            samplings[row].take(choice.token)
            output[row].append(choice.token)
    return output


@pytest.mark.usefixtures("_passes")
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("size", "halves"), TOKENS)
def test_numbers_give_the_tokens_that_they_gave(size, halves, setting):
    assert tokens_of(setting, size, halves) == TOKENS[size, halves][setting]


def test_another_order_of_equal_probabilities_would_be_seen(monkeypatch):
    class Stable(Passes):
        """Control: equal probabilities in the order of tokens, which is not that of torch.topk."""

        def leading(self, x_V, k):
            values_V, token_V = x_V.sort(descending=True, stable=True)
            return values_V[:k], token_V[:k]

    monkeypatch.setattr(sampler, "passes", Stable)
    found = {setting: tokens_of(setting, 60_000, True) for setting in ("top_k", "top_p", "all filters")}
    assert any(found[setting] != TOKENS[60_000, True][setting] for setting in found)
