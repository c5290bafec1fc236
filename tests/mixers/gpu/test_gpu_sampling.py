"""Tokens chosen by the GPU's kernel, in Triton's interpreter: those of the rules, written plainly."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="no Triton here: it comes with the test extra")

from headwater.engine.sampler import Choice, Sampling, logprobs_of
from headwater.engine.step_logits import LogitsOnGpu, StepLogits
from headwater.errors import InvalidLogits
from headwater.mixers.gpu import sampling
from headwater.mixers.gpu.sampling import Draw, choose
from headwater.request import SamplingParams

HEAVIEST = 2**31
TEMPERATURES, TOP_KS, TOP_PS, MIN_PS = (0.0, 0.1, 0.8, 1.5), (0, 1, 5, 40, 5000), (1.0, 0.95, 0.5, 0.01), (0.0, 0.05, 1)


@pytest.fixture(autouse=True, params=[4096, 64], ids=["gathered", "seldom gathered"])
def _small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("BLOCK", 512), ("COUNTED", 256), ("GATHERED", request.param)):
        monkeypatch.setattr(sampling, name, value)


def expected(x_V: np.ndarray, draw: Draw) -> int:
    """Temperature, top-k, top-p and min-p in this order, over integer weights; equal logits in the order of tokens."""
    if draw.temperature == 0:
        return int(x_V.argmax())
    exponents = ((x_V - x_V.max()) / np.float32(draw.temperature)).astype(np.float32)
    weights = [int(weight) for weight in np.exp(exponents) * np.float32(HEAVIEST)]
    tokens = sorted(range(len(x_V)), key=lambda token: (-x_V[token], token))
    tokens = tokens[: draw.top_k or None]
    if draw.top_p < 1:
        wanted, sums = draw.top_p * sum(weights[t] for t in tokens), np.cumsum([weights[t] for t in tokens])
        tokens = tokens[: max(1, int((sums < np.ceil(wanted)).sum()) + 1)]
    tokens = sorted(token for token in tokens if weights[token] >= np.ceil(draw.min_p * HEAVIEST))
    sums = np.cumsum([weights[token] for token in tokens])
    return tokens[int((sums <= np.floor(draw.uniform * float(sums[-1]))).sum())]


def logits(rng: np.random.Generator, rows: int, size: int, spread: float, equals: bool) -> torch.Tensor:
    x_RV = torch.tensor(rng.normal(size=(rows, size)) * spread, dtype=torch.float32)
    return x_RV.bfloat16().float() if equals else x_RV


@pytest.mark.parametrize("equals", [False, True], ids=["distinct", "equal logits"])
@pytest.mark.parametrize("size", [7, 600, 1100])
def test_tokens_are_those_of_the_rules(size: int, equals: bool) -> None:
    rng = np.random.default_rng(size)
    for spread in (0.5, 3, 10):
        x_RV = logits(rng, 4, size, spread, equals)
        draws = [
            Draw(row, *(float(rng.choice(some)) for some in (TEMPERATURES,)), int(rng.choice(TOP_KS)),
                 float(rng.choice(TOP_PS)), float(rng.choice(MIN_PS)), float(rng.random()))
            for row in (3, 0, 2, 1)
        ]  # fmt: skip
        largest_R, token_R = choose(x_RV, draws)
        assert token_R == [expected(x_RV[draw.row].numpy(), draw) for draw in draws], draws
        assert largest_R == [float(x_RV[draw.row].max()) for draw in draws]
        assert [choose(x_RV, [draw])[1][0] for draw in draws[:1]] == token_R[:1]


def test_equal_logits_at_the_threshold_are_chosen_in_order_of_tokens() -> None:
    x_RV = torch.zeros(1, 700)
    x_RV[0, 5] = 1.0
    tokens = {choose(x_RV, [Draw(0, 1.0, top_k=4, uniform=u / 12)])[1][0] for u in range(12)}
    assert tokens == {0, 1, 2, 5}


def test_draws_follow_the_distribution() -> None:
    probs = [0.5, 0.25, 0.125, 0.125]
    x_RV = torch.tensor([probs]).log()
    counts = Counter(choose(x_RV, [Draw(0, 1.0, uniform=(i + 0.5) / 40)])[1][0] for i in range(40))
    assert [counts[token] for token in range(4)] == [20, 10, 5, 5]


def test_the_largest_is_nan_if_any_is_and_infinite_rows_choose_nothing() -> None:
    x_RV = torch.zeros(3, 600)
    x_RV[0, 599], x_RV[1, 3], x_RV[2] = torch.nan, torch.inf, -torch.inf
    largest_R, _ = choose(x_RV, [Draw(row, 1.0) for row in range(3)])
    assert np.isnan(largest_R[0])
    assert largest_R[1:] == [np.inf, -np.inf]


def test_step_chooses_on_the_device_and_copies_only_adjusted_or_scored_rows(gpu_path: Callable[[bool], None]) -> None:
    gpu_path(True)
    x_RV = logits(np.random.default_rng(0), 5, 600, 3, False)
    x_RV[4, 0] = torch.nan
    params = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, logit_bias={7: 100.0}),
        SamplingParams(temperature=0.7, top_p=0.9, seed=3, logprobs=2),
        SamplingParams(temperature=0.7, top_k=3, seed=4, logit_bias={9: -100.0}),
        SamplingParams(temperature=0.7),
    ]
    samplings = [Sampling(p, (1, 2)) for p in params]
    step = StepLogits.of(x_RV)
    assert isinstance(step, LogitsOnGpu)
    greedy, biased, scored, drawn, broken = step.sample(range(5), samplings)
    assert greedy == Choice(int(x_RV[0].argmax()))
    assert biased == Choice(7)
    token = choose(x_RV, [Draw(2, 0.7, top_p=0.9, uniform=samplings[2].uniform)])[1][0]
    (score,) = logprobs_of(x_RV[2:3], [token], [2])
    assert scored == Choice(token, score.logprob, score.top)
    assert drawn == StepLogits(x_RV[:4]).sample([3], [samplings[3]])[0]
    assert isinstance(broken, InvalidLogits)
    assert set(step._copied) == {1, 2, 3}
