"""Cached prefixes of a provider against the lab's ideal cache, by hand."""

import json

import pytest

from benchmarks.provider_prefixes import figures, rounds
from headwater.traces.read import read_trace


def test_reported_blocks_are_compared_with_ideal_ones(tmp_path):
    session = {"messages": [{"role": "user", "content": "one" * 400}, {"role": "assistant", "content": "two"}] * 3}
    reported = [[100, 1, 0], [300, 1, 96], [500, 1, 0]]
    line = {**session, "calls": [1, 3, 5], "t0": 0, "t": [0, 1, 2], "usage": reported}
    (tmp_path / "some.jsonl").write_text(json.dumps(line) + "\n")
    found = list(rounds(read_trace(tmp_path / "some.jsonl"), 32, 32))
    assert [one.reported for one in found] == [0, 96, 0]
    assert found[0].predicted == 0
    assert found[1].predicted % 32 == 0
    assert found[1].predicted < 300
    assert found[2].blocks_more == -found[2].predicted // 32 < 0
    told = figures(found)
    assert told["requests"] == ("", 3)
    assert told["hit rate, as reported"][1] == pytest.approx(100 * 96 / 900)
    assert told["requests with nothing cached, and a block predicted"][1] == pytest.approx(100 / 3)
