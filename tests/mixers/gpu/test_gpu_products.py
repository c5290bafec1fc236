"""Kernels around layers, in Triton's interpreter: products of decoding rows, heads, gates and writes to pages."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="no Triton here: it comes with the test extra")

from headwater.layers.attention import Rotary
from headwater.mixers.activations import RMSNorm, gated_rms_norm_into
from headwater.mixers.gpu.attention import write
from headwater.mixers.gpu.norm import place
from headwater.mixers.gpu.pointwise import delta_gates, open_
from headwater.mixers.gpu.product import ProductOnGpu
from headwater.mixers.linear import Linear
from headwater.mixers.numerics import Numerics
from headwater.mixers.rotary import RotaryTable, rotate_into

TILED = Numerics("tiled")


@pytest.fixture(autouse=True)
def _on_gpu(wide_blocks: None, gpu_path: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_path(True)
    monkeypatch.setattr(ProductOnGpu, "outputs", 32)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("n_in", "n_out"), [(64, 48), (130, 40), (200, 33)])
def test_rows_of_a_product_do_not_depend_on_other_rows(n_in: int, n_out: int) -> None:
    weights, bias_N = [random(n_out, n_in), random(7, n_in, seed=1)], random(n_out + 7, seed=2)
    linear = Linear(weights, bias_N, TILED)
    assert all(isinstance(part, ProductOnGpu) for part in linear._parts)
    x_RK = random(37, n_in, seed=3)
    y_RN = linear(x_RK, 0)
    torch.testing.assert_close(y_RN, F.linear(x_RK.double(), torch.cat(weights).double(), bias_N.double()).float())
    for n in (1, 2, 16, 17, 33):
        assert torch.equal(linear(x_RK[:n], 0), y_RN[:n])
        assert torch.equal(linear(x_RK[-n:], 0), y_RN[-n:])
    mixed_RN = linear(x_RK, 20)
    assert torch.equal(mixed_RN[20:], y_RN[20:])
    torch.testing.assert_close(mixed_RN, y_RN)


def test_a_step_of_answers_is_one_launch_for_each_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    into = ProductOnGpu.answers_into
    monkeypatch.setattr(ProductOnGpu, "answers_into", lambda self, *a: (launched.append(len(a[1])), into(self, *a))[1])
    Linear(random(40, 64), numerics=TILED)(random(70, 64), 0)
    assert launched == [70]


def test_weights_of_which_one_has_no_kernel_are_multiplied_in_tiles() -> None:
    weights = [random(40, 64), random(8, 64).to(torch.float16)]
    linear, x_RK = Linear(weights, numerics=TILED, dtype=torch.float32), random(18, 64)
    wanted_RN = F.linear(x_RK, torch.cat([weight.float() for weight in weights]))
    torch.testing.assert_close(linear(x_RK, 0), wanted_RN, rtol=1e-4, atol=1e-4)


def test_activations_and_factors_follow_the_product() -> None:
    linear, x_RK, factor_RN = Linear(random(40, 64), random(40), TILED), random(18, 64), random(18, 40)
    y_RN = linear(x_RK, 0)
    torch.testing.assert_close(linear.swish(x_RK, 0), F.silu(y_RN))
    torch.testing.assert_close(linear.sigmoid(x_RK, 0), torch.sigmoid(y_RN))
    assert torch.equal(linear.times(x_RK, factor_RN, 0), y_RN * factor_RN)
    assert torch.equal(linear.times(x_RK, random(18, 80)[:, 40:], 0), y_RN * random(18, 80)[:, 40:])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("n_prefill", [0, 5])
def test_a_gated_product_is_that_of_two(n_prefill: int, biased: bool) -> None:
    gate, up = (Linear(random(40, 130, seed=s), random(40, seed=s) if biased else None, TILED) for s in (1, 2))
    x_RK = random(23, 130)
    opened_RN = up.opened(gate, x_RK, n_prefill)
    torch.testing.assert_close(opened_RN, F.silu(gate(x_RK, 0)) * up(x_RK, 0), rtol=1e-4, atol=1e-4)
    assert torch.equal(up.opened(gate, x_RK[10:12], 0), opened_RN[10:12])


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("width", [24, 64])
def test_heads_are_normed_and_rotated(width: int, normed: bool, neighbours: bool) -> None:
    x_NHD = random(9, 3, 2 * width)[..., :width]
    norm = RMSNorm(random(width), 1e-6, 1.0) if normed else None
    cos_sin_N2F = RotaryTable(Rotary(16, 1e4), "cpu").at(torch.arange(5, 14))
    weight_D = norm.scale_C if norm else torch.ones(width)
    wanted_NHD = F.rms_norm(x_NHD, (width,), weight_D, 1e-6) if normed else x_NHD.clone()
    torch.testing.assert_close(place(x_NHD, norm, None, False), wanted_NHD)
    rotate_into(wanted_NHD, cos_sin_N2F, neighbours)
    placed_NHD = place(x_NHD, norm, cos_sin_N2F, neighbours)
    torch.testing.assert_close(placed_NHD, wanted_NHD)
    assert torch.equal(place(x_NHD[4:6], norm, cos_sin_N2F[4:6], neighbours), placed_NHD[4:6])


def test_gates_open_heads_and_decay_states() -> None:
    x_NHD, gate_NHD = random(5, 3, 24), random(5, 3, 48)[..., 24:]
    torch.testing.assert_close(open_(x_NHD.clone(), gate_NHD), x_NHD * torch.sigmoid(gate_NHD))
    rows_NX, dt_H, decay_H = random(5, 20), random(4), -random(4).abs()
    gates_N2H = delta_gates(rows_NX[:, 8:12], rows_NX[:, 12:16], dt_H, decay_H, 2.0)
    torch.testing.assert_close(gates_N2H[:, 0], F.softplus(rows_NX[:, 8:12] + dt_H) * decay_H)
    torch.testing.assert_close(gates_N2H[:, 1], 2 * torch.sigmoid(rows_NX[:, 12:16]))


def test_a_gated_norm_is_written_in_the_dtype_of_its_memory() -> None:
    x_NHD, gate_NHD, weight_D = random(5, 3, 24), random(5, 3, 24, seed=1), random(24)
    out_NHD, wanted_NHD = (torch.empty(5, 3, 24, dtype=dtype) for dtype in (torch.float16, torch.float32))
    for out in (out_NHD, wanted_NHD):
        gated_rms_norm_into(out, x_NHD, gate_NHD, weight_D, 1e-6)
    torch.testing.assert_close(wanted_NHD, F.rms_norm(x_NHD, (24,), weight_D, 1e-6) * F.silu(gate_NHD))
    assert torch.equal(out_NHD, wanted_NHD.half())


def test_keys_and_values_are_written_to_their_places() -> None:
    pages = torch.zeros(6, 2, 4 * 24)  # pages of 4 tokens: keys, then values
    keys_values = pages[:, 0], pages[:, 1]
    rows_WX = random(130, 60)
    at = torch.randperm(24)[:19]
    write(keys_values, at // 4, at % 4, rows_WX[:19, :24], rows_WX[:19, 30:54])
    for page, rows in ((0, slice(0, 24)), (1, slice(30, 54))):
        wanted_TX = torch.zeros(24, 24)
        wanted_TX[at] = rows_WX[:19, rows]
        assert torch.equal(pages[:, page].reshape(24, 24), wanted_TX)
