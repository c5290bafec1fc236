"""Products whose rows do not depend on how many there are, with weights of all formats."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet
from torch.multiprocessing.reductions import StorageWeakRef

from headwater import kernels, machine
from headwater.engine.proof import selfcheck
from headwater.mixers import products
from headwater.mixers.linear import (
    Embedding,
    Linear,
    answers_product,
    first_bad_height,
    guarded_modes,
    prompts_product,
    weight_layout,
)
from headwater.mixers.numerics import MODES, Numerics
from headwater.mixers.products import TorchProduct, product_dtype
from headwater.mixers.quantised import Quantised, joined
from headwater.models.families import read_config
from headwater.models.packing import float8
from tests.engine.proof.test_selfcheck import CONFIG
from tests.processors import AMX, AVX2, AVX512, AVX512_BF16, pretend

HEIGHTS = (1, 2, 3, 4, 5, 6, 7, 8, 31, 32, 33, 64, 255, 256, 257, 300, 512)
HEIGHTS_OF_FORMS = (1, 7, 33, 257)  # of products with an activation or a factor
SIZES = ((64, 100), (256, 37), (130, 65), (1024, 512), (1536, 256), (3072, 128))
DTYPES = (torch.float32, torch.bfloat16)
GUARDED = ("compiled", "tiled")
GROUPED = ("float8", "int4", "int8", "nf4", "table")  # weights with scales of groups of inputs


@pytest.fixture(autouse=True, params=[None, AVX2], ids=["here", "avx2"])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs on this machine's processor, and as on one without bfloat16 products."""
    if request.param is not None:
        pretend(monkeypatch, request.param)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def quantised(n_out: int, n_in: int, bits: int = 4, groups: int = 2) -> Quantised:
    groups = 1 if n_in % (8 * groups) else groups
    codes = torch.randint(0, 1 << bits, (n_out, n_in), dtype=torch.uint8)
    zeros = torch.randint(0, 1 << bits, (n_out, groups), dtype=torch.uint8)
    return Quantised(codes, bits, random(n_out, groups).half(), zeros)


IQ4_NL = (1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241)  # plus 128
E2M1 = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)  # doubled, plus 12


def of_table(n_out: int, n_in: int, groups: int = 2, table: tuple[int, ...] = IQ4_NL, zero: int = 128) -> Quantised:
    plain = quantised(n_out, n_in, 4, groups)
    return replace(plain, zero_NX=torch.full((n_out, 1), zero, dtype=torch.uint8), table=table)


def in_float8(n_out: int, n_in: int, groups: int = 2, of_scales: torch.dtype = torch.float32) -> Quantised:
    """Any float8 numbers but NaN, with positive scales."""
    groups = 1 if n_in % (8 * groups) else groups
    code_NK = torch.randint(0, 256, (n_out, n_in), dtype=torch.uint8)
    code_NK[code_NK & 0x7F == 0x7F] = 0x80
    return float8(code_NK.view(torch.float8_e4m3fn), (random(n_out, groups).abs() / 256).to(of_scales))


def in_nf4(n_out: int, n_in: int, groups: int = 2, table: tuple[float, ...] = kernels.NF4) -> Quantised:
    plain = quantised(n_out, n_in, 4, groups)
    return replace(plain, zero_NX=plain.zero_NX[:, :1] * 0, scale_NX=plain.scale_NX.float(), table=table)


def unpacked(weight: Quantised) -> torch.Tensor:
    """The values of float8 weights in numpy: sign, exponent and mantissa, times the scale, rounded to float32; nf4."""
    if weight.table is not None:
        number_NK = np.array(weight.table, np.float32)[weight.code_NK]
        return torch.from_numpy(number_NK * weight.scale_NX.numpy().repeat(weight.group, 1))
    code_NK = weight.code_NK.view(torch.uint8).numpy().astype(np.int64)
    exponent_NK, mantissa_NK = code_NK >> 3 & 15, code_NK & 7
    normal_NK = np.ldexp(8 + mantissa_NK, exponent_NK - 10)
    number_NK = np.where(exponent_NK == 0, np.ldexp(mantissa_NK, -9), normal_NK) * np.where(code_NK >> 7, -1, 1)
    scale_NK = weight.scale_NX.float().numpy().repeat(weight.group, 1)
    return torch.from_numpy(number_NK.astype(np.float32) * scale_NK)


WEIGHTS = {
    "float32": lambda n_out, n_in: random(n_out, n_in),
    "bfloat16": lambda n_out, n_in: random(n_out, n_in, dtype=torch.bfloat16),
    "float16": lambda n_out, n_in: random(n_out, n_in, dtype=torch.float16),
    "float8": in_float8,
    "int4": quantised,
    "int8": lambda n_out, n_in: quantised(n_out, n_in, 8),
    "nf4": in_nf4,
    "table": of_table,
}


def values(weight: torch.Tensor | Quantised) -> torch.Tensor:
    return weight.values() if isinstance(weight, Quantised) else weight.float()


def rounded_product(weight: Quantised, x_RK: torch.Tensor) -> torch.Tensor:
    """The product with integers as `kernels/integers.py` defines it, in numpy, span by span."""
    group, n_groups = weight.group, weight.scale_NX.shape[1]
    span = next(n for n in range(min(group, 128), 0, -8) if group % n == 0)
    scale_NX, minimum_NX = weight.scales()
    x_RK, code_NK = x_RK.numpy(), weight.code_NK.numpy().astype(np.int64)
    code_NK = code_NK if weight.table is None else np.array(weight.table)[code_NK]
    zero_NX = weight.zero_NX.expand(-1, n_groups).numpy().astype(np.int64)
    y_RN = np.zeros((len(x_RK), len(code_NK)), np.float32)
    for first in range(0, x_RK.shape[1], span):
        at, g = slice(first, first + span), first // group
        largest_R = np.abs(x_RK[:, at]).max(1)
        codes_RS = np.rint(x_RK[:, at] * (np.float32(127) / largest_R)[:, None]).astype(np.int64)
        sums_RN = codes_RS @ (code_NK[:, at] - zero_NX[:, g, None]).T
        of_row_R1 = (largest_R * np.float32(1 / 127))[:, None]
        # in float64, rounded once: fused
        y_RN = np.float32(y_RN + sums_RN * np.float64(of_row_R1 * scale_NX[:, g].numpy()))
        if minimum_NX is not None:
            total_R1 = of_row_R1 * codes_RS.sum(1, keepdims=True).astype(np.float32)
            y_RN = np.float32(y_RN - np.float64(total_R1) * minimum_NX[:, g].numpy())
    return torch.from_numpy(y_RN)


def product(weight: torch.Tensor | Quantised, x_RK: torch.Tensor, mode: str) -> torch.Tensor:
    """The product in the dtype of x; with integers rows are rounded, except by torch."""
    if isinstance(weight, Quantised) and not weight.is_float and mode != "plain":
        return rounded_product(weight, x_RK.float()).to(x_RK.dtype)
    return x_RK @ values(weight).to(x_RK.dtype).T


def by_size() -> Iterator[ParameterSet]:
    """Yield products with one of two sizes each in `make test`, of which each kind, mode and dtype has all in turn."""
    here = [(None, torch.float32), (None, torch.bfloat16), (AVX2, torch.bfloat16)]  # in float32: `product_dtype`
    for mode, (processor, dtype), kind, size in itertools.product(GUARDED, here, WEIGHTS, SIZES):
        if size == (130, 65) and (mode == "tiled" or kind in GROUPED):
            continue  # torch's tiles and groups of integers need a multiple of 8
        turn = GUARDED.index(mode) + here.index((processor, dtype)) + [*WEIGHTS].index(kind)
        marks = [] if SIZES.index(size) % 3 == turn % 3 else [pytest.mark.full]
        name = f"{mode}-{'avx2' if processor else 'here'}-{dtype}-{kind}-{'x'.join(map(str, size))}"
        yield pytest.param(mode, processor, dtype, kind, size, marks=marks, id=name.replace("torch.", ""))


@pytest.mark.parametrize(("mode", "processor", "dtype", "kind", "size"), by_size(), indirect=["processor"])
def test_a_row_has_the_same_bits_at_every_height(
    mode: str, dtype: torch.dtype, kind: str, size: tuple[int, int]
) -> None:
    n_in, n_out = size
    linear = Linear(WEIGHTS[kind](n_out, n_in), numerics=Numerics(mode), dtype=dtype)
    x_RK = random(520, n_in, dtype=dtype)
    assert first_bad_height(answers_product(linear), x_RK, HEIGHTS) is None
    assert first_bad_height(prompts_product(linear), x_RK, HEIGHTS) is None
    for name in ("swish", "sigmoid"):
        assert first_bad_height(partial(getattr(linear, name), n_prefill=0), x_RK[:300], HEIGHTS_OF_FORMS) is None
    assert first_bad_height(lambda x: linear.times(x, linear(x, 0), 0), x_RK[:300], HEIGHTS_OF_FORMS) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_prompts_and_of_answers_have_the_same_bits_with_kernels(dtype: torch.dtype) -> None:
    pytest.importorskip("numba", reason="numba is not installed")
    linear, x_RK = Linear(random(100, 192), numerics=Numerics("compiled"), dtype=dtype), random(70, 192, dtype=dtype)
    alone_RN = torch.cat([linear(x_1K, 0) for x_1K in x_RK.split(1)])
    assert torch.equal(linear(x_RK, 70), alone_RN)
    assert torch.equal(linear(x_RK, 30), alone_RN)


@pytest.mark.pairs
@pytest.mark.parametrize("rows", [0, 1, 2, 40])
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("mode", MODES)
def test_activation_and_factor_are_right(mode: str, kind: str, rows: int) -> None:
    weight_NK, x_RK, factor_RN = WEIGHTS[kind](36, 48), random(rows, 48), random(rows, 36)
    linear = Linear(weight_NK, numerics=Numerics(mode), dtype=torch.float32)
    wanted_RN = product(weight_NK, x_RK.double(), mode)
    near = {"atol": 1e-4 * max(1.0, float(values(weight_NK).abs().max())), "rtol": 1e-5}
    assert torch.allclose(linear.swish(x_RK, 0).double(), torch.nn.functional.silu(wanted_RN), **near)
    assert torch.allclose(linear.sigmoid(x_RK, 0).double(), torch.sigmoid(wanted_RN), **near)
    assert torch.allclose(linear.times(x_RK, factor_RN, 0).double(), wanted_RN * factor_RN, **near)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_the_product_is_right_at_every_split_between_prefill_and_decode(mode: str, dtype: torch.dtype) -> None:
    weight_NK, bias_N, x_RK = random(36, 48, dtype=dtype), random(36, dtype=dtype), random(300, 48, dtype=dtype)
    wanted_RN = x_RK.double() @ weight_NK.double().T + bias_N.double()
    linear = Linear(weight_NK, bias_N, Numerics(mode))
    for n_prefill in (0, 1, 256, 257, 300):
        got_RN = linear(x_RK, n_prefill)
        assert got_RN.dtype == dtype
        assert torch.allclose(got_RN.double(), wanted_RN, atol=1e-4 if dtype == torch.float32 else 0.3)
    assert linear(x_RK[:0], 0).shape == (0, 36)


@pytest.mark.parametrize("mode", GUARDED)
def test_weights_of_several_formats_stand_side_by_side(mode: str) -> None:
    heights = {"int4": 48, "bfloat16": 20, "int8": 4, "float8": 37, "float32": 64}
    parts = [WEIGHTS[kind](n_out, 64) for kind, n_out in heights.items()]
    bias_N, x_RK = random(173), random(9, 64)
    linear = Linear(parts, bias_N, Numerics(mode), torch.float32)
    apart_RN = [
        Linear(part, of_N, Numerics(mode), torch.float32)(x_RK, 0)
        for part, of_N in zip(parts, bias_N.split([*heights.values()]), strict=True)
    ]
    assert torch.equal(linear(x_RK, 0), torch.cat(apart_RN, 1))
    factor_RN = random(9, 173)
    assert torch.equal(linear.times(x_RK, factor_RN, 0), torch.cat(apart_RN, 1) * factor_RN)


@pytest.mark.pairs
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("mode", MODES)
def test_product_of_only_the_last_outputs_has_the_same_bits(
    mode: str, kind: str, dtype: torch.dtype, rows: int
) -> None:
    bias_N, x_RK = random(200), random(rows, 64, dtype=dtype)
    whole = Linear(WEIGHTS[kind](200, 64), bias_N.to(dtype), Numerics(mode), dtype)
    for first in (0, 64, 128):
        rest = whole.outputs_from(first)
        assert rest.n_out == 200 - first
        near = 0.1 if mode == "plain" else 0.0  # without a guard torch may sum a wider product in another order
        assert torch.allclose(rest(x_RK, 0).float(), whole(x_RK, 0)[:, first:].float(), rtol=0, atol=near)
        index_R = torch.tensor([3, 0, 71])
        assert torch.equal(rest.rows(index_R), whole.rows(index_R + first))
    assert whole.n_out == 200


def test_the_last_of_several_weights_begin_where_one_does_or_a_panel() -> None:
    parts, x_RK = [WEIGHTS["int8"](100, 64), WEIGHTS["float32"](130, 64)], random(3, 64)
    whole = Linear(parts, numerics=Numerics("tiled"), dtype=torch.float32)
    for first in (64, 100, 164):
        assert torch.equal(whole.outputs_from(first)(x_RK, 0), whole(x_RK, 0)[:, first:])
    with pytest.raises(ValueError, match="outputs from 101 on: must be a multiple of 64"):
        whole.outputs_from(101)


@pytest.mark.parametrize("rows", [1, 6, 7, 300])
def test_weights_in_bfloat16_give_the_bits_of_their_float32_copies(rows: int) -> None:
    for n_in, n_out in SIZES:
        weight_NK, x_RK = random(n_out, n_in, dtype=torch.bfloat16), random(rows, n_in)
        as_held = Linear(weight_NK, dtype=torch.float32)
        assert torch.equal(as_held(x_RK, 0), Linear(weight_NK.float())(x_RK, 0))


FLOATS = {
    "blocks": lambda: in_float8(130, 512, 4),
    "small groups": lambda: in_float8(64, 264, 33),
    "a scale an output, odd outputs": lambda: in_float8(37, 72, 1),
    "scales of 16 bits": lambda: in_float8(70, 256, 2, torch.bfloat16),
    "nf4": lambda: in_nf4(130, 512, 8),
    "fp4": lambda: in_nf4(130, 512, 8, kernels.FP4),
}


@pytest.mark.parametrize("form", FLOATS)
def test_values_of_floats_are_those_of_the_reference(form: str) -> None:
    weight = FLOATS[form]()
    wanted_NK, row_R = unpacked(weight), torch.tensor([5, 0, 36, 5])
    assert torch.equal(weight.values(), wanted_NK)
    assert torch.equal(Linear(weight, numerics=Numerics("compiled")).rows(row_R), wanted_NK[row_R])
    some = joined([weight.rows(row_R), weight.rows(slice(1, 3))])
    assert torch.equal(some.values(), torch.cat([wanted_NK[row_R], wanted_NK[1:3]]))


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7, 65])
@pytest.mark.parametrize("form", FLOATS)
def test_floats_give_the_bits_of_their_values(form: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 on any processor; in bfloat16, too, by its dot product if it has one: values are rounded to it."""
    amx = pytest.importorskip("headwater.kernels.amx", reason="numba is not installed")
    monkeypatch.setattr(amx, "usable", lambda: False)
    weight = FLOATS[form]()
    value_NK, x_RK = unpacked(weight), random(rows, weight.shape[1])
    assert torch.equal(Linear(weight, numerics=Numerics("compiled"))(x_RK, 0), Linear(value_NK)(x_RK, 0))
    x_RK = x_RK.bfloat16()
    if product_dtype(torch.bfloat16) == torch.bfloat16:
        wanted_RN = Linear(value_NK.bfloat16(), numerics=Numerics("compiled"), dtype=torch.bfloat16)(x_RK, 0)
    else:
        wanted_RN = Linear(value_NK, numerics=Numerics("compiled"), dtype=torch.bfloat16)(x_RK, 0)
    assert torch.equal(Linear(weight, numerics=Numerics("compiled"), dtype=torch.bfloat16)(x_RK, 0), wanted_RN)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 6, 7, 65])
@pytest.mark.parametrize("kind", [in_float8, in_nf4])
def test_rows_of_floats_do_not_depend_on_other_rows_or_threads(kind: Any, rows: int, dtype: torch.dtype) -> None:
    compiling = pytest.importorskip("headwater.kernels.compiling", reason="numba is not installed")
    linear = Linear(kind(200, 256, 2), numerics=Numerics("compiled"), dtype=dtype)
    x_RK = random(rows, 256, dtype=dtype)
    beside = x_RK.clone()
    beside[1:] = torch.nan
    alone_RN, before = linear(x_RK, 0), compiling.threads_in_use()
    assert torch.equal(linear(beside, 0)[0], alone_RN[0])
    try:
        for threads in (1, 2):
            compiling.use_threads(threads)
            assert torch.equal(linear(x_RK, 0), alone_RN)
            assert torch.equal(linear(x_RK.flip(0), 0).flip(0), alone_RN)
    finally:
        compiling.use_threads(before)


@pytest.mark.parametrize(("kind", "n_bytes"), [(in_float8, 1), (in_nf4, 0.5)])
def test_floats_take_their_bytes_and_those_of_scales(kind: Any, n_bytes: float) -> None:
    panels = pytest.importorskip("headwater.mixers.panels", reason="numba is not installed")
    for dtype in DTYPES:
        codes, scales, n_groups = panels.held(kind(128, 512, 4), dtype).arrays
        assert (codes.nbytes, scales.nbytes, n_groups) == (n_bytes * 128 * 512, 4 * 128 * 4, 4)


@pytest.mark.pairs
@pytest.mark.parametrize("rows", [1, 2, 7, 65])
@pytest.mark.parametrize("bits", [2, 4, 5, 6, 8])
def test_integers_give_the_bits_of_the_reference(bits: int, rows: int) -> None:
    """With scales of groups, of groups of groups, with minimums, and one zero for a whole row."""
    plain = quantised(70, 512, bits, groups=16)
    inner = torch.randint(0, 64, (70, 16), dtype=torch.uint8)
    outer = {"outer_scale_NS": random(70, 2).half(), "outer_minimum_NS": random(70, 2).half()}
    of_row = torch.full((70, 1), 1 << bits - 1, dtype=torch.uint8)
    kinds = (
        plain,
        quantised(70, 512, bits, groups=64),
        Quantised(plain.code_NK, bits, random(70, 1).bfloat16(), of_row),
        Quantised(plain.code_NK, bits, random(70, 16), plain.zero_NX, minimum_NX=random(70, 16)),
        Quantised(plain.code_NK, bits, inner, of_row, minimum_NX=inner.flip(0), **outer),
    )
    x_RK = random(rows, 512)
    for weight in kinds:
        linear = Linear(weight, numerics=Numerics("compiled"))
        assert torch.equal(linear(x_RK, 0), rounded_product(weight, x_RK))
        assert torch.equal(linear.rows(torch.tensor([69, 3, 69])), weight.values()[[69, 3, 69]])
    largest = Quantised(torch.full_like(plain.code_NK, (1 << bits) - 1), bits, random(70, 16), of_row)
    for x_RK in torch.ones(rows, 512), -torch.ones(rows, 512):  # each product is the largest that is possible
        assert torch.equal(Linear(largest, numerics=Numerics("compiled"))(x_RK, 0), rounded_product(largest, x_RK))
    x_RK = random(rows, 512)
    in_bfloat16 = Linear(plain, numerics=Numerics("compiled"), dtype=torch.bfloat16)(x_RK.bfloat16(), 0)
    assert torch.equal(in_bfloat16, rounded_product(plain, x_RK.bfloat16().float()).bfloat16())


@pytest.mark.pairs
@pytest.mark.parametrize("rows", [1, 2, 7, 65])
@pytest.mark.parametrize("groups", [2, 16, 32])
def test_codes_of_a_table_give_the_bits_of_the_reference(groups: int, rows: int) -> None:
    """With float16 scales of groups, powers of two (MXFP4), float8 with one for a row (NVFP4), and nested (IQ4_XS)."""
    plain, mx = of_table(70, 512, groups), of_table(70, 512, groups, E2M1, 12)
    of_bytes, of_row = (random(70, groups) * 100).to(torch.int8), {"outer_scale_NS": random(70, 1)}
    powers = torch.exp2(random(70, groups).mul(4).round()).bfloat16()
    kinds = (
        plain,
        replace(mx, scale_NX=powers),
        replace(mx, scale_NX=random(70, groups).to(torch.float8_e4m3fn), **of_row),
        replace(plain, scale_NX=of_bytes, outer_scale_NS=random(70, 2).half()),
    )
    x_RK = random(rows, 512)
    for weight in kinds:
        linear = Linear(weight, numerics=Numerics("compiled"))
        assert torch.equal(linear(x_RK, 0), rounded_product(weight, x_RK))
        assert torch.equal(linear.rows(torch.tensor([69, 3])), weight.values()[[69, 3]])


@pytest.mark.parametrize("value", [0.0, 1e-38, 1e-20, 1e20])
def test_rows_of_any_size_are_rounded(value: float) -> None:
    """Below 1e-30 a span counts as zeros."""
    weight = quantised(70, 128, 8)
    x_RK = value * random(3, 128)
    wanted = (x_RK if value > 1e-30 else 0 * x_RK).double() @ weight.values().double().T
    torch.testing.assert_close(Linear(weight)(x_RK, 0).double(), wanted, rtol=0, atol=0.02 * float(wanted.abs().max()))


def test_tiles_have_one_height_for_prefill_and_one_for_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    heights, product = [], TorchProduct.__call__
    monkeypatch.setattr(TorchProduct, "__call__", lambda self, x, *a: heights.append(len(x)) or product(self, x, *a))
    Linear(random(8, 16), numerics=Numerics("tiled"))(random(300, 16), 260)
    assert heights == [256, 256, 32, 32]


def test_prefill_rows_do_not_depend_on_decoding_rows() -> None:
    x_RK, linear = random(300, 64), Linear(random(48, 64), numerics=Numerics("tiled"))
    alone_RN = linear(x_RK[:200], 200)
    for n_decode in (1, 32, 100):
        assert torch.equal(linear(x_RK[: 200 + n_decode], 200)[:200], alone_RN)


def test_first_bad_height_finds_a_product_that_depends_on_its_height() -> None:
    def odd_heights_differ(x_RK: torch.Tensor) -> torch.Tensor:
        return x_RK + (len(x_RK) % 2) * 1e-6

    assert first_bad_height(odd_heights_differ, random(64, 4), (2, 4, 6, 7, 8)) == 7
    assert first_bad_height(lambda x_RK: x_RK * 2, random(64, 4), (1, 2, 7)) is None


@pytest.mark.pairs
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("mode", MODES)
def test_a_product_keeps_no_view_of_the_callers_weight(mode: str, kind: str) -> None:
    panels_as_they_are = ((8, 64),) if kind in GROUPED else ((1, 64), (2, 64))
    for n_in, n_out in ((16, 16), *panels_as_they_are):
        weight = WEIGHTS[kind](n_out, n_in)
        linear, x_RK = Linear(weight, numerics=Numerics(mode), dtype=torch.float32), random(4, n_in)
        before_RN = linear(x_RK, 0)
        for part in [weight] if isinstance(weight, torch.Tensor) else [part for _, part in weight.parts()]:
            part.view(torch.uint8).zero_()
        assert torch.equal(linear(x_RK, 0), before_RN)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_panels_are_held_without_the_weight_that_they_were_made_of(kind: str) -> None:
    pytest.importorskip("numba", reason="numba is not installed")
    weight = WEIGHTS[kind](130, 64)
    tensors = [weight] if isinstance(weight, torch.Tensor) else [part for _, part in weight.parts()]
    given = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
    expected, linear = values(weight)[[2, 100]], Linear(weight, numerics=Numerics("compiled"), dtype=torch.float32)
    del weight, tensors
    assert all(storage.expired() for storage in given)
    assert torch.equal(linear.rows(torch.tensor([2, 100])), expected)


@pytest.mark.pairs
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("mode", MODES)
def test_a_tied_head_and_its_embedding_are_one_weight(mode: str, kind: str) -> None:
    table_VD = WEIGHTS[kind](50, 16)
    head = Linear(table_VD, numerics=Numerics(mode), dtype=torch.float32)
    embedding = Embedding(head, torch.float32)
    assert embedding._held is head
    token_N = torch.tensor([49, 3, 7, 3])
    assert torch.equal(embedding(token_N), values(table_VD)[token_N])
    wanted_RN = product(table_VD, values(table_VD)[token_N], mode)
    torch.testing.assert_close(head(embedding(token_N), 0), wanted_RN)


def test_an_embedding_reads_rows_in_the_computing_dtype() -> None:
    table_VD = random(50, 16, dtype=torch.bfloat16)
    rows_ND = Embedding(table_VD, torch.float32)(torch.tensor([49, 0, 49]))
    assert torch.equal(rows_ND, table_VD[[49, 0, 49]].float())


@pytest.mark.parametrize("mode", GUARDED)
@pytest.mark.parametrize("cpu", [AVX2, AVX512])
def test_without_bfloat16_products_sums_are_made_in_float32_and_rounded_once(monkeypatch, cpu, mode) -> None:
    pretend(monkeypatch, cpu)
    weight_NK, x_RK = random(36, 48, dtype=torch.bfloat16), random(9, 48, dtype=torch.bfloat16)
    linear = Linear(weight_NK, random(36, dtype=torch.bfloat16), Numerics(mode))
    wide = Linear(weight_NK.float(), random(36, dtype=torch.bfloat16).float(), Numerics(mode))
    assert torch.equal(linear(x_RK, 0), wide(x_RK.float(), 0).bfloat16())


def test_torch_converts_a_block_of_outputs_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x_RK, bias_N = quantised(100, 64), random(5, 64), random(100)
    whole_RN = Linear(weight, bias_N, Numerics("plain"))(x_RK, 0)
    monkeypatch.setattr(products, "CONVERTED_BYTES", 7 * 4 * 64)
    heights, rows = [], Quantised.rows
    monkeypatch.setattr(Quantised, "rows", lambda self, at: heights.append(at.stop - at.start) or rows(self, at))
    in_blocks_RN = Linear(weight, bias_N, Numerics("plain"))(x_RK, 0)
    torch.testing.assert_close(in_blocks_RN, whole_RN, rtol=1e-5, atol=1e-3)
    assert set(heights) == {7}


@pytest.mark.parametrize(
    ("cpu", "dtype", "wanted", "kernel"),
    [
        (AVX2, torch.bfloat16, torch.float32, "multiply"),
        (AVX512_BF16, torch.bfloat16, torch.bfloat16, "multiply"),
        (AVX2, torch.float32, torch.float32, "multiply"),
        (AMX, torch.float32, torch.float32, "multiply"),
        (AMX, torch.bfloat16, torch.bfloat16, "multiply_by_amx"),
    ],
)
def test_products_by_processor(monkeypatch, cpu, dtype, wanted, kernel) -> None:
    panels = pytest.importorskip("headwater.mixers.panels", reason="numba is not installed")
    monkeypatch.setattr(products.machine, "cpu", lambda: cpu)
    assert product_dtype(dtype) == wanted
    assert panels.held(random(64, 96, dtype=dtype), dtype).few is getattr(panels, kernel)
    assert panels.held(random(64, 90, dtype=dtype), dtype).few is panels.multiply  # no whole runs of 32 inputs
    assert guarded_modes() == ("compiled", "tiled")
    assert weight_layout("compiled") == "panels of 64 outputs"


@pytest.mark.skipif("amx_bf16" not in machine.cpu().features, reason="the processor has no AMX")
@pytest.mark.parametrize(("n_out", "n_in"), [(37, 32), (64, 96), (200, 1056)])
def test_tiles_of_amx_of_all_heights_give_the_same_bits(n_out: int, n_in: int) -> None:
    """Few rows and many, a tile's rest and none, one group of 256 rows and several, among rows of NaN."""
    weight_NK, x_RK = random(n_out, n_in, dtype=torch.bfloat16), random(600, n_in, dtype=torch.bfloat16)
    multiply = answers_product(Linear(weight_NK, random(n_out), Numerics("compiled"), torch.bfloat16))
    whole_RN, beside_RK = multiply(x_RK), x_RK.clone()
    wanted_RN = x_RK.double() @ weight_NK.double().T + random(n_out).double()
    assert (whole_RN - wanted_RN).abs().max() <= 0.01 * wanted_RN.abs().max()
    for rows in (*range(1, 66), 255, 256, 257, 289, 511, 512, 513):
        assert torch.equal(multiply(x_RK[:rows]), whole_RN[:rows]), rows
        assert torch.equal(multiply(x_RK[-rows:]), whole_RN[-rows:]), rows
    beside_RK[1::2] = torch.nan
    assert torch.equal(multiply(beside_RK)[::2], whole_RN[::2])


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="'fast' is none of compiled, tiled, plain"):
        Numerics("fast")


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine on which numba is not installed."""
    monkeypatch.setattr(kernels, "available", lambda: False)
    return


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_kernels_torch_multiplies_every_format_in_tiles(dtype, kind, without_kernels) -> None:
    weight, x_RK = WEIGHTS[kind](37, 64), random(300, 64, dtype=dtype)
    linear, tiled = (Linear(weight, numerics=Numerics(mode), dtype=dtype) for mode in GUARDED)
    for name in ("__call__", "swish", "sigmoid"):
        assert torch.equal(getattr(linear, name)(x_RK, 7), getattr(tiled, name)(x_RK, 7))
    assert first_bad_height(answers_product(linear), x_RK, (1, 2, 7, 33, 256)) is None


def test_without_kernels_the_self_check_takes_tiles(without_kernels: None) -> None:
    assert guarded_modes() == ("tiled",)
    check = selfcheck.self_check(read_config(CONFIG, "float32"))
    assert (check.deterministic, check.mode) == (True, "tiled")
