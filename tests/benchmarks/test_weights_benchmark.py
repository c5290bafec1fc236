"""The benchmark of quality by format of weights: both paths are measured, and each shows what it computes with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import weights as bench
from benchmarks.weights import CONTROL, Column, Measured, Models
from headwater.evaluate.summary import Estimate
from headwater.models.embedded import embedded
from headwater.models.load import load_model
from tests.gguf.convert import convert

TOKENS = 96


@pytest.fixture(scope="module")
def sizes() -> dict[str, int]:
    """Bytes of the files that the run wrote, by the names of their rows."""
    return {}


@pytest.fixture(scope="module")
def rows(sizes: dict[str, int]) -> dict[str, Measured]:
    """A small run: 2 windows with 31 tokens each after the first 64 and before the last."""

    def noted(folder: Path, path: Path, *types: object) -> Path:
        file = convert(folder, path, *types)
        sizes[path.stem] = file.stat().st_size
        return file

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "convert", noted)
        return bench.measured(embedded(), 2, TOKENS)


def test_at_least_4_000_positions_are_forced() -> None:
    assert bench.WINDOWS * (bench.TOKENS - bench.PREFILLED - 1) >= 4_000


def test_weights_as_stored_diverge_from_themselves_by_nothing(rows: dict[str, Measured]) -> None:
    stored = rows["as stored, 16 bits"]
    for one in (stored.decode, stored.prefill):
        assert one.positions == 2 * (TOKENS - bench.PREFILLED - 1)
        assert one.divergence.mean == 0
        assert one.same_first == 1
    assert stored.decode.perplexity == pytest.approx(stored.prefill.perplexity, rel=1e-3)


def test_fewer_bits_diverge_more_on_both_paths(rows: dict[str, Measured]) -> None:
    for path in ("decode", "prefill"):
        eight, four = (getattr(rows[name], path).divergence.mean for name in ("int8", "int4"))
        assert 0 < 10 * eight < four


def test_files_of_gguf_diverge_more_with_fewer_bits_on_both_paths(rows: dict[str, Measured]) -> None:
    assert {"Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K"} == {name.removeprefix("GGUF ") for name in bench.TYPES}
    for path in ("decode", "prefill"):
        nats = {name: getattr(rows[name], path).divergence.mean for name in bench.TYPES}
        assert 0 < nats["GGUF Q8_0"] < nats["GGUF Q6_K"] < nats["GGUF Q5_K"] < nats["GGUF Q4_K"] < nats["GGUF Q4_0"]


def test_products_of_a_file_have_the_types_of_its_row(
    rows: dict[str, Measured], sizes: dict[str, int], tmp_path: Path
) -> None:
    assert {*sizes} == {*bench.TYPES} < {*rows}
    plain = convert(embedded(), tmp_path / "all.gguf", "Q5_0").stat().st_size
    assert sizes["GGUF Q4_K"] < plain < sizes["GGUF Q5_K"] < sizes["GGUF Q6_K"] < sizes["GGUF Q8_0"]


def test_control_with_2_bit_decoding_diverges_on_the_decode_path_only(rows: dict[str, Measured]) -> None:
    """The control: decode rows that compute with other weights than prefill rows."""
    control, stored = rows[CONTROL], rows["as stored, 16 bits"]
    assert control.decode.divergence.mean > 3 * rows["int4"].decode.divergence.mean
    assert control.decode.perplexity > 1.02 * stored.decode.perplexity
    assert control.prefill == stored.prefill


def test_make_bench_has_figures_of_each_row(rows: dict[str, Measured]) -> None:
    figures = {row.name: row for row in bench.figures(rows, {"int8": Estimate(0.5, 0.25, 0.75)})}
    assert figures["int8: exact match"].median == 50
    for name, row in rows.items():
        for path in ("decode", "prefill"):
            assert figures[f"{name}, {path}: KL of next tokens"].median == getattr(row, path).divergence.mean
            assert figures[f"{name}, {path}: perplexity"].median == getattr(row, path).perplexity


def test_both_paths_compute_the_same_function() -> None:
    loaded = load_model(embedded(), "float32")
    token_WT = bench.windows_of(loaded, 2, TOKENS)
    models = Models(loaded.model, loaded.model)
    forced, whole = bench.through_decode(models, token_WT), bench.through_prefill(models, token_WT)
    torch.testing.assert_close(forced, whole, rtol=1e-3, atol=1e-3)


def test_section_is_written_between_the_others(tmp_path: Path) -> None:
    one = Column(4_096, Estimate(1e-3, 5e-4, 2e-3), 3.5, 0.97)
    rows = {"as stored, 16 bits": Measured(one, one), "int8": Measured(one, one)}
    exact = dict.fromkeys(("auto", "int8", "int4"), Estimate(0.5, 0.25, 0.75))
    new = bench.section(rows, exact, 40)
    cells = "1.00e-03 [5.00e-04, 2.00e-03] | 3.5000"
    assert f"| int8 | {cells} | {cells} | 97.0% | 50.0 [25.0, 75.0] |" in new
    added = bench.with_section("# Page\n\ntext\n", new)
    assert added == f"# Page\n\ntext\n\n{new}"
    between = "# Page\n\n## First\n\ntext\n\n## Quality\n\nold\n\n## Last\n\nmore\n"
    replaced = bench.with_section(between, new)
    assert replaced == f"# Page\n\n## First\n\ntext\n\n{new}\n## Last\n\nmore\n"
    assert bench.with_section(replaced, new) == replaced
