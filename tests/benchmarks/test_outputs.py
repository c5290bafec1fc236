"""Small runs of benchmarks, and the files that they write."""

import importlib
import json
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import mixers, products
from benchmarks.ablation import ALL, PARTS, rates_of, table
from benchmarks.cells import Cell, Traffic
from headwater.cli.common import prepare_outputs
from headwater.errors import ConfigError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("file", sorted(BENCHMARKS.glob("*.py")), ids=lambda file: file.stem)
def test_every_benchmark_with_an_output_prepares_it_first(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    if 'add_argument("--out"' in text:
        parsed = text.index(".parse_args()\n")
        assert re.match(r"\.parse_args\(\)\n +prepare_outputs\(", text[parsed:]), "first after reading its options"


def test_segment_quality_makes_its_folder_before_it_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import segment_quality

    out = tmp_path / "a" / "b"
    seen = []
    monkeypatch.setattr(segment_quality, "run", lambda arguments: seen.append(out.is_dir()) or 1)
    monkeypatch.setattr("sys.argv", ["segment_quality", "--out", str(out), "--every", "1000"])
    with pytest.raises(SystemExit):
        segment_quality.main()
    assert seen == [True]


def test_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for wrong in ({"files": [tmp_path]}, {"files": [file / "x.json"]}, {"folders": [file]}):
        with pytest.raises(ConfigError, match="cannot be written"):
            prepare_outputs(*wrong.get("files", []), folders=wrong.get("folders", []))
    prepare_outputs(None, tmp_path / "new" / "x.json", folders=[None, tmp_path / "folder"])
    assert (tmp_path / "new").is_dir()
    assert (tmp_path / "folder").is_dir()
    assert not (tmp_path / "new" / "x.json").exists()


CELL = Cell(Traffic("generated(9, requests=400)"), "granite-4.0-h-small", 0.1)
MEMORY = {CELL.name: 5 * 10**9}


@pytest.fixture(scope="module")
def whole() -> float:
    return rates_of(ALL, [CELL], MEMORY, Path())[CELL.name]


@pytest.mark.parametrize("part", [part for part in PARTS if part != ALL])
def test_without_a_part_other_checkpoints_are_kept(part: str, whole: float) -> None:
    assert rates_of(part, [CELL], MEMORY, Path())[CELL.name] != whole


def test_parts_left_out_by_an_ablation_are_restored(whole: float) -> None:
    assert rates_of(ALL, [CELL], MEMORY, Path())[CELL.name] == whole


def test_table_has_means_and_differences() -> None:
    rates = {ALL: {"a": 0.5, "generated(0)": 0.2, "b": 0.6}, "one": {"a": 0.6, "generated(0)": 0.1, "b": 0.58}}
    assert list(table(rates)) == [
        "| without | recorded cells (2) | drawn cells (1) |",
        "| --- | ---: | ---: |",
        "| nothing | 55.00 | 20.00 |",
        "| one | 59.00 (+4.00; -2.0 to +10.0) | 10.00 (-10.00; -10.0 to -10.0) |",
    ]


PAGE, KV_TOKENS, STATES = 64, 64 * 64, 8


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module as `bench_index.py --adapters index_adapter:Headwater` imports it: its folder is on the path."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("index_adapter")


@pytest.mark.parametrize("name", ["Headwater", "HeadwaterSegLen", "HeadwaterLearned", "HeadwaterRequests"])
def test_cache_answers_as_the_benchmark_asks(adapter: Any, name: str) -> None:
    cache = getattr(adapter, name)(PAGE, KV_TOKENS, STATES)
    key = cache.prepare(np.arange(1000, dtype=np.int32))
    longer = cache.prepare(np.arange(1500, dtype=np.int32))
    assert cache.match(key) == (0, 0)
    cache.insert(key)
    assert cache.match(longer) == (960, 960)
    handle = cache.lock()
    cache.insert(longer, 960)
    cache.unlock(handle)
    assert cache.counts() == (1472, 2, 2)
    assert cache.evict_states(1) == 1
    assert cache.evict_kv(512) >= 512
    kv_tokens, states, _ = cache.counts()
    assert (kv_tokens, states) <= (1472 - 512, 1)


@pytest.mark.parametrize("name", ["Headwater", "HeadwaterSegLen", "HeadwaterLearned", "HeadwaterRequests"])
def test_full_cache_makes_room(adapter: Any, name: str) -> None:
    cache = getattr(adapter, name)(PAGE, KV_TOKENS, STATES)
    for seed in range(40):
        key = cache.prepare(np.random.default_rng(seed).integers(0, 150_000, 640, dtype=np.int32))
        hit = cache.match(key)[1]
        handle = cache.lock()
        kv_tokens, states = cache.free()
        if kv_tokens < 640 - hit:
            cache.evict_kv(640 - hit - kv_tokens)
        if not states:
            cache.evict_states(1)
        cache.insert(key, hit)
        cache.unlock(handle)
        assert cache.match(key) == (640, 640)
    kv_tokens, states, _ = cache.counts()
    assert 640 <= kv_tokens <= KV_TOKENS
    assert 1 <= states <= STATES


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


A_LENGTH = 2  # ratios: with every state kept, with the transition; and to transformers' where it has such a layer


def run(names: Collection[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """The rows that the benchmark writes of these layers."""
    out = folder / "mixers.json"
    monkeypatch.setattr(mixers, "LAYERS", {name: mixers.LAYERS[name] for name in names})
    monkeypatch.setattr(sys, "argv", ["mixers.py", "--small", "--repeats", "1", "--threads", "1", "--out", str(out)])
    mixers.main()
    return json.loads(out.read_text())["rows"]


@pytest.mark.parametrize(
    "names", [{next(iter(mixers.LAYERS))}, pytest.param(mixers.LAYERS, marks=pytest.mark.full)], ids=["one", "all"]
)
def test_mixer_benchmark_writes_a_figure_per_layer_and_goal(
    names: Collection[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = run(names, tmp_path, monkeypatch)
    for name in names:
        own = [row for row in rows if row["name"].startswith(f"{name}, ")]
        a_length = A_LENGTH + (mixers.LAYERS[name].theirs is not None)
        assert len([row for row in own if row["goal"]]) == a_length * len(mixers.SMALL_TOKENS) + 1
        # Time without products is a difference, which for times as short as these may have any sign.
        assert all(row["median"] > 0 for row in own if "between products" not in row["name"])
