"""`python -m papers`: what it writes, and the page made of it."""

from __future__ import annotations

import json

from headwater.cli import run as run_of
from papers import FIGURES
from papers.__main__ import commands


def run(arguments: list[str]) -> int:
    return run_of(arguments, commands, "papers")


def test_run_writes_one_file_per_figure_and_the_page(tmp_path, capsys):
    out, page = tmp_path / "results", tmp_path / "results.md"
    assert run(["marconi-3b", "marconi-table1", "--out", str(out), "--seed", "3"]) == 0
    assert "17.4" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["marconi-3b.json", "marconi-table1.json"]
    document = json.loads((out / "marconi-3b.json").read_text())
    assert (document["figure"], document["run"]["seed"], document["runs"]) == ("marconi-3b", 3, [])
    document["rows"][0]["ours"] = 12.5
    (out / "marconi-3b.json").write_text(json.dumps(document))
    assert run(["--page", str(page), "--out", str(out)]) == 0
    assert "| 17.4 | 12.5 | GB |" in page.read_text()
    assert "marconi-11" not in page.read_text()


def test_figures_that_cannot_run_are_refused_in_one_line(tmp_path, capsys):
    assert run(["marconi-99"]) == 2
    assert "figure 'marconi-99' is unknown; there are marconi-table1" in capsys.readouterr().err
    assert run(["--page", str(tmp_path / "page.md")]) == 2
    assert "--out" in capsys.readouterr().err
    assert run(["marconi-11"]) == 2
    assert "marconi-11 needs recorded traffic: say where with --data" in capsys.readouterr().err
    assert run(["marconi-11", "--data", str(tmp_path)]) == 2
    assert f"{tmp_path / 'mini_swe_agent'} is not a file" in capsys.readouterr().err


def test_help_names_the_figures(capsys):
    assert run(["--help"]) == 0
    shown = "".join(capsys.readouterr().out.replace("│", " ").split())
    assert all(name in shown for name in FIGURES)
