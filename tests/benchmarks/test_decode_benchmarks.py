"""Benchmarks of decoding, of trees of drafts and of formats of weights, in small."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import decode, draft_trees, layer_steps
from benchmarks import weights as bench
from benchmarks.draft_trees import best_tree, share, tokens_a_step
from benchmarks.weight_forms import FORMS
from benchmarks.weights import CONTROL, Column, Measured, Models
from headwater.evaluate.summary import Estimate
from headwater.models.files import embedded
from headwater.models.load import load_model, read_spec
from pages import measurements
from tests import checkpoints
from tests.gguf_files.convert import convert


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(script: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> dict[str, dict[str, Any]]:
    """The rows of its smallest run, by name and unit."""
    out = folder / "results.json"
    given = ["--small", "--repeats", "1", "--threads", "1", "--out", str(out), *more]
    monkeypatch.setattr(sys, "argv", [script.__name__, *given])
    script.main()
    return {f"{row['name']}, {row['unit']}": row for row in json.loads(out.read_text())["rows"]}


def test_decoding_speed_is_reported_next_to_a_plain_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = checkpoints.checkpoint(tmp_path, "qwen3_5")
    rows = run(decode, tmp_path, monkeypatch, "--model", str(model), "--streams", "1,2")
    for streams in ("1 stream", "2 streams"):
        share = rows[f"read by steps / plain read, {streams} after 128 tokens, x"]["median"]
        read = rows[f"read by steps, {streams} after 128 tokens, GB/s"]["median"]
        assert read / rows["plain read, beside contexts of 128, GB/s"]["median"] == pytest.approx(share)
        assert rows[f"decode, {streams} after 128 tokens, tokens/s"]["median"] > 0


def test_step_bytes_count_weights_and_each_streams_states_and_kv(tmp_path: Path) -> None:
    spec = read_spec(checkpoints.checkpoint(tmp_path, "qwen3_5"), "float32")
    one, two = (decode.step_bytes(spec, n, 100) for n in (1, 2))
    assert two - one == spec.checkpoint_bytes + 100 * spec.kv_bytes_per_token
    counts = spec.parameters_by_kind()
    embedding = 0 if spec.tied else counts["embedding"]
    assert decode.weight_bytes(spec, 1) == spec.weight_bytes - spec.element_bytes * (counts["norm"] + embedding)


def test_every_kind_of_layer_has_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {name: layer_steps.KINDS[name] for name in ("Gated DeltaNet", "attention", "MLP")}
    monkeypatch.setattr(layer_steps, "KINDS", kinds)
    rows = run(layer_steps, tmp_path, monkeypatch)
    for name in ("Gated DeltaNet, 1 sequence", "attention, 8 sequences after 128 tokens", "MLP, 1 sequence"):
        assert rows[f"{name}, us"]["median"] > 0


@pytest.mark.full
def test_all_kinds_have_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = run(layer_steps, tmp_path, monkeypatch)
    assert {row.split(", ")[0] for row in rows} == {name.split(", ")[0] for name in layer_steps.KINDS}


CHAIN = frozenset({(0,), (0, 0)})
# an answer of five tokens: before each of them, the head's ranks of the next ones
ANSWER = [(0, 0, 1), (0, 1), (1, 0), (0,), ()]


def test_tree_step_accepts_the_longest_right_path_plus_one_token() -> None:
    """A chain accepts 2 of the first place, then 1 of the fourth; with (1, 0) there is nothing else to accept."""
    assert tokens_a_step([ANSWER], CHAIN) == 5 / 2
    assert tokens_a_step([ANSWER], frozenset()) == 1
    assert tokens_a_step([[(1, 0), (0,), ()]], CHAIN) == 3 / 2
    assert tokens_a_step([[(1, 0), (0,), ()]], CHAIN | {(1,), (1, 0)}) == 3


def test_best_tree_has_the_most_often_right_paths_with_prefixes() -> None:
    assert best_tree([ANSWER], 2) == {(0,), (1,)}
    assert best_tree([ANSWER], 1) == {(0,)}
    tree = best_tree([ANSWER, [(0, 2, 0), (9, 0)]], 4)
    assert all(path[:-1] in tree or len(path) == 1 for path in tree)
    assert not any(max(path) >= draft_trees.TOP_K for path in best_tree([[(9, 0), (0,)]], 8))


def test_choice_is_judged_where_those_before_it_were_wrong() -> None:
    assert share([ANSWER], 1, 0) == 3 / 4
    assert share([ANSWER], 1, 1) == 1
    assert share([ANSWER], 2, 0) == 1 / 2  # of the places where the first token was the first choice


@pytest.mark.full
def test_smallest_run_has_chains_and_trees_of_both_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "trees.json"
    monkeypatch.setattr(sys, "argv", ["draft_trees", "--small", "--repeats", "1", "--out", str(out)])
    draft_trees.main()
    figures = {row["name"]: row["median"] for row in json.loads(out.read_text())["rows"]}
    for kind in draft_trees.KINDS:
        chains = [figures[f"2 answers ({kind}): chain of {n}, tokens a step"] for n in (1, 2, 3, 4)]
        assert chains[0] > 1
        assert chains == sorted(chains)
        assert figures[f"2 answers ({kind}): best tree of 8, tokens a step"] >= chains[-1]


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
        patch.setattr(bench, "FORMS", {name: bench.FORMS[name] for name in ("NVFP4", "MXFP4")})
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


def test_results_have_a_record_of_each_form(rows: dict[str, Measured]) -> None:
    found = {record["weights"]: record for record in bench.records(rows, {"int8": Estimate(0.5, 0.25, 0.75)})}
    assert [*found] == [*rows]
    assert found["int8"]["exact"] == {"mean": 0.5, "low": 0.25, "high": 0.75}
    assert found["MXFP4"]["exact"] is None
    for name, row in rows.items():
        assert found[name]["decode"]["divergence"]["mean"] == row.decode.divergence.mean


def test_scales_that_are_not_powers_of_two_diverge_less(rows: dict[str, Measured]) -> None:
    for path in ("decode", "prefill"):
        nvfp4, mxfp4 = (getattr(rows[name], path).divergence.mean for name in ("NVFP4", "MXFP4"))
        assert 0 < nvfp4 < mxfp4


@pytest.mark.parametrize("name", FORMS)
def test_rounding_to_a_form_errs_by_less_than_its_bits_allow(name: str) -> None:
    weight_NK = torch.randn(96, 192, generator=torch.Generator().manual_seed(0)) * 0.02
    form = FORMS[name](weight_NK)
    assert form is not None
    error = float((form.values() - weight_NK).square().mean() / weight_NK.square().mean())
    assert 1e-7 < error < {8: 2e-3, 4: 0.03, 3: 0.06, 2: 0.2}[form.bits]


def test_both_paths_compute_the_same_function() -> None:
    loaded = load_model(embedded(), "float32")
    token_WT = bench.windows_of(loaded, 2, TOKENS)
    models = Models(loaded.model, loaded.model)
    forced, whole = bench.through_decode(models, token_WT), bench.through_prefill(models, token_WT)
    torch.testing.assert_close(forced, whole, rtol=1e-3, atol=1e-3)


def test_page_of_weights_has_a_row_of_each_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Column(4_096, Estimate(1e-3, 5e-4, 2e-3), 3.5, 0.97)
    forms = bench.records({"as stored, 16 bits": Measured(one, one), "int8": Measured(one, one)}, {})
    run = {"repeats": 1, "commit": "abc"}
    monkeypatch.setattr(measurements, "RESULTS", tmp_path)
    (tmp_path / "weights.json").write_text(json.dumps({"run": run, "forms": forms}))
    page = measurements.pages()["docs/measurements/weights.md"]()
    divergence = "1.00e-03 [5.0e-04, 2.0e-03]"
    for name in ("as stored, 16 bits", "int8"):
        assert f"| {name} | {divergence} | 3.500 | 97.0% | {divergence} | 3.500 |" in page
