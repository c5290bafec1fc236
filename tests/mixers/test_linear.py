"""Products whose rows do not depend on how many there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from headwater import machine
from headwater.engine import selfcheck
from headwater.mixers import linear as linear_module
from headwater.mixers.batch import batch_height
from headwater.mixers.linear import (
    Embedding,
    Linear,
    first_bad_height,
    guarded_modes,
    product_dtype,
    weight_layout,
)
from headwater.mixers.numerics import MODES, Numerics, current, use
from headwater.models.families import read_config
from tests.engine.test_selfcheck import CONFIG
from tests.processors import AVX2, AVX512, AVX512_BF16, pretend

HEIGHTS = (1, 2, 3, 4, 5, 7, 8, 31, 32, 33, 64, 255, 256, 257, 300, 512)
SIZES = ((64, 100), (256, 37), (1024, 512), (1536, 256), (3072, 128))
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True, params=[None, AVX2], ids=["here", "avx2"])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs on this machine's processor, and as on one without bfloat16 products."""
    if request.param is not None:
        pretend(monkeypatch, request.param)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def held(product: Callable[[torch.Tensor], torch.Tensor], x_RK: torch.Tensor, mode: str) -> bool:
    """Whether a row has the same bits at every height.

    With AMX, oneDNN takes other kernels for other heights of a packed bfloat16 product (decision 001). Then a height
    that the self-check tries must show it, so that a server takes tiles.
    """
    bad = first_bad_height(product, x_RK, HEIGHTS)
    if bad is not None and mode == "packed" and x_RK.dtype == torch.bfloat16 and "amx_tile" in machine.cpu().features:
        assert first_bad_height(product, x_RK, tuple(h for h in selfcheck.HEIGHTS if h <= len(x_RK))) is not None
        return False
    assert bad is None, f"{bad} rows"
    return True


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["packed", "tiled"])
def test_a_row_has_the_same_bits_at_every_height(mode: str, dtype: torch.dtype, shared: bool) -> None:
    for n_in, n_out in SIZES:
        linear = Linear(random(n_out, n_in, dtype=dtype), numerics=Numerics(mode), shared=shared)
        assert held(linear, random(600, n_in, dtype=dtype), mode) or mode == "packed"


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["packed", "tiled"])
def test_activation_and_factor_keep_a_rows_bits_at_every_height(mode: str, dtype: torch.dtype, shared: bool) -> None:
    for n_in, n_out in SIZES:
        linear = Linear(random(n_out, n_in, dtype=dtype), numerics=Numerics(mode), shared=shared)
        x_RK = random(600, n_in, dtype=dtype)
        for product in (linear.swish, linear.sigmoid, lambda x: linear.times(x, linear(x))):  # noqa: B023
            assert held(product, x_RK, mode) or mode == "packed"


@pytest.mark.parametrize("rows", [0, 1, 2, 40])
@pytest.mark.parametrize("mode", MODES)
def test_activation_and_factor_are_right(mode: str, rows: int) -> None:
    linear, x_RK, factor_RN = Linear(random(36, 48), numerics=Numerics(mode)), random(rows, 48), random(rows, 36)
    wanted_RN = x_RK.double() @ random(36, 48).double().T
    assert torch.allclose(linear.swish(x_RK).double(), torch.nn.functional.silu(wanted_RN), atol=1e-4)
    assert torch.allclose(linear.sigmoid(x_RK).double(), torch.sigmoid(wanted_RN), atol=1e-4)
    assert torch.allclose(linear.times(x_RK, factor_RN).double(), wanted_RN * factor_RN, atol=1e-4)


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
    assert linear(x_RK[:0]).shape == (0, 36)


def test_tiles_have_one_height_for_prefill_and_one_for_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, heights = Linear(random(8, 16), numerics=Numerics("tiled")), []
    product = linear._product
    monkeypatch.setattr(linear, "_product", lambda x_RK: heights.append(len(x_RK)) or product(x_RK))
    linear(random(300, 16), 260)
    assert heights == [256, 256, 32, 32]


def test_prefill_rows_do_not_depend_on_what_decodes_beside_them() -> None:
    x_RK, linear = random(300, 64), Linear(random(48, 64), numerics=Numerics("tiled"))
    alone_RN = linear(x_RK[:200], 200)
    for n_decode in (1, 32, 100):
        assert torch.equal(linear(x_RK[: 200 + n_decode], 200)[:200], alone_RN)


def test_first_bad_height_finds_a_product_that_depends_on_its_height() -> None:
    def odd_heights_differ(x_RK: torch.Tensor) -> torch.Tensor:
        return x_RK + (len(x_RK) % 2) * 1e-6

    assert first_bad_height(odd_heights_differ, random(64, 4), (2, 4, 6, 7, 8)) == 7
    assert first_bad_height(lambda x_RK: x_RK * 2, random(64, 4), (1, 2, 7)) is None


def test_packing_keeps_no_view_of_the_callers_weight() -> None:
    weight_NK = random(16, 16)
    linear, x_RK = Linear(weight_NK, numerics=Numerics("packed")), random(4, 16)
    before_RN = linear(x_RK)
    weight_NK.zero_()
    assert torch.equal(linear(x_RK), before_RN)


@pytest.mark.parametrize("mode", MODES)
def test_a_tied_head_shares_the_embeddings_memory(mode: str) -> None:
    table_VD = random(50, 16)
    embedding = Embedding(table_VD)
    before = current()
    use(Numerics(mode))
    head = embedding.head()
    use(before)
    assert head._weight.data_ptr() == table_VD.data_ptr()
    assert torch.allclose(head(embedding(torch.tensor([3, 7]))), table_VD[[3, 7]] @ table_VD.T, atol=1e-4)


def test_an_embedding_reads_rows_in_the_computing_dtype() -> None:
    table_VD = random(50, 16, dtype=torch.bfloat16)
    rows_ND = Embedding(table_VD, torch.float32)(torch.tensor([49, 0, 49]))
    assert torch.equal(rows_ND, table_VD[[49, 0, 49]].float())


@pytest.mark.parametrize("cpu", [AVX2, AVX512])
def test_without_bfloat16_products_sums_are_made_in_float32_and_rounded_once(monkeypatch, cpu) -> None:
    pretend(monkeypatch, cpu)
    weight_NK, x_RK = random(36, 48, dtype=torch.bfloat16), random(9, 48, dtype=torch.bfloat16)
    for shared in (False, True):
        linear = Linear(weight_NK, random(36, dtype=torch.bfloat16), Numerics("packed"), shared)
        wide = Linear(weight_NK.float(), random(36, dtype=torch.bfloat16).float(), Numerics("packed"))
        assert torch.equal(linear(x_RK), wide(x_RK.float()).bfloat16())
        assert torch.equal(linear.swish(x_RK), wide.swish(x_RK.float()).bfloat16())
        factor_RN = random(9, 36, dtype=torch.bfloat16)
        assert torch.equal(linear.times(x_RK, factor_RN), wide.times(x_RK.float(), factor_RN.float()).bfloat16())


@pytest.mark.parametrize(
    ("cpu", "dtype", "wanted", "layout"),
    [
        (AVX2, torch.bfloat16, torch.float32, "packed float32 copies of bfloat16"),
        (AVX512, torch.bfloat16, torch.float32, "packed float32 copies of bfloat16"),
        (AVX512_BF16, torch.bfloat16, torch.bfloat16, "packed bfloat16"),
        (AVX2, torch.float32, torch.float32, "packed float32"),
    ],
)
def test_the_layout_of_weights_by_processor(monkeypatch, cpu, dtype, wanted, layout) -> None:
    pretend(monkeypatch, cpu)
    assert product_dtype(dtype) == wanted
    assert weight_layout("packed", dtype) == layout


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="'fast' is none of packed, tiled, plain"):
        Numerics("fast")


def test_steps_are_filled_up_to_few_heights_and_by_little():
    heights = {batch_height(n, 4) for n in range(1, 1025)}
    assert len(heights) <= 50
    assert all(0 <= batch_height(n, 4) - n <= max(7, n / 8) for n in range(1, 1025))
    assert [batch_height(n, 1) for n in (1, 65, 300)] == [1, 65, 300]


@pytest.fixture
def without_packing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A torch whose private operations are gone."""
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    linear_module._packs.cache_clear()
    yield
    linear_module._packs.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_torchs_private_operations_products_are_tiled_with_one_warning(
    dtype: torch.dtype, without_packing: None, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        linear, x_RK = Linear(random(37, 64, dtype=dtype), numerics=Numerics("packed")), random(300, 64, dtype=dtype)
        assert linear.numerics.mode == "tiled"
        tiled = Linear(random(37, 64, dtype=dtype), numerics=Numerics("tiled"))
        for name in ("__call__", "swish", "sigmoid"):
            assert torch.equal(getattr(linear, name)(x_RK, 7), getattr(tiled, name)(x_RK, 7))
        assert first_bad_height(linear, x_RK, (1, 2, 7, 33, 256)) is None
    (warning,) = caplog.messages
    assert warning.startswith(f"torch {torch.__version__} has no products with packed weights, so they are tiled: ")


def test_without_torchs_private_operations_the_self_check_takes_tiles(without_packing: None) -> None:
    assert guarded_modes() == ("tiled",)
    check = selfcheck.self_check(read_config(CONFIG, "float32"))
    assert (check.deterministic, check.mode) == (True, "tiled")


def test_an_operation_that_takes_other_arguments_counts_as_missing(
    without_packing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", lambda weight_NK: weight_NK, raising=False)
    assert guarded_modes() == ("tiled",)
