"""The differentiable delta rule is the one that is served."""

from __future__ import annotations

import pytest
import torch

from headwater.mixers.gdn import delta_rule as token_by_token
from training.delta_rule import UnitLowerInverse, delta_rule

B, H, K, V = 2, 2, 3, 5


def arguments(length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = normal(B, length, H, K), normal(B, length, H, K), normal(B, length, H, V)
    g, beta = -normal(B, length, H).abs(), normal(B, length, H).sigmoid()
    return [x.requires_grad_() for x in (q, k / k.norm(dim=-1, keepdim=True), v, g, beta)]


@pytest.mark.parametrize("length", [1, 4, 5, 11, 16])
def test_outputs_are_those_of_the_recurrence(length: int) -> None:
    given = arguments(length)
    out = delta_rule(*given, chunk=4)
    zero = torch.zeros(H, K, V, dtype=torch.float64)
    expected = torch.stack([token_by_token(*(x[b].detach() for x in given), zero)[0] for b in range(B)])
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [3, 11])
def test_gradients_are_those_of_differences(length: int) -> None:
    assert torch.autograd.gradcheck(lambda *given: delta_rule(*given, chunk=4), arguments(length))


@pytest.mark.parametrize("length", [5, 11])
def test_gradients_are_those_of_the_recurrence(length: int) -> None:
    """The reference, written without assignments in place, differentiated by torch."""
    given = arguments(length)
    weights = torch.randn(B, length, H, V, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad((delta_rule(*given, chunk=4) * weights).sum(), given)

    q, k, v, g, beta = given
    state = torch.zeros(B, H, K, V, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for t in range(length):
        state = state * g[:, t, :, None, None].exp()
        error = (v[:, t] - (state * k[:, t, ..., None]).sum(2)) * beta[:, t, :, None]
        state = state + k[:, t, ..., None] * error[:, :, None]
        total = total + ((state * q[:, t, ..., None]).sum(2) * weights[:, t]).sum()
    for ours, theirs in zip(grads, torch.autograd.grad(total, given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_inverse_is_differentiated() -> None:
    a = torch.randn(2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).tril(-1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: UnitLowerInverse.apply(x.tril(-1)), (a,))
