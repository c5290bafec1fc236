"""Output paths of benchmarks are made or refused before anything is computed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
