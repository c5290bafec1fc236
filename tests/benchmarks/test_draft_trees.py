"""Trees of drafts against chains: what each accepts of ranks worked out by hand, and the benchmark's smallest run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import draft_trees
from benchmarks.draft_trees import best_tree, share, tokens_a_step

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
