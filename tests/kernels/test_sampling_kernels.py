"""Passes over the vocabulary by kernels: the results of torch's operations, to the bit."""

import pytest
import torch

pytest.importorskip("numba", reason="numba is not installed")

from headwater.engine import passes as of_engine
from headwater.engine.passes import KernelPasses, Passes, broken_passes, passes

SIZES = [1, 15, 16, 63, 64, 100, 4096, 4097, 20_000]
BY_TORCH = Passes()


def rows_of(size: int, n: int = 3, halves: bool = False) -> torch.Tensor:
    """Rows [n, V] that are cut out of longer ones; of halves many elements are equal."""
    logits_RV = torch.randn(n, size + 5, generator=torch.Generator().manual_seed(size)) * 3
    return (logits_RV.bfloat16().float() if halves else logits_RV)[:, 2 : size + 2]


@pytest.mark.parametrize("size", SIZES)
def test_the_largest_is_the_first_of_equal_ones(size):
    x_RV = rows_of(size).round()
    assert passes().largest(x_RV) == BY_TORCH.largest(x_RV)
    assert passes().largest(torch.full((2, size), -torch.inf))[0] == [-torch.inf] * 2


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_one_that_is_not_finite_is_the_largest(size, value):
    for at in {0, size // 2, size - 1}:
        x_RV = rows_of(size).clone()
        x_RV[1, at] = value
        largest_R, _ = passes().largest(x_RV)
        assert str(largest_R[1]) == str(value)
        assert [largest_R[0], largest_R[2]] == x_RV[::2].amax(-1).tolist()


@pytest.mark.parametrize("size", SIZES)
def test_scaled_logits_are_torchs(size):
    x_RV, numbers = rows_of(size), ([3.1, 0.7, -2.3], [0.7, 1e-6, 1.3])
    assert torch.equal(passes().scaled(x_RV, *numbers), BY_TORCH.scaled(x_RV, *numbers))


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("k", [1, 2, 20, 256, 300])
@pytest.mark.parametrize("turn", ["as it is", "ascending", "descending", "of one value", "mostly minus infinity"])
def test_the_most_likely_have_the_order_of_torch(turn, k, halves):
    (x_V,) = rows_of(20_000, 1, halves)
    if turn in ("ascending", "descending"):
        x_V = x_V.sort(descending=turn == "descending").values
    elif turn == "of one value":
        x_V = torch.zeros(20_000)
    elif turn == "mostly minus infinity":
        x_V = torch.where(torch.arange(20_000) % 1500 == 3, x_V, -torch.inf)
    for found, wanted in zip(passes().leading(x_V, k), x_V.topk(k), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_a_sort_keeps_the_order_of_equal_ones(size, halves):
    probs_RV = torch.softmax(rows_of(size, halves=halves), -1)
    least_R = [0.0, 0.5 / size, 1.0]
    for found, wanted in zip(
        passes().descending(probs_RV, least_R), BY_TORCH.descending(probs_RV, least_R), strict=True
    ):
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("size", SIZES)
def test_drawn_token_equals_torchs(size):
    probs_RV = torch.softmax(rows_of(size), -1)
    generator = torch.Generator().manual_seed(size)
    for _ in range(50):
        uniform_R = torch.rand(3, dtype=torch.float64, generator=generator).tolist()
        for least_R in ([0.0] * 3, (0.1 * probs_RV.amax(-1)).tolist()):
            assert passes().drawn(probs_RV, least_R, uniform_R) == BY_TORCH.drawn(probs_RV, least_R, uniform_R)


def between_tokens(probs_RK: torch.Tensor) -> list[float]:
    """Numbers whose products with the sum are as near to a cumulative sum as float64 has them."""
    cumulative_K = probs_RK[0].double().cumsum(0)
    near = (cumulative_K / cumulative_K[-1])[:-1:97].tolist()
    return [x for at in near for x in (at, at * (1 - 1e-16), at * (1 + 3e-16))]


@pytest.mark.parametrize("equal", [True, False])
def test_a_number_between_two_tokens_gives_that_of_sums_in_order(equal):
    probs_RK = torch.full((1, 8192), 1 / 8192) if equal else torch.softmax(rows_of(20_000, 1), -1)
    for uniform in between_tokens(probs_RK):
        assert passes().drawn(probs_RK, [0.0], [uniform]) == BY_TORCH.drawn(probs_RK, [0.0], [uniform])


def test_sums_in_another_order_would_give_others_there():
    class Backwards(Passes):
        """Control: cumulative sums from the last token on."""

        def drawn(self, probs_RK, least_R, uniform_R):
            from_end_K = probs_RK[0].double().flip(0).cumsum(0).flip(0)
            left_K = from_end_K[0] - from_end_K + probs_RK[0]
            return [int(torch.searchsorted(left_K, uniform_R[0] * from_end_K[0], right=True))]

    probs_RK = torch.softmax(rows_of(20_000, 1), -1)
    differ = [
        Backwards().drawn(probs_RK, [0.0], [uniform]) != BY_TORCH.drawn(probs_RK, [0.0], [uniform])
        for uniform in between_tokens(probs_RK)
    ]
    assert any(differ)


def test_tokens_of_probability_zero_are_never_drawn():
    probs_RK = torch.zeros(1, 10_000)
    probs_RK[0, [5000, 7000]] = 0.5
    uniforms = (0.0, 0.4999, 0.5, 0.9, 1 - 1e-16)
    assert [passes().drawn(probs_RK, [0.0], [uniform])[0] for uniform in uniforms] == [5000, 5000, 7000, 7000, 7000]


@pytest.mark.parametrize("size", SIZES)
def test_ranks_count_larger_logits(size):
    x_RV = rows_of(size, halves=True)
    assert passes().n_larger(x_RV, x_RV[:, size // 2]) == BY_TORCH.n_larger(x_RV, x_RV[:, size // 2])


def test_self_check_accepts_the_kernels_and_names_an_inexact_pass(monkeypatch):
    assert list(broken_passes(5000)) == []

    class Leaning(KernelPasses):
        """Control: draws the token after the right one in company."""

        def drawn(self, probs_RK, least_R, uniform_R):
            return [token + (len(probs_RK) == 3) for token in super().drawn(probs_RK, least_R, uniform_R)]

    leaning = Leaning(passes()._kernels)
    monkeypatch.setattr(of_engine, "passes", lambda: leaning)
    assert list(broken_passes(5000)) == ["tokens drawn from a vocabulary of 5000 by a kernel"]
