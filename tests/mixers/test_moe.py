"""Routed experts against their formula, row by row."""

import pytest
import torch
import torch.nn.functional as F

from headwater.layers.feed_forward import Experts
from headwater.mixers.linear import Linear
from headwater.mixers.mlp import GatedMlp
from headwater.mixers.moe import MixtureOfExperts, Router

WIDTH = 48


def shape_of(experts: int, per_token: int, width: int, shared: int, normalise: bool) -> Experts:
    return Experts(WIDTH, experts, per_token, width, shared, shared_gate=True, normalise=normalise)


class Weights:
    def __init__(self, shape: Experts, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(n_out: int, n_in: int) -> torch.Tensor:
            return (torch.randn(n_out, n_in, generator=generator) * n_in**-0.5).to(dtype)

        def mlp(width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return random(width, WIDTH), random(width, WIDTH), random(WIDTH, width)

        self.shape = shape
        self.router, self.shared_gate = random(shape.experts, WIDTH), random(1, WIDTH)
        self.experts = [mlp(shape.intermediate) for _ in range(shape.experts)]
        self.shared = mlp(shape.shared)

    def module(self) -> MixtureOfExperts:
        def packed(weights: tuple[torch.Tensor, ...]) -> GatedMlp:
            return GatedMlp(*(Linear(weight) for weight in weights))

        experts = tuple(packed(expert) for expert in self.experts)
        router = Router(self.shape, Linear(self.router))
        return MixtureOfExperts(router, experts, packed(self.shared), Linear(self.shared_gate))

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """One token in float64."""

        def run(weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
            gate, up, down = (weight.double() for weight in weights)
            return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

        x = x.double()
        probability = (self.router.double() @ x).softmax(-1)
        chosen = probability.topk(self.shape.per_token)
        weight = chosen.values / chosen.values.sum() if self.shape.normalise else chosen.values
        total = (self.shared_gate.double() @ x).sigmoid() * run(self.shared)
        for w, expert in zip(weight, chosen.indices.tolist(), strict=True):
            total = total + w * run(self.experts[expert])
        return total


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("experts", "per_token"), [(8, 2), (5, 5), (16, 1)])
def test_agrees_with_the_formula(experts: int, per_token: int, normalise: bool) -> None:
    weights = Weights(shape_of(experts, per_token, 40, 56, normalise), torch.float32)
    x = torch.randn(33, WIDTH, generator=torch.Generator().manual_seed(1))
    out = weights.module().forward(x)
    expected = torch.stack([weights.plain(row) for row in x])
    assert (out.double() - expected).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    moe = Weights(shape_of(8, 3, 40, 56, True), dtype).module()
    x = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = moe.forward(x)
    for first, last in [(0, 1), (1, 3), (7, 8), (100, 164), (199, 200), (3, 200)]:
        assert torch.equal(moe.forward(x[first:last]), whole[first:last]), (first, last)


def test_experts_without_rows_are_left_out() -> None:
    weights = Weights(shape_of(64, 1, 8, 8, True), torch.float32)
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))
    assert (weights.module().forward(x).double() - torch.stack([weights.plain(row) for row in x])).abs().max() < 1e-5
