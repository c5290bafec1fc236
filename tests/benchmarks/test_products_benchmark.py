"""The benchmark of products runs, and has a figure for each format and height."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import products


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_every_format_and_height_has_a_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "products.json"
    monkeypatch.setattr(sys, "argv", ["products", "--small", "--repeats", "1", "--threads", "1", "--out", str(out)])
    products.main()
    rows = {f"{row['name']}, {row['unit']}": row for row in json.loads(out.read_text())["rows"]}
    for name in (*products.HELD, *products.BESIDE):
        assert rows[f"1 row, {name}, GB/s"]["median"] > 0
        assert rows[f"8 rows, {name}, us"]["median"] > 0


@pytest.mark.parametrize("bits", [8, 4])
def test_rounded_weights_are_near_the_weights(bits: int) -> None:
    weight_NK = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    step_NX = weight_NK.unflatten(1, (-1, products.GROUP)).abs().amax(-1) / (2 ** (bits - 1) - 1)
    error_NXg = (products.quantised(weight_NK, bits).values() - weight_NK).abs().unflatten(1, (-1, products.GROUP))
    assert bool((error_NXg <= 0.6 * step_NX[:, :, None]).all())
