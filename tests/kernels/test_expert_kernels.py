"""Routed experts by kernels: close to their formula, with bits that depend only on a row and its experts."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="numba is not installed")

from headwater.engine.proof.cpu_checks import broken_experts, narrowed
from headwater.kernels import NF4
from headwater.kernels.compiling import threads_in_use, use_threads
from headwater.kernels.experts import MAX_ROWS_PER_THREAD
from headwater.kernels.integers import multiply_integers
from headwater.kernels.product import multiply_float8
from headwater.layers.feed_forward import Experts
from headwater.mixers import numerics
from headwater.mixers.cpu.experts import ExpertProduct, ExpertsOnCpu, Routes
from headwater.mixers.feed_forward import MixtureOfExperts
from headwater.mixers.numerics import Numerics
from headwater.mixers.panels import PanelProduct
from headwater.mixers.quantised import Quantised
from headwater.mixers.weights import Weights
from headwater.models import quantiser
from headwater.models.packing import float8
from tests.mixers.test_moe import FORMS, QWEN, WIDTH, Plain, module, weights_of

COUNTS = [0, 1, 2, 7, 0, MAX_ROWS_PER_THREAD + 3, 1]  # rows of each expert
N_IN, N_OUT = 128, 80
PACKS = {"float8": quantiser.in_float8, "int8": partial(quantiser.quantised, bits=8)}
SHAPES = {"qwen": QWEN, "deepseek": FORMS["deepseek"], "nemotron": FORMS["nemotron"]}


@pytest.fixture(autouse=True)
def _two_threads():
    before = threads_in_use()
    use_threads(2)
    yield
    use_threads(before)


def codes(bits: int, generator: torch.Generator, nested: bool) -> Quantised:
    groups, outer = N_IN // 32, None
    scale_NX = torch.rand(N_OUT, groups, generator=generator).half() * 0.02
    minimum_NX = None
    if nested:
        scale_NX, outer = (scale_NX.float() * 3000).to(torch.uint8), torch.rand(N_OUT, 1, generator=generator) / 3000
        minimum_NX = torch.randint(0, 64, (N_OUT, groups), dtype=torch.uint8, generator=generator)
    code_NK = torch.randint(0, 1 << bits, (N_OUT, N_IN), dtype=torch.uint8, generator=generator)
    zero_NX = torch.full((N_OUT, 1), 1 << (bits - 1), dtype=torch.uint8)
    return Quantised(code_NK, bits, scale_NX, zero_NX, minimum_NX, outer, outer)


def in_float8(generator: torch.Generator) -> Quantised:
    return float8(
        torch.randn(N_OUT, N_IN, generator=generator).to(torch.float8_e4m3fn),
        torch.rand(N_OUT, N_IN // 32, generator=generator),
    )


def nf4(weight: Quantised) -> Quantised:
    return replace(weight, scale_NX=weight.scale_NX.float(), zero_NX=weight.zero_NX * 0, table=NF4)


def in_act_order(weight: Quantised, generator: torch.Generator) -> Quantised:
    return replace(weight, order_K=torch.randperm(N_IN, generator=generator))


FORMATS = {
    "float32": (torch.float32, lambda g: torch.randn(N_OUT, N_IN, generator=g)),
    "bfloat16": (torch.float32, lambda g: torch.randn(N_OUT, N_IN, generator=g).bfloat16()),
    "bfloat16 rows": (torch.bfloat16, lambda g: torch.randn(N_OUT, N_IN, generator=g).bfloat16()),
    "odd inputs": (torch.float32, lambda g: torch.randn(N_OUT, N_IN - 1, generator=g).bfloat16()),
    "float16": (torch.float32, lambda g: torch.randn(N_OUT, N_IN, generator=g).half()),
    "float8": (torch.float32, in_float8),
    "float8, bfloat16 rows": (torch.bfloat16, in_float8),
    "nf4": (torch.float32, lambda g: nf4(codes(4, g, False))),
    "nf4, bfloat16 rows": (torch.bfloat16, lambda g: nf4(codes(4, g, False))),
    "int8": (torch.float32, lambda g: codes(8, g, False)),
    "int4": (torch.float32, lambda g: codes(4, g, False)),
    "codes of a table": (torch.float32, lambda g: replace(codes(4, g, False), table=tuple(range(0, 256, 17)))),
    "int4 in act order": (torch.float32, lambda g: in_act_order(codes(4, g, False), g)),
    "int4 in act order, bfloat16 rows": (torch.bfloat16, lambda g: in_act_order(codes(4, g, False), g)),
    "Q4_K": (torch.bfloat16, lambda g: codes(4, g, True)),
}


def same_as_alone(form: str, times: float = 1.0) -> bool:
    """Return whether rows of experts have the bits of products with each single expert."""
    dtype, weight = FORMATS[form]
    generator = torch.Generator().manual_seed(0)
    weights = [weight(generator) for _ in COUNTS]
    x_RK = torch.randn(sum(COUNTS), weights[0].shape[1], generator=generator).to(dtype)
    chosen = [e for e, count in enumerate(COUNTS) if count]
    routes = Routes(np.cumsum([0, *COUNTS]), np.array([len(chosen), *chosen]))
    product = ExpertProduct(weights, dtype)
    y_RN = product(x_RK, routes, "swish", factor_RN=product(x_RK, routes))[:, :N_OUT]
    for e, rows_RK, found_RN in zip(range(len(COUNTS)), x_RK.split(COUNTS), y_RN.split(COUNTS), strict=True):
        alone = PanelProduct(weights[e], None, dtype)
        if len(rows_RK) and not torch.equal(alone(rows_RK, "swish", alone(rows_RK)) * times, found_RN):
            return False
    return True


@pytest.mark.parametrize("form", FORMATS)
def test_rows_have_the_bits_of_products_with_only_their_expert(form):
    assert same_as_alone(form)
    assert not same_as_alone(form, 1 + 2**-7), "control: other bits are seen"


@pytest.mark.parametrize("form", FORMS)
def test_agree_with_the_formula(form):
    x = torch.randn(33, WIDTH, generator=torch.Generator().manual_seed(1))
    plain = Plain(FORMS[form])
    expected = torch.stack([plain(row) for row in x.double()])
    assert (module(FORMS[form], kind=ExpertsOnCpu).forward(x, 0).double() - expected).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_a_row_does_not_depend_on_the_others(form, dtype):
    moe = module(FORMS[form], dtype, ExpertsOnCpu)
    x = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[:100] = x[199]
    whole = moe.forward(x, 0)
    for first, last in [(0, 1), (1, 3), (7, 8), (100, 164), (199, 200), (3, 200)]:
        for n_prefill in (0, last - first):
            assert torch.equal(moe.forward(x[first:last], n_prefill), whole[first:last]), (first, last)


def test_first_experts_are_chosen_among_equal_ranks():
    shape = replace(QWEN, shared=0, shared_gate=False, normalise=False)
    weights = weights_of(shape) | {"gate.weight": torch.zeros(shape.experts, WIDTH)}
    x = torch.randn(2, WIDTH)
    others = {name: tensor.clone() for name, tensor in weights.items()}
    for name in others:
        if name.startswith("experts."):
            others[name][2:] = torch.nan
    first, second = (ExpertsOnCpu.of(shape, Weights(some)).forward(x, 0) for some in (weights, others))
    assert torch.equal(first, second)


def test_sigmoids_that_are_all_zero_make_no_nan():
    shape = replace(FORMS["deepseek"], groups=1, groups_per_token=1)
    weights = weights_of(shape) | {"gate.weight": torch.full((shape.experts, WIDTH), -1e3)}
    assert ExpertsOnCpu.of(shape, Weights(weights)).forward(torch.ones(3, WIDTH), 0).isfinite().all()


def test_experts_in_several_formats_or_without_kernels_are_computed_one_by_one():
    weights = dict(weights_of(QWEN))
    assert isinstance(ExpertsOnCpu.of(QWEN, Weights(weights)), ExpertsOnCpu)
    before = numerics.current()
    numerics.use(Numerics("tiled"))
    try:
        assert type(ExpertsOnCpu.of(QWEN, Weights(weights))) is MixtureOfExperts
    finally:
        numerics.use(before)
    *some, last = weights["experts.up_proj.weight"].unbind(0)
    mixed = ExpertsOnCpu.of(QWEN, Weights(weights | {"experts.up_proj.weight": [*some, last.bfloat16()]}))
    assert type(mixed) is MixtureOfExperts
    assert mixed.forward(torch.randn(2, WIDTH), 0).isfinite().all()


def found(monkeypatch, shape: Experts, change, packs=PACKS) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    whole = ExpertProduct.__call__
    monkeypatch.setattr(ExpertProduct, "__call__", lambda *args, **named: change(whole(*args, **named)))
    return list(broken_experts(shape, lambda *size: torch.randn(size, generator=generator) * size[-1] ** -0.5, packs))


@pytest.mark.parametrize("name", SHAPES)
def test_the_self_check_finds_the_kernels_exact(monkeypatch, name):
    assert found(monkeypatch, SHAPES[name], lambda y_RN: y_RN) == []


def test_self_check_names_experts_that_depend_on_other_rows_or_threads(monkeypatch):
    rows = 3 * QWEN.per_token
    assert "moe at 3 rows" in found(monkeypatch, QWEN, lambda y_RN: y_RN + (len(y_RN) == rows))
    names = found(monkeypatch, QWEN, lambda y_RN: y_RN + (threads_in_use() == 1))
    assert "moe on 1 of 2 threads of a kernel" in names


@pytest.mark.parametrize(("form", "few"), [("float8", multiply_float8), ("int8", multiply_integers)])
def test_the_self_check_tries_experts_in_the_formats_of_the_model(monkeypatch, form, few):
    whole, rows = ExpertProduct.__call__, 3 * QWEN.per_token

    def changed(self, x_RK, *args, **named):
        return whole(self, x_RK, *args, **named) + (self.held.few is few and len(x_RK) == rows)

    monkeypatch.setattr(ExpertProduct, "__call__", changed)
    assert found(monkeypatch, QWEN, lambda y_RN: y_RN, {}) == []
    assert found(monkeypatch, QWEN, lambda y_RN: y_RN) == [f"moe with weights in {form} at 3 rows"]


def test_the_self_check_keeps_the_router_of_a_large_layer():
    large = Experts(4096, 256, 8, 2048, shared=2048, scores="sigmoid", corrected=True, groups=8, groups_per_token=4)
    narrow = narrowed(large)
    assert (narrow.groups, narrow.groups_per_token, narrow.per_token, narrow.scores) == (8, 4, 8, "sigmoid")
    assert (narrow.hidden, narrow.experts, narrow.intermediate, narrow.shared) == (64, 128, 64, 64)
