"""Segments in the papers' figures and benchmarks."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import headwater.cli
from benchmarks.segments import _expect
from headwater.account import CacheAccount, Reason
from papers import Lab
from papers.hypic import lab as rag
from papers.hypic.lab import EXPONENTS, MODELS, SETS, WAYS, Model, parts
from papers.hypic.measured import HYPIC, PREFIX, RECOMPUTE
from tests.papers.test_hypic import evaluated


def test_drawn_traffic_follows_seed_and_limit() -> None:
    spelling = "rag(sessions=9, documents=20, tokens=30)"
    trace = Lab(seed=1).drawn(spelling)
    assert len(trace.requests) == 9
    assert Lab(seed=1, limit=4).drawn(spelling).requests == trace.requests[:4]
    assert Lab(seed=2).drawn(spelling).requests != trace.requests
    lab = Lab()
    assert lab.drawn(spelling) is lab.drawn(spelling)


def test_each_method_has_a_line_per_memory_and_exponent() -> None:
    lab = Lab(limit=3, jobs=1)
    found = rag.zipf(lab)
    sizes = sum(len(model.memories) for model in MODELS)
    assert len(found.lines) == len(WAYS) * sizes * len(EXPONENTS)
    assert all(line.paper is None and line.ours is not None and line.ours < 100 for line in found.lines)


def test_parts_add_up_to_the_tokens_not_computed() -> None:
    lab = Lab(jobs=1)
    found = lab.rows(lab.drawn("rag(sessions=20, documents=20, turns=2)"), Model("qwen3.5-0.8b", ()).setups(8))
    row = found["both"]
    prefix, composed, seams, made = (line.ours or 0.0 for line in parts("some", row))
    assert abs(prefix + composed - made - 100 * row.token_hit_rate) < 1e-3
    assert 0 < seams < composed


def test_passages_are_drawn_from_their_sets(tmp_path) -> None:
    for name in SETS:
        folder, _, file = name.partition("/")
        (tmp_path / folder).mkdir()
        texts = [{"title": str(i), "text": f"passage {i} of {name} " * 9} for i in range(20)]
        lines = [json.dumps({"question": "Who?", "answers": ["He."], "passages": texts[i:]}) for i in range(4)]
        (tmp_path / folder / f"{file}.jsonl").write_text("\n".join(lines))
    found = rag.passages(Lab(tmp_path, limit=3, jobs=1))
    assert {line.label.partition(",")[0] for line in found.lines} == set(SETS)


def test_sweep_ends_at_the_first_overload(monkeypatch) -> None:
    monkeypatch.setattr(rag, "RATES", (1.0, 1000.0, 2000.0))
    monkeypatch.setattr(rag, "TARGET", 700.0)
    monkeypatch.setattr(rag, "PAPER_LOAD", {"qwen3.5-35b-a3b": 2.83})
    labels = [line.label for line in rag.requests_at_1s(Lab(limit=20, jobs=1)).lines]
    assert "qwen3.5-35b-a3b, 1000 a second: prefix, p50" in labels
    assert not any("2000 a second: prefix" in label for label in labels)


LOST = dict.fromkeys(("naive", "w0", "w4", "fast", "w16", "w32", "balanced", "high"), 0.0)


def started(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_module(f"benchmarks.{name}", run_name="__main__")


def test_answers_are_evaluated_in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def evaluate(arguments: list[str]) -> int:
        asked.append(arguments)
        Path(arguments[arguments.index("--json") + 1]).write_text(json.dumps(evaluated(LOST)))
        return 0

    monkeypatch.setattr(headwater.cli, "run", evaluate)
    started("segment_quality", "--every", "40", "--out", str(tmp_path), monkeypatch=monkeypatch)
    (command,) = asked
    assert command[:2] == ["eval", "--segments"]
    assert json.loads((tmp_path / "hypic-10.json").read_text())["rows"][0]["ours"] == 100


def test_evaluation_that_fails_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(headwater.cli, "run", lambda arguments: 2)
    with pytest.raises(SystemExit, match="2"):
        started("segment_quality", "--every", "40", "--out", str(tmp_path), monkeypatch=monkeypatch)
    assert not list(tmp_path.iterdir())


def test_empty_set_of_prompts_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="0 prompts of 2 to 3 tokens"):
        started("segment_choices", "--shortest", "2", "--longest", "3", monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    ("way", "segments", "cached", "fits"),
    [
        (RECOMPUTE, 0, 0, True),
        (RECOMPUTE, 0, 64, False),
        (PREFIX, 0, 64, True),
        (PREFIX, 0, 128, False),  # it found more than the leading part
        (HYPIC, 4, 4000, True),
        (HYPIC, 3, 3000, False),
    ],
)
def test_method_that_was_not_applied_is_not_measured(way: str, segments: int, cached: int, fits: bool) -> None:
    account = CacheAccount(4096, cached, 0, 0, Reason.COLD, segments=segments)
    if fits:
        _expect(SimpleNamespace(account=account), way, 4)
    else:
        with pytest.raises(RuntimeError, match=way):
            _expect(SimpleNamespace(account=account), way, 4)
