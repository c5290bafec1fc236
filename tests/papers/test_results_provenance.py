"""Results of the project name a clean commit, their seed and their machine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from headwater.errors import ConfigError
from papers import results
from papers.results import FIGURES, RESULTS, TREES, commit_of, refuse_dirty_tree, write_results

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
