"""Four engines compared, and the timing of tenants, in small."""

import numpy as np
import pytest

from headwater.engine.proof.selfcheck import SelfCheck
from headwater.models.load import LoadedModel
from headwater.schedule.speculation import Speculation
from stress import four_ways
from stress.tenant_timing import SENT_BY_NOBODY, SENT_BY_OTHER, SENT_BY_SELF, ks_statistic, permutation_p, report

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


def drawn(shift: float, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(10 + shift, 1, 100)


def test_statistic_is_the_largest_distance_of_the_distributions():
    assert ks_statistic(np.array([1.0, 2, 3]), np.array([1.0, 2, 3])) == 0
    assert ks_statistic(np.array([1.0, 2]), np.array([3.0, 4])) == 1
    assert ks_statistic(np.array([1.0, 2, 3, 4]), np.array([2.5, 3.5])) == pytest.approx(0.5)


def test_permutation_test_separates_only_meaningful_labels():
    assert permutation_p(drawn(0, 1), drawn(0, 2), 500, 0) > 0.05
    assert permutation_p(drawn(0, 1), drawn(2, 2), 500, 0) == 1 / 501


def test_timing_check_fails_on_a_leak_or_without_any_signal(capsys):
    alike, unlike = list(drawn(0, 1)), list(drawn(-5, 3))
    good = {SENT_BY_OTHER: list(drawn(0, 2)), SENT_BY_NOBODY: alike, SENT_BY_SELF: unlike}
    assert report(good, 0) == 0
    assert report(good | {SENT_BY_OTHER: unlike}, 0) == 1
    assert report(good | {SENT_BY_SELF: list(drawn(0, 4))}, 0) == 1
    assert "KS" in capsys.readouterr().out
