"""Journals of long runs, and percentiles."""

import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.journal import Journal
from headwater.percentile import percentile


def test_run_that_was_cut_short_continues_with_its_parts(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    first = Journal(out, {"seed": 0})
    first.add("a", [1, 2])
    first.add("b", {"x": 0.5})
    file = tmp_path / ".out.json.unfinished"
    file.write_text(file.read_text() + '["c", [1, ')  # killed as it wrote
    again = Journal(out, {"seed": 0})
    assert (again.found, again["a"], again["b"], "c" in again) == (2, [1, 2], {"x": 0.5}, False)
    again.add("c", 3)
    assert Journal(out, {"seed": 0}).found == 3
    again.end()
    assert not file.exists()
    assert Journal(out, {"seed": 0}).found == 0


def test_journal_killed_in_mid_write_keeps_earlier_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    Journal(out, {"seed": 0}).add("a", 1)
    again = Journal(out, {"seed": 0})

    def killed(path: Path, text: str, encoding: str) -> None:
        path.write_bytes(text.encode(encoding)[:3])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        again.add("b", 2)
    assert Journal(out, {"seed": 0}).found == 1


def test_other_settings_and_other_files_are_not_used(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    Journal(out, {"seed": 0}).add("a", 1)
    assert "a" not in Journal(out, {"seed": 1})
    for content in (b'{"seed": 1}\nno json\n', b"\xff\xfe\x00"):
        (tmp_path / ".out.json.unfinished").write_bytes(content)
        assert Journal(out, {"seed": 1}).found == 0


def test_without_an_output_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    journal = Journal(None, {})
    journal.add("a", 1)
    journal.end()
    assert journal["a"] == 1
    assert not list(tmp_path.iterdir())


def test_part_is_computed_once(tmp_path: Path) -> None:
    computed = []

    def part() -> int:
        computed.append(1)
        return 7

    assert [Journal(tmp_path / "out.json", {}).part("a", part) for _ in range(2)] == [7, 7]
    assert len(computed) == 1


def test_percentiles_interpolate():
    assert [percentile([1.0, 2.0, 4.0], p) for p in (0, 25, 50, 75, 100)] == [1.0, 1.5, 2.0, 3.0, 4.0]
    assert percentile([4.0, 1.0, 2.0], 75) == 3.0
    assert percentile([7.0], 99) == 7.0
    with pytest.raises(ValueError, match="at least 1 value"):
        percentile([], 50)


@given(values=st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=2, max_size=50))
def test_percentiles_are_those_of_the_standard_library(values):
    hundredths = statistics.quantiles(values, n=100, method="inclusive")
    for percent in (1, 50, 90, 95, 99):
        assert percentile(values, percent) == pytest.approx(hundredths[percent - 1], rel=1e-9, abs=1e-9)
