import json
import runpy
import sys

import pytest

from headwater.lab.fidelity.figures import Deviation as Places
from headwater.lab.fidelity.figures import Distance as Drift
from papers import FIGURES, Lab
from papers.hypic.measured import (
    HYPIC,
    PAPER_ADDITION,
    PREFIX,
    RECOMPUTE,
    TRAINED,
    Loaded,
    Ttft,
    addition,
    alone,
    boundaries,
    deepest,
    first_layer,
    quality,
    under_load,
)
from tests.contract.recurrences import RECURRENCES


def ours(found):
    return {line.label: line.ours for line in found.lines}


def came_out(found):
    return [shape.holds for shape in found.shapes]


def test_transition_bytes_equal_the_table():
    found = FIGURES["hypic-table3"].run(Lab())
    assert came_out(found) == [True]
    rows = ours(found)
    assert [rows[f"{name}, float16"] for name in ("Mamba-2", "gated linear attention", "Gated DeltaNet")] == [
        4, 256, 32768,
    ]  # fmt: skip
    assert rows["Gated DeltaNet, as it is stored"] == 65536


def test_dense_transition_weighs_as_much_as_its_state():
    rows = ours(FIGURES["hypic-memory"].run(Lab()))
    assert rows["qwen3.5-9b: transitions, float32"] == 24 * 32 * 128 * 128 * 4 / 2**20
    assert rows["ring-flash-linear-2.0: transitions, float32"] == 28 * 32 * 4 / 2**20
    share = rows["qwen3.5-9b: transitions' share"]
    assert rows["qwen3.5-9b: transitions' share in bfloat16"] == pytest.approx(100 * share / (200 - share))


def test_mixers_compute_the_papers_recurrences(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["segment_states.py", "hypic-layer0", "hypic-table2", "--out", str(tmp_path)])
    runpy.run_module("benchmarks.segment_states", run_name="__main__")
    states, table = (json.loads((tmp_path / f"hypic-{name}.json").read_text()) for name in ("layer0", "table2"))
    assert [shape["holds"] for shape in states["shapes"] + table["shapes"]] == [True, True]
    assert len(table["rows"]) == len(PAPER_ADDITION)
    found = {row["label"]: row["ours"] for row in states["rows"]}
    relative = [found[f"{kind}: relative error"] for kind in RECURRENCES if kind != "short_conv"]
    assert max(relative) < 1e-5
    rounded = [row["ours"] for row in states["rows"] if "bfloat16" in row["label"]]
    assert min(rounded) > 10 * max(relative)  # so the other figure sees what it is of


def test_drifting_state_is_reported():
    small, large = {"one": Drift(1e-7, 0.0), "two": Drift(2e-5, 0.1)}, {"one": Drift(1, 1), "two": Drift(1, 1)}
    assert came_out(first_layer(small, large)) == [False]
    assert came_out(first_layer({"one": small["one"]}, large)) == [True]


def test_model_that_drifts_far_is_reported():
    near, far = Drift(0.05, 3.0), Drift(0.3, 17.0)
    assert came_out(deepest({TRAINED: near, "other": far}, {TRAINED: far})) == [True]
    assert came_out(deepest({TRAINED: far}, {TRAINED: far})) == [False]


def test_model_is_compared_with_the_papers_of_its_kind():
    one = {name: Drift(0.05, 3.0) for name in (TRAINED, "random Ring")}
    paper = {line.label: line.paper for line in deepest(one, one).lines}
    assert [paper[f"{name}, attention skipped: relative L2"] for name in one] == [8.92, 8.69]
    assert [paper[f"{name}, attention skipped: angle"] for name in one] == [5.11, 4.98]
    assert {paper[f"{name}, attention in: angle"] for name in one} == {None}


def test_boundaries_are_compared_with_interiors():
    assert came_out(boundaries({"layer 3": Places(3.0, 1.0, 2.0)})) == [True, True]
    assert came_out(boundaries({"layer 3": Places(3.0, 1.0, 2.0), "layer 7": Places(2.0, 1.0, 0.5)})) == [True, False]


def test_error_that_differs_from_the_table_is_reported():
    assert came_out(addition(PAPER_ADDITION)) == [True]
    assert came_out(addition(PAPER_ADDITION | {(7, 256): 0.868})) == [False]


def times(segments, tokens, recompute, hypic):
    seconds = {RECOMPUTE: [recompute, recompute + 1], PREFIX: [recompute] * 2, HYPIC: [hypic] * 2}
    return Ttft(segments, tokens, seconds)


def test_ratios_are_of_repetitions_and_slopes_of_medians():
    found = alone([times(4, 1024, 4.0, 1.0), times(4, 4096, 16.0, 2.0), times(16, 1024, 16.0, 1.6)])
    rows = ours(found)
    assert rows["4 segments of 1,024: full recompute over segments, w = 8"] == 4.5
    assert rows["one more segment, full recompute"] == 1000
    assert rows["one more warm segment, of its prefill"] == pytest.approx(5)
    assert came_out(found) == [True, True, True]
    slower = alone([times(4, 1024, 4.0, 1.0), times(4, 4096, 16.0, 4.0), times(16, 1024, 16.0, 3.0)])
    assert came_out(slower) == [False, False, False]


def test_throughput_claim_needs_every_run():
    fast, slow = Loaded([0.1, 0.3], 2.0, 100), Loaded([1.0, 3.0], 4.0, 100)
    found = under_load({PREFIX: [slow, slow], HYPIC: [fast, fast]})
    assert ours(found)[f"requests a second, {HYPIC} over {PREFIX}"] == 2.0
    assert ours(found)[f"{HYPIC}: p50 of TTFT"] == pytest.approx(200)
    assert came_out(found) == [True]
    assert came_out(under_load({PREFIX: [slow, fast], HYPIC: [fast, slow]})) == [False]


def estimate(mean, low, high):
    return {"mean": mean, "low": low, "high": high}


def evaluated(lost):
    """Return the JSON of `headwater eval --segments`, with given points lost by each method of composition."""
    ways = {"whole": 0, "prefixes": 0} | lost
    exact = {way: estimate(0.8 + points / 100, 0.7, 0.9) for way, points in ways.items()}
    return {
        "columns": {
            way: {
                "all": [{"items": 100, "exact": exact[way], "prompt_tokens": 1000, "cached_tokens": 500}],
                "kind": [{"value": "single", "exact": exact[way]}],
            }
            for way in ways
        },
        "comparisons": {
            way: {
                "items": 100,
                "equal": 100 if way == "prefixes" else 90,
                "difference": estimate(points / 100, (points - 2) / 100, (points + 2) / 100),
            }
            for way, points in ways.items()
            if way != "whole"
        },
    }


def test_cost_of_composition_is_read_from_an_evaluation():
    lost = {"naive": -30.0, "w0": -8.0, "w4": -3.0, "fast": -2.0, "w16": -1.0, "w32": 0.0}
    lost |= {"balanced": -0.5, "high": 0.0}
    found = quality(evaluated(lost))
    assert came_out(found) == [True] * 4
    rows = ours(found)
    assert rows["naive addition: minus full recompute"] == pytest.approx(-30)
    assert rows["balanced: prompt tokens not computed"] == 50
    assert rows["full recompute: one hop"] == pytest.approx(80)
    assert came_out(quality(evaluated(lost | {"balanced": -1.5, "naive": -3.0, "w0": -1.0}))) == [
        True, False, False, False,
    ]  # fmt: skip
