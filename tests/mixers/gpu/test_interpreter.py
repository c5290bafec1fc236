"""The product of Triton's interpreter in tests, `tests.interpreter`: rows as on a card, whatever NumPy's BLAS does."""

import subprocess
import sys
from ast import literal_eval

import numpy as np
import pytest

pytest.importorskip("triton", reason="no Triton here: it comes with the test extra")

from tests import interpreter, processors

SHAPES = [(16, 64, 32), (32, 130, 48), (64, 33, 16)]


def heights_with_other_rows(multiply) -> list[tuple[int, ...]]:
    """Return shapes and heights for which the first rows of a product are not those of the whole one."""
    random, found = np.random.default_rng(0), []
    for rows, width, columns in SHAPES:
        x_RK, w_KN = (random.standard_normal(shape, dtype=np.float32) for shape in ((rows, width), (width, columns)))
        whole_RN = multiply(x_RK, w_KN, np.float32)
        np.testing.assert_allclose(whole_RN, x_RK.astype(float) @ w_KN, rtol=1e-4, atol=1e-5)
        for height in (1, 2, 4, 8, rows - 1):
            if not np.array_equal(multiply(x_RK[:height], w_KN, np.float32), whole_RN[:height]):
                found.append((rows, width, columns, height))
    return found


def test_product_rows_do_not_depend_on_height() -> None:
    assert heights_with_other_rows(interpreter.product) == []


@pytest.mark.skipif("AVX2" not in processors.had(), reason="the processor has no AVX2")
def test_plain_product_rows_depend_on_height_with_avx2() -> None:
    """The control: OpenBLAS multiplies few rows by other routines."""
    if np.show_config("dicts")["Build Dependencies"]["blas"]["name"] != "scipy-openblas":
        pytest.skip("NumPy's BLAS is not OpenBLAS: whether its rows depend on their number is not known")
    program = "from tests.mixers.gpu.test_interpreter import *; print(heights_with_other_rows(lambda x, w, _: x @ w))"
    run = [sys.executable, "-c", program]
    found = subprocess.run(run, env=processors.environment("AVX2"), capture_output=True, text=True, check=True)
    assert any(shape[-1] > 1 for shape in literal_eval(found.stdout))


def test_product_of_stacked_matrices_is_that_of_each() -> None:
    x_HRK = np.arange(24, dtype=np.float16).reshape(2, 3, 4)
    w_KN = np.arange(8, dtype=np.float16).reshape(4, 2)
    found = interpreter.product(x_HRK, w_KN, np.float32)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.matmul(x_HRK, w_KN))
