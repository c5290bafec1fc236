"""MLPs against their formula, and bits that depend only on a row."""

import pytest
import torch
import torch.nn.functional as F

from headwater.layers.feed_forward import Mlp
from headwater.mixers.feed_forward import mlp_of
from headwater.mixers.weights import Weights

WIDTH = 48
FORMS = {
    "gated": Mlp(WIDTH, 75),
    "gated, biases": Mlp(WIDTH, 75, bias=True),
    "gate scaled": Mlp(WIDTH, 75, bias=True, gate_scale=0.3),
    "gated by relu2": Mlp(WIDTH, 75, activation="relu2"),
    "gated, limit": Mlp(WIDTH, 75, bias=True, limit=0.4),
    "plain": Mlp(WIDTH, 75, gated=False),
    "plain relu2, biases": Mlp(WIDTH, 75, gated=False, activation="relu2", bias=True),
}


def weights_of(shape: Mlp) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(size, generator=generator) * 0.2 for name, size in shape.tensors().items()}


def plain(shape: Mlp, x: torch.Tensor) -> torch.Tensor:
    weights = {name: weight.double() for name, weight in weights_of(shape).items()}

    def product(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    activation = {"silu": F.silu, "relu2": lambda x: x.relu() ** 2}[shape.activation]
    if not shape.gated:
        return product("down_proj", activation(product("up_proj", x)))
    gate, up = activation(shape.gate_scale * product("gate_proj", x)), product("up_proj", x)
    if shape.limit:
        gate, up = gate.minimum(torch.tensor(shape.limit)), up.clip(-shape.limit, shape.limit)
    return product("down_proj", gate * up)


@pytest.mark.parametrize("form", FORMS)
def test_agrees_with_the_formula(form: str) -> None:
    shape = FORMS[form]
    x = torch.randn(33, WIDTH, generator=torch.Generator().manual_seed(1))
    out = mlp_of(shape, Weights(weights_of(shape))).forward(x, 0)
    assert torch.allclose(out.double(), plain(shape, x.double()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_a_row_does_not_depend_on_the_others(form: str, dtype: torch.dtype) -> None:
    mlp = mlp_of(FORMS[form], Weights(weights_of(FORMS[form]), dtype))
    x = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = mlp.forward(x, 0)
    for first, last in [(0, 1), (1, 3), (7, 8), (100, 164), (199, 200), (3, 200)]:
        assert torch.equal(mlp.forward(x[first:last], 0), whole[first:last]), (first, last)
