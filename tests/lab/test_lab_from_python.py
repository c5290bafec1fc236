"""The lab from Python, its example notebook, output files, and policies of one's own."""

import csv
import json
from pathlib import Path

import pytest

from headwater.cache.eviction import EVICTION
from headwater.errors import ConfigError
from headwater.lab import outputs
from headwater.lab.table import replay
from headwater.traces.read import make_trace

NOTEBOOK = Path(__file__).parents[2] / "examples" / "lab.ipynb"
DRAWN = "generated(17, requests=60)"
DEEPEST = """
from headwater.cache.eviction.base.ranked import Ranked


class Deepest(Ranked):
    def __init__(self, layout, floor=0):
        super().__init__(lambda node: (max(node.end, floor), node.checkpoint_time))


class Number(Ranked):
    def __init__(self, layout):
        super().__init__(lambda node: node.end)
"""


@pytest.fixture(autouse=True)
def policies_stay_as_they_were(monkeypatch):
    for name in list(EVICTION):
        monkeypatch.setitem(EVICTION, name, EVICTION[name])
    before = dict(EVICTION)
    yield
    for name in EVICTION.keys() - before.keys():
        del EVICTION[name]


def test_notebooks_code_cells_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code[0].splitlines()) <= 10
    names = {}
    for cell in code:
        exec(compile(cell, str(NOTEBOOK), "exec"), names)
    assert "Deepest" in capsys.readouterr().out
    assert len(list(csv.DictReader((tmp_path / "table.csv").open()))) == 6


def test_python_table_has_the_rows_and_provenance_of_the_run():
    table = replay(DRAWN, policy=["lru", "gdsf"], memory=["1GB", 2 * 10**9], seed=3)
    assert [(row["memory"], row["eviction"]) for row in table] == [
        (size, policy) for size in (10**9, 2 * 10**9) for policy in ("lru", "gdsf")
    ]
    first = table[0]
    assert {"version", "commit", "trace_digest", "seed", "limit", "arrival", "serve"} <= first.keys()
    assert first["seed"] == 3
    assert first["misses_by_reason_cold"] >= 1
    with pytest.raises(ConfigError, match="model is 'gpt-7', must be one of"):
        replay(DRAWN, model="gpt-7")


def test_digest_depends_on_requests_only():
    one, same, other = (make_trace(DRAWN, seed=seed) for seed in (1, 1, 2))
    assert outputs.digest(one) == outputs.digest(same) != outputs.digest(other)


def test_written_rows_are_flat_in_csv_and_json(tmp_path):
    table = replay(DRAWN, memory="1GB", serve="h100")
    table.write(tmp_path / "rows.csv")
    table.write(tmp_path / "rows.json")
    (from_csv,) = csv.DictReader((tmp_path / "rows.csv").open())
    (from_json,) = json.loads((tmp_path / "rows.json").read_text())
    assert list(from_csv) == list(from_json)
    assert float(from_csv["ttft_ms_p50"]) == from_json["ttft_ms_p50"] > 0
    with pytest.raises(ConfigError, match=r"ends in '.txt', must end in .csv, .parquet, .json"):
        table.write(tmp_path / "rows.txt")


def test_parquet_has_the_columns_of_csv_or_names_its_extra(tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = replay(DRAWN, memory="1GB")
    table.write(tmp_path / "rows.csv")
    table.write(tmp_path / "rows.parquet")
    (row,) = parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    (from_csv,) = csv.DictReader((tmp_path / "rows.csv").open())
    assert {name: "" if value is None else str(value) for name, value in row.items()} == from_csv
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'headwater\[parquet\]'"):
        table.write(tmp_path / "rows.parquet")


def test_policy_from_a_file_has_options(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(DEEPEST)
    table = replay(DRAWN, policy=[f"{file}:Deepest", f"{file}:Deepest(floor=4096)"], memory="1GB")
    assert [row["eviction"] for row in table] == [f"{file}:Deepest", f"{file}:Deepest(floor=4096)"]
    for name, message in (("Nothing", "has no attribute 'Nothing'"), ("Deepest(depth=1)", "depth")):
        with pytest.raises(ConfigError, match=message):
            replay(DRAWN, policy=f"{file}:{name}", memory="1GB")


def test_rank_that_is_a_number_is_refused_in_one_sentence(tmp_path):
    file = tmp_path / "numbers.py"
    file.write_text(DEEPEST)
    with pytest.raises(ConfigError, match=r"^Number: a rank is \d+, must be a tuple: \(\d+,\)$"):
        replay(DRAWN, policy=f"{file}:Number", memory="1GB")
