"""Runs of the figures: sessions drawn with the seed, runs shared between figures."""

import json

import pytest

from headwater.errors import ConfigError, TraceError
from headwater.lab.setup import Setup
from headwater.models.profiles import load_profile
from headwater.traces.arrivals import Poisson
from papers import Lab, seglen
from papers.lab import InOrder, roofline
from papers.marconi.conditions import CONDITIONS, EVEN, WHOLE, Condition, _compared
from papers.marconi.setting import AGENT


@pytest.fixture
def data(tmp_path):
    lines = [
        {"session": f"s{s}", "input": [s, 100, 101, *range(turn * 4)], "output": [7, 8]}
        for s in range(6)
        for turn in (1, 2)
    ]
    (tmp_path / "tiny.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_sessions_are_drawn_whole_and_alike_for_a_seed(data):
    trace = Lab(data).trace("tiny", sessions=3)
    assert trace.name == "3 sessions of tiny"
    assert len(trace.requests) == 6
    assert len({request.session for request in trace.requests}) == 3
    assert Lab(data).trace("tiny", sessions=3).requests == trace.requests
    draws = {tuple(r.session for r in Lab(data, seed=seed).trace("tiny", sessions=3).requests) for seed in range(8)}
    assert len(draws) > 1


def test_sessions_of_spelled_traffic_are_drawn_whole():
    spelling = "compacted(sessions=4, tokens=2048)"
    whole, two = Lab().drawn(spelling), Lab().drawn(spelling, sessions=2)
    kept = {request.session for request in two.requests}
    assert len(kept) == 2
    assert list(two.requests) == [request for request in whole.requests if request.session in kept]
    assert two.name == f"2 sessions of {spelling}"


def test_limit_caps_the_requests_of_a_figure(data):
    assert len(Lab(data, limit=2).trace("tiny", sessions=3).requests) == 4
    assert len(Lab(data, limit=2).trace("tiny").requests) == 4
    assert len(Lab(data).trace("tiny", first=5).requests) == 10


def test_finished_figures_are_not_run_again(data):
    lab = Lab(data, jobs=1)
    trace = lab.trace("tiny")
    setups = [
        Setup(load_profile("marconi-7b"), memory, "branch", "lru_path", page_size=1) for memory in (10**9, 10**10)
    ]
    first = lab.run(trace, setups[:1], Poisson(1.0, 5.0))
    both = lab.run(trace, setups, Poisson(1.0, 5.0))
    assert both[0] is first[0]
    assert both[1].row.memory == 10**10
    assert lab.run(trace, setups, Poisson(2.0, 5.0))[0] is not first[0]
    timed = [lab.run(trace, setups[:1], Poisson(2.0, 5.0), roofline("marconi-7b", "h100"))[0] for _ in range(2)]
    assert timed[0] is timed[1]
    assert [used.arrivals for used in lab.used] == ["Poisson(rate=1.0, think=5.0)", "Poisson(rate=2.0, think=5.0)"]


def test_compared_conditions_differ_in_one_respect():
    def held(*counts):
        return [shape.holds for shape in _compared(dict(zip(CONDITIONS, counts, strict=True)))]

    # exponential and 12 turns, even and 12, even and 51: each with whole, then with collapsed histories
    assert held(8, 3, 9, 5, 11, 4) == [True, False, True]
    assert held(8, 3, 8, 5, 11, 6) == [False, True, True]
    assert held(8, 3, 9, 5, 11, 12) == [True, True, False]


def test_memory_of_a_condition_follows_its_traffic(tmp_path):
    def messages(session):
        yield {"role": "system", "content": "You are an agent."}
        yield {"role": "user", "content": f"Solve task {session}."}
        for step in range(12):
            yield {"role": "assistant", "content": f"action {step}"}
            yield {"role": "user", "content": f"line of {session} " * 200}

    calls = list(range(2, 26, 2))
    lines = [{"session": f"s{n}", "messages": list(messages(n)), "calls": calls} for n in range(30)]
    (tmp_path / "mini_swe_agent.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    whole, collapsed = (Condition(EVEN, 12, last).workload(Lab(tmp_path)) for last in (WHOLE, 5))
    assert list(whole.memories) == sorted(set(whole.memories))
    assert len(whole.read(Lab(tmp_path)).requests) == 25 * 12
    assert collapsed.memories[0] < whole.memories[0]


def test_missing_data_and_results_are_named(data):
    with pytest.raises(TraceError, match="mini_swe_agent"):
        Lab(data).trace("mini_swe_agent")
    with pytest.raises(ConfigError, match="--peers"):
        Lab(data).peer("marconi")
    with pytest.raises(ConfigError, match="is not there"):
        Lab(data, peers=data).peer("marconi")


def published(folder, name, times):
    """Write a trace with the field names of Marconi's and SegLen's files."""
    lines = [
        {
            "session_id": number % 2,
            "turn_id": number // 2,
            "ts": at,
            "num_input_tokens": 40,
            "num_output_tokens": 2,
            "input_tokens": [number % 2, *range(39 + number // 2)],
            "output_tokens": [7, 8],
        }
        for number, at in enumerate(times)
    ]
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_published_trace_below_the_data_is_used_for_its_figure(data):
    published(data / "seglen", "swebench_sps=10_art=5_nums=100.jsonl", (0.5, 1.0, 4.0, 6.0))
    lab = Lab(data)
    seglen.swebench(lab, think=5.0)
    assert [(used.trace, used.requests) for used in lab.used] == [("seglen/swebench_sps=10_art=5_nums=100.jsonl", 4)]
    assert lab.published("swebench_sps=10_art=10_nums=100.jsonl") is None
    assert Lab().published("swebench_sps=10_art=5_nums=100.jsonl") is None


def test_published_trace_of_a_load_comes_at_its_own_times(data):
    published(data / "marconi", "swebench_sps=0.5_art=7.5_nums=100.jsonl", (0.5, 1.0, 4.0, 6.0))
    lab = Lab(data)
    trace, load = AGENT.under(lab, Poisson(0.5, 7.5))
    arrivals = load.over(trace)
    due = []
    while len(arrivals):
        due.append(arrivals.due())
        arrivals.take()
    assert due == [0.0, 0.5, 3.5, 5.5]
    assert [request.session for request in trace.requests] == ["0", "1", "0", "1"]
    assert InOrder(8.0).over(trace).due() > 0
