"""Formulas of the papers by hand, and the command that computes their figures."""

import json
from array import array

import pytest

from headwater.cli import run as run_of
from headwater.traces.request import Request
from papers import FIGURES, Lab
from papers.__main__ import commands
from papers.figure import quantile
from papers.marconi.workloads import Reuse


def request(*tokens, prompt=None):
    text = array("i", tokens).tobytes()
    return Request("s", text, prompt or len(tokens), 0, len(tokens))


def test_blocks_count_once_for_kv_and_resumed_state():
    reuse = Reuse(block=2)
    reuse.add(request(1, 2, 3, 4, 5), resumed_at=0)  # two full blocks
    assert (reuse.computed, reuse.kv_used, reuse.states_used) == (2, 0, 0)
    reuse.add(request(1, 2, 3, 4, 6, 7), resumed_at=4)  # both blocks' KV, the second one's state, and a third block
    assert (reuse.computed, reuse.kv_used, reuse.states_used) == (3, 2, 1)
    reuse.add(request(1, 2, 3, 4, 8, 9), resumed_at=4)  # used again: they count as used already
    assert (reuse.computed, reuse.kv_used, reuse.states_used) == (4, 2, 1)
    assert reuse.percent() == (50.0, 25.0)


def test_recomputed_block_is_another_block():
    reuse = Reuse(block=2)
    for _ in range(2):
        reuse.add(request(1, 2), resumed_at=0)
    reuse.add(request(1, 2, 3), resumed_at=2)
    assert (reuse.computed, reuse.kv_used, reuse.states_used) == (2, 1, 1)


def test_equal_tokens_after_other_prefixes_are_other_blocks():
    reuse = Reuse(block=2)
    reuse.add(request(1, 2, 3, 4), resumed_at=0)
    reuse.add(request(9, 9, 3, 4, 5), resumed_at=4)
    assert (reuse.kv_used, reuse.states_used) == (0, 0)


def test_quantile_lies_between_two_values_in_proportion():
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile([0, 10], 0.95) == pytest.approx(9.5)
    assert quantile([7], 0.05) == 7


def lines(name):
    return {line.label: line for line in FIGURES[name].run(Lab()).lines}


def test_sequence_with_checkpoint_at_every_block_has_the_papers_bytes():
    rows = lines("marconi-3b")
    assert rows["10,000 tokens, a checkpoint every 16"].ours == pytest.approx(17.4, abs=0.05)
    assert rows["over the KV of a Transformer of 32 layers"].ours == pytest.approx(3.3, abs=0.05)


def test_table_1_is_reproduced_except_the_last_ssm_term():
    for line in lines("marconi-table1").values():
        assert line.ours == pytest.approx(line.paper, rel=0.01), line.label


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
