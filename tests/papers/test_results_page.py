"""Results of the papers' figures: their page, and where they are from."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from headwater.errors import ConfigError
from headwater.traces.request import Request, Trace
from papers import Figure, Found, Lab, Line, Shape, figures_named, page_of, results
from papers.lab import measure
from papers.page import given, number
from papers.results import FIGURES, RESULTS, TREES, commit_of, refuse_dirty_tree, write_results


def figure(name="paper-1", holds=True):
    found = Found((Line("at 1 GB", 4.5, 12.3456, "x"), Line("ours only", None, 2_000_000)), Shape("it grows", holds))
    return Figure(name, "A title", "A paper, figure 1", "it grows.", "Other data.", lambda lab: found)


def test_page_shows_figures_and_claims_that_failed():
    figures = [figure(), figure("paper-2", holds=False)]
    page = page_of(figures, {one.name: measure(one, Lab()) for one in figures})
    assert "| at 1 GB | 4.5 | 12.3 | x |" in page
    assert "| ours only |  | 2,000,000 |  |" in page
    assert "| [paper-1](#paper-1) | A title | 1 of 1 |" in page
    assert "| [paper-2](#paper-2) | A title | 0 of 1 |" in page
    assert page.count("**did not come out**") == 1


def test_page_depends_only_on_documents_and_texts():
    one = figure()
    documents = {one.name: measure(one, Lab())}
    assert page_of([one], documents) == page_of([one, figure("never-ran")], documents)
    documents[one.name]["rows"][0]["ours"] = 99.0
    assert "| at 1 GB | 4.5 | 99 | x |" in page_of([one], documents)


def test_measured_figures_are_not_labelled_as_formulas():
    of_formulas = figure()
    measured = replace(of_formulas, run=None)
    document = measure(of_formulas, Lab(seed=7)) | {"seconds": 654.9}
    assert "_Only from the model's formulas._" in page_of([of_formulas], {"paper-1": document})
    page = page_of([measured], {"paper-1": document})
    assert "formulas" not in page
    assert "_Measured by a benchmark. Seed 7, 655 s._" in page


def test_figure_of_a_trace_that_was_not_replayed_names_the_trace():
    def run(lab):
        lab.note(Trace("chats", [Request("s", b"", 2_500_000, 0, 0)]))
        return Found([Line("median", None, 1.0)])

    of_trace = replace(figure(), run=run)
    page = page_of([of_trace], {"paper-1": measure(of_trace, Lab())})
    assert "chats, 1 requests, 2.5 M prompt tokens._" in page


def test_numbers_near_zero_are_not_shown_as_zero():
    assert [number(x) for x in (3.39e-7, -0.000123, 0.0, 0.00123)] == ["3.39e-07", "-0.000123", "0", "0.001"]


def test_own_numbers_have_three_digits_papers_are_as_printed():
    assert [number(x) for x in (None, 17.4032, 0.81999, 3.3198, 1234.56, 2e12)] == [
        "", "17.4", "0.820", "3.32", "1,235", "2,000,000,000,000",
    ]  # fmt: skip
    assert [given(x) for x in (None, 17.4, 16_384)] == ["", "17.4", "16,384"]


def test_papers_name_means_all_of_its_figures():
    names = [one.name for one in figures_named(["marconi"])]
    assert "marconi-table1" in names
    assert all(name.startswith("marconi-") for name in names)
    assert [one.name for one in figures_named(["marconi-3b"])] == ["marconi-3b"]


KEPT = sorted([*RESULTS.glob("*.json"), *FIGURES.glob("*.json")])
MAX_NOT_CLEAN = 44  # files of an earlier run whose tree was dirty or not recorded; may only fall


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository with one commit of one file, as the project's."""
    (tmp_path / "code.py").write_text("x = 1\n")
    for command in (["init", "-q"], ["add", "code.py"], ["commit", "-qm", "first"]):
        names = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
        subprocess.run(["git", *names, *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "RESULTS", tmp_path / "benchmarks" / "results")
    results.origin.cache_clear()
    yield tmp_path
    results.origin.cache_clear()


def test_result_of_clean_tree_names_commit_seed_and_machine(repository: Path) -> None:
    path = repository / "benchmarks" / "results" / "speed.json"
    write_results(path, {"run": {"repeats": 3}, "rows": [1.0]}, seed=7)
    document = json.loads(path.read_text())
    assert document["rows"] == [1.0]
    assert (document["run"]["tree"], document["run"]["seed"], document["run"]["repeats"]) == ("clean", 7, 3)
    assert len(document["run"]["commit"]) == 12
    assert document["run"]["cpu"]


def test_dirty_tree_is_refused_before_a_run_with_its_files(repository: Path) -> None:
    (repository / "code.py").write_text("x = 2\n")
    path = repository / "benchmarks" / "results" / "speed.json"
    with pytest.raises(ConfigError, match=r"speed\.json names the commit .* not a clean commit:\n M code\.py"):
        refuse_dirty_tree(path)
    with pytest.raises(ConfigError, match=r"code\.py"):
        write_results(path, {}, seed=0)
    assert not path.exists()


def test_untracked_code_makes_a_tree_dirty_and_results_do_not(repository: Path) -> None:
    path = repository / "benchmarks" / "results" / "speed.json"
    write_results(path, {}, seed=0)
    (repository / "page.md").write_text("generated\n")
    assert results.changes() == []
    (repository / "more.py").write_text("y = 1\n")
    assert results.changes() == ["?? more.py"]


def test_smallest_run_in_dirty_tree_writes_elsewhere_with_its_tree(repository: Path, tmp_path: Path) -> None:
    (repository / "code.py").write_text("x = 2\n")
    kept, other = repository / "benchmarks" / "results" / "speed.json", tmp_path / "elsewhere" / "speed.json"
    refuse_dirty_tree(kept, small=True)
    write_results(kept, {}, seed=0, small=True)
    write_results(other, {}, seed=0, small=True)
    assert not kept.exists()
    assert json.loads(other.read_text())["run"]["tree"] == "dirty"


def test_folder_without_git_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_git", lambda *arguments: "")
    results.origin.cache_clear()
    with pytest.raises(ConfigError, match="it is not a git repository"):
        refuse_dirty_tree(FIGURES)
    results.origin.cache_clear()


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_kept_result_names_commit_tree_seed_and_machine(path: Path) -> None:
    run = json.loads(path.read_text(encoding="utf-8"))["run"]
    assert run["commit"]
    assert "dirty" not in run["commit"]
    assert run["tree"] in TREES
    assert {"seed", "cpu"} <= run.keys()


def test_results_of_unclean_trees_only_become_fewer() -> None:
    trees = [json.loads(path.read_text(encoding="utf-8"))["run"]["tree"] for path in KEPT]
    assert sum(tree != "clean" for tree in trees) <= MAX_NOT_CLEAN


def test_page_names_commit_and_tree_state_of_results() -> None:
    shown = [commit_of({"commit": "abc", "tree": tree}) for tree in TREES]
    assert shown == ["abc", "abc with uncommitted changes", "abc or earlier (not recorded)"]
