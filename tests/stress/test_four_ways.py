"""Random requests four ways, in small: all answers are equal, and one that differs by a token is found."""

from __future__ import annotations

import pytest

from headwater.engine.proof.selfcheck import SelfCheck
from headwater.models.load import LoadedModel
from headwater.schedule.speculation import Speculation
from stress import four_ways

REQUESTS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, SelfCheck]:
    return four_ways.random_model(tmp_path_factory.mktemp("four"), "qwen3_5", "float32")


def test_answers_are_equal_with_drafts_and_without_with_a_cache_and_without(model, capsys) -> None:
    run = four_ways.compare(REQUESTS, 3, *model)
    assert run.differences == []
    assert run.compared == REQUESTS
    assert run.hits["auto"] == run.hits["off"] > 0
    shown = capsys.readouterr().out
    assert "drafts and cache: 0 requests resumed" not in shown
    assert ", 0 drafts accepted" in shown.split("cache: ")[2]  # without drafts
    assert ", 0 drafts accepted" not in shown.split("cache: ")[1].splitlines()[0]


def test_four_ways_detects_a_wrongly_accepted_draft(model, monkeypatch) -> None:
    """Control: what the drafts were is one token too many of the state."""
    learn = Speculation.learn

    def wrong(self, speculator, drafted, right):
        learn(self, speculator, drafted, right)
        if speculator is not None and drafted > right:
            seq = next(seq for seq in running() if seq.speculator is speculator)
            seq.accepted = min(drafted, right + 1)

    schedulers = []
    start = four_ways.Engine.start
    monkeypatch.setattr(four_ways.Engine, "start", lambda engine: (schedulers.append(engine.scheduler), start(engine)))
    monkeypatch.setattr(Speculation, "learn", wrong)

    def running():
        return [seq for one in schedulers for seq in one.running.values() if hasattr(seq, "speculator")]

    assert four_ways.compare(REQUESTS, 3, *model).differences
