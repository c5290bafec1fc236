"""Values of activations, and bits that depend only on an element (or its row)."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from headwater.mixers import activations

EXACT = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softplus": lambda x: F.softplus(x, threshold=1e9),
    "relu2": lambda x: x.relu() ** 2,
}
WIDTHS = (1, 3, 7, 8, 15, 16, 17, 31, 33, 100, 1000, 40_001)


@pytest.fixture(params=(1, 2))
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def values(n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(0)) * 5


@pytest.mark.parametrize("name", EXACT)
def test_values_are_those_of_float64(name: str) -> None:
    x = torch.cat((values(10_000), torch.tensor([-1e30, -200.0, -88.0, -20.0, 0.0, 20.0, 88.0, 200.0])))
    wanted = EXACT[name](x.double())
    assert torch.allclose(getattr(activations, name)(x).double(), wanted, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("name", EXACT)
def test_bfloat16_is_rounded_once(name: str) -> None:
    x = values(1000).bfloat16()
    assert torch.equal(getattr(activations, name)(x), getattr(activations, name)(x.float()).bfloat16())


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("name", EXACT)
def test_an_element_has_the_same_bits_at_every_width_and_place(name: str) -> None:
    function, x = getattr(activations, name), values(100_000)
    whole = function(x)
    for width in WIDTHS:
        assert torch.equal(function(x[:width].clone()), whole[:width]), width
        assert torch.equal(function(x[-width:].clone()), whole[-width:]), width


@pytest.mark.parametrize("name", EXACT)
def test_thread_count_changes_no_bit(name: str) -> None:
    before, x, outs = torch.get_num_threads(), values(99_999), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        outs.append(getattr(activations, name)(x))
    torch.set_num_threads(before)
    assert torch.equal(*outs)


def gated(x_RD: torch.Tensor, gate_RD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
    out_RD = torch.empty_like(x_RD)
    activations.gated_rms_norm_into(out_RD, x_RD, gate_RD, weight_D, 1e-6)
    return out_RD


ROWWISE = {
    "gated_rms_norm": lambda x_RD: gated(x_RD, x_RD.flip(1), x_RD[0].clone() * 0 + 1.5),
    "inverse_l2": lambda x_RD: activations.inverse_l2(x_RD),
}


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("width", [24, 128, 1000])
@pytest.mark.parametrize("name", ROWWISE)
def test_a_row_has_the_same_bits_among_any_number_of_rows(name: str, width: int) -> None:
    x_RD = values(700 * width).view(700, width)
    whole = ROWWISE[name](x_RD)
    for height in (1, 2, 3, 8, 33, 255, 256, 511):
        assert torch.equal(ROWWISE[name](x_RD[:height]), whole[:height]), height
        assert torch.equal(ROWWISE[name](x_RD[-height:]), whole[-height:]), height


def test_gated_norm_is_norm_before_gate() -> None:
    x, gate, weight = (t.double() for t in (values(640).view(20, 32), values(640).view(20, 32).flip(0), values(32)))
    wanted = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight * F.silu(gate)
    got = gated(x.float(), gate.float(), weight.float())
    assert torch.allclose(got.double(), wanted, rtol=5e-6, atol=1e-6)
