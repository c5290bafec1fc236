"""Vectors of kernels: each operation against torch's, and bits that depend only on a lane's own input."""

import pytest
import torch

pytest.importorskip("numba", reason="numba is not installed")

from numba import njit
from numba.core import event

from headwater.kernels import functions, vectors
from headwater.kernels.compiling import OPTIONS, part
from headwater.kernels.recording import flat

LANES = vectors.LANES
called = njit(**OPTIONS)  # as a part, but called from Python


def apply_of(operation):
    @called
    def apply(x, y):
        for i in range(0, len(x), LANES):
            vectors.store(y, i, operation(vectors.load(x, i)))

    return apply


def filled_with(reduction):
    return part(lambda vector: vectors.fill(reduction(vector)))


def applied(operation, x, dtype=torch.float32):
    y = torch.empty(x.shape, dtype=dtype)
    apply_of(operation)(flat(x), flat(y))
    return y


@pytest.mark.parametrize(
    ("operation", "of_torch", "relative"),
    [
        (functions.exp, torch.exp, 2e-7),
        (functions.sigmoid, torch.sigmoid, 4e-7),
        (functions.silu, torch.nn.functional.silu, 4e-7),
        (functions.softplus, torch.nn.functional.softplus, 4e-7),
        (vectors.square_root, torch.sqrt, 1e-7),
    ],
)
def test_functions_are_as_exact_as_float32_allows(operation, of_torch, relative):
    x = torch.linspace(-80, 80, 160_000)
    x = x.abs() if of_torch is torch.sqrt else x
    exact = of_torch(x.double())
    error = (applied(operation, x).double() - exact).abs() / exact.abs().clamp_min(1e-30)
    assert error.max() < relative


@pytest.mark.parametrize("value", [-torch.inf, -1e30, -200.0, 200.0, 1e30, torch.inf])
def test_exponentials_of_large_numbers_end_at_the_range(value):
    y = applied(functions.exp, torch.full((LANES,), value))
    end = torch.tensor(functions.EXP_RANGE if value > 0 else -functions.EXP_RANGE).exp()
    assert torch.isfinite(y).all()
    torch.testing.assert_close(y, end.expand(LANES), rtol=1e-6, atol=0)


def test_a_lane_has_the_same_bits_wherever_it_is():
    x = torch.randn(4 * LANES)
    for operation in (functions.exp, functions.sigmoid, functions.softplus):
        straight = applied(operation, x)
        assert torch.equal(applied(operation, x.flip(0)).flip(0), straight)


def test_lanes_are_summed_as_a_tree():
    x = torch.randn(LANES)
    halves = x
    while len(halves) > 1:
        n = len(halves) // 2
        halves = halves[:n] + halves[n:]
    assert torch.equal(applied(filled_with(vectors.sum_lanes), x), halves.expand(LANES))
    assert torch.equal(applied(filled_with(vectors.max_lanes), x), x.max().expand(LANES))


def test_bfloat16_is_rounded_to_the_nearest_with_ties_to_even():
    bits = torch.randint(-(2**31), 2**31 - 1, (100_000,), dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32)
    x = torch.where(x.isfinite(), x, 1.0)
    ties = (torch.arange(0x3F80, 0x4F80, dtype=torch.int32) << 16 | 0x8000).view(torch.float32)
    x = torch.cat([x, ties])[: (len(x) + len(ties)) // LANES * LANES]
    assert torch.equal(applied(part(lambda v: v), x, torch.bfloat16), x.bfloat16())
    y = torch.empty_like(x)
    apply_of(part(lambda v: v))(flat(x.bfloat16()), flat(y))
    assert torch.equal(y, x.bfloat16().float())


def test_a_strided_tensor_is_read_from_its_first_element_on():
    x = torch.arange(5 * 64, dtype=torch.float32).view(5, 64)
    assert flat(x[1:3, 16:32]).tolist() == list(range(64 + 16, 64 + 16 + 64 + 16))
    assert flat(x[:0]).size == 0


def test_an_element_is_spread_over_all_lanes():
    spread = called(lambda x, y, i: vectors.store(y, 0, vectors.spread(x, i)))
    x, y = torch.randn(5), torch.empty(LANES)
    for of in (x, x.bfloat16()):
        spread(flat(of), flat(y), 3)
        assert torch.equal(y, of[3].float().expand(LANES))


@pytest.mark.parametrize("n", [1, 7, 15, 16, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_some_elements_are_read_and_written_and_no_others(n, dtype):
    @called
    def copy(x, y, n):
        vectors.store_some(y, 1, vectors.load_some(x, 2, n), n)

    x, y = torch.randn(2 + min(n, LANES)).to(dtype), torch.full((40,), torch.nan, dtype=dtype)
    copy(flat(x), flat(y), n)
    written = slice(1, 1 + min(n, LANES))
    assert torch.equal(y[written], x[2:])
    assert y.isnan().sum() == 40 - min(n, LANES)


def test_lanes_without_an_element_are_zeros():
    y = torch.empty(LANES)
    called(lambda x, y: vectors.store(y, 0, vectors.load_some(x, 0, 3)))(flat(torch.ones(3)), flat(y))
    assert y.tolist() == [1.0] * 3 + [0.0] * 13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triples_are_split_and_joined(dtype):
    @called
    def apart(x, y):
        a, b, c = vectors.load_triples(x, 2)
        vectors.store(y, 0, a)
        vectors.store(y, LANES, b)
        vectors.store(y, 2 * LANES, c)

    @called
    def together(y, x):
        a, b, c = vectors.load(y, 0), vectors.load(y, LANES), vectors.load(y, 2 * LANES)
        vectors.store_triples(x, 2, a, b, c)

    x, y, z = torch.randn(2 + 3 * LANES).to(dtype), torch.empty(3 * LANES), torch.zeros(3 + 3 * LANES, dtype=dtype)
    apart(flat(x), flat(y))
    assert torch.equal(y.view(3, LANES), x[2:].view(LANES, 3).T.float())
    together(flat(y), flat(z))
    assert torch.equal(z[2:-1], x[2:])
    assert z[[0, 1, -1]].tolist() == [0, 0, 0]


def test_operator_is_one_instruction_and_part_has_no_code_for_python(monkeypatch):
    seen = []
    listener = event.RecordingListener()
    monkeypatch.setattr(listener, "on_start", lambda of: seen.append(of.data["dispatcher"].py_func.__name__))
    combine = part(lambda a, b: a * b + a / b - b)

    @called
    def combine_into(x, y, out):
        vectors.store(out, 0, combine(vectors.load(x, 0), vectors.load(y, 0)))

    x, y, out = torch.randn(LANES), torch.rand(LANES) + 1, torch.empty(LANES)
    with event.install_listener("numba:compile", listener):
        combine_into(flat(x), flat(y), flat(out))
    assert torch.equal(out, x * y + x / y - y)
    assert seen == ["combine_into", "<lambda>"]
    (code,) = combine.inspect_llvm().values()
    assert "cpython" not in code
    assert "cfunc" not in code
