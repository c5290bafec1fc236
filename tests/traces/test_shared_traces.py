"""Traces that processes share."""

import importlib.util
import random
import statistics
from itertools import islice, pairwise
from pathlib import Path

import pytest

from headwater.load.session import Session, Turn, as_recorded, interleaved, scheduled
from headwater.traces.arrivals import PROCESSES, in_order
from headwater.traces.loads import make_arrivals
from headwater.traces.read import read_trace
from tests.traces.conftest import blocks


def counts(trace):
    return len({one.session for one in trace.requests}), len(trace.requests)


@pytest.mark.parametrize(
    ("name", "n_sessions", "n_requests"),
    [
        ("mooncake/conversation", 12_031, 12_031),
        ("mooncake/synthetic", 3_993, 3_993),
        ("mtbench101", 1_388, 4_208),
        ("squality/dev", 25, 125),
        ("claude_code/global_v6", 422 + 40, 25_908),
    ],
)
def test_sessions_and_requests_are_as_many_as_stated(data, name, n_sessions, n_requests):
    assert counts(read_trace(Path(name), data=data)) == (n_sessions, n_requests)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "n_sessions", "n_requests"),
    [("mini_swe_agent", 500, 20_163), ("prompts_claude_code/families", 316, 1_960), ("squality/train", 50, 250)],
)
def test_sessions_and_requests_of_long_texts_are_as_many_as_stated(data, name, n_sessions, n_requests):
    assert counts(read_trace(Path(name), data=data)) == (n_sessions, n_requests)


def test_words_are_about_as_many_tokens_as_an_agents_provider_counted(data):
    trace = read_trace(Path("mini_swe_agent"), data=data, limit=20)
    ratio = float(trace.notes[0].split(", ")[1].split()[0])
    assert 0.97 < ratio < 1.05


def test_an_agents_sessions_overlap_as_they_did(data):
    trace = read_trace(Path("mini_swe_agent"), data=data, limit=60)
    order = [one.session for _, one in in_order(make_arrivals(trace))]
    assert len(set(order[:200])) > 5


@pytest.fixture(scope="module")
def load(data):
    """The data's own reader."""
    spec = importlib.util.spec_from_file_location("shared_load", data / "load.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["global_v6", "local_v8"])
def test_blocks_are_those_of_the_datas_own_reader(data, load, name):
    ours = {}
    for request in read_trace(data / "claude_code" / f"{name}.jsonl.zst", limit=14).requests:
        ours.setdefault(request.session, []).append(request)
    whole = [session for session in islice(ours, 12)]
    compared = 0
    for theirs in load.iter_hash_requests(str(data / "claude_code"), name):
        session = theirs["session"] if theirs["thread"] is None else f"{theirs['session']}/{theirs['thread']}"
        if session not in ours:
            break
        one = ours[session].pop(0)
        n_blocks = theirs["in"] // 64
        assert (one.prompt_tokens, one.output_tokens) == (theirs["in"], theirs["out"])
        assert one.text[: 8 * n_blocks] == blocks(*theirs["hash_ids"][:n_blocks])
        compared += 1
    assert compared > 500
    assert not any(ours[session] for session in whole)


@pytest.mark.parametrize("name", ["agent", "chat", "fewshot"])
def test_token_traces_share_a_text_within_their_sessions(data, name):
    trace = read_trace(data.parent / "peers" / "marconi" / "traces" / f"{name}.jsonl.zst")
    texts = {id(one.text) for one in trace.requests}
    sessions, requests = counts(trace)
    assert sessions <= len(texts) <= requests
    assert all(one.at is not None for one in trace.requests)


N = 20_000


def times(process, rate, cv=2.0, seed=0, n=N):
    return list(islice(PROCESSES[process](rate, cv, random.Random(seed)), n))


@pytest.mark.parametrize("rate", [0.2, 50.0])
@pytest.mark.parametrize(
    ("process", "cv", "spread"), [("poisson", 9.0, 1.0), ("gamma", 1.0, 1.0), ("gamma", 3.0, 3.0), ("constant", 9.0, 0)]
)
def test_the_rate_and_the_spread_of_gaps(process, cv, spread, rate):
    arrivals = times(process, rate, cv)
    gaps = [b - a for a, b in pairwise([0.0, *arrivals])]
    assert min(gaps) >= 0
    assert arrivals[-1] / N == pytest.approx(1 / rate, rel=0.06)
    assert statistics.stdev(gaps) * rate == pytest.approx(spread, rel=0.1, abs=1e-6)


@pytest.mark.parametrize("process", ["poisson", "gamma"])
def test_equal_seeds_give_equal_arrivals_and_others_do_not(process):
    assert times(process, 3.0, seed=1, n=50) == times(process, 3.0, seed=1, n=50)
    assert times(process, 3.0, seed=1, n=50) != times(process, 3.0, seed=2, n=50)


def session(name, n, *at):
    return Session(name, tuple(Turn(at=at[i] if at else None) for i in range(n)))


def test_sessions_take_turns_and_keep_their_own_order():
    order = [(s.id, turn) for s, turn in interleaved([session("a", 3), session("b", 1), session("c", 2)], at_once=2)]
    assert order == [("a", 0), ("b", 0), ("a", 1), ("c", 0), ("a", 2), ("c", 1)]


def test_each_turn_has_an_arrival_of_its_own():
    calls = list(scheduled(iter([1.0, 2.0, 4.0]), [session("a", 2), session("b", 1)], at_once=1))
    assert [(call.due, call.session.id, call.turn) for call in calls] == [(1.0, "a", 0), (2.0, "a", 1), (4.0, "b", 0)]


def test_recorded_times_begin_at_0_and_are_scaled():
    calls = as_recorded([session("a", 2, 100.0, 130.0), session("b", 1, 110.0)], speed=10.0)
    assert [(call.due, call.session.id, call.turn) for call in calls] == [(0.0, "a", 0), (1.0, "b", 0), (3.0, "a", 1)]
    assert [call.turn for call in as_recorded([session("a", 3, 2.0, 1.0, 3.0)], 1.0)] == [
        0,
        1,
        2,
    ]  # clocks may step back
    with pytest.raises(ValueError, match="c has no recorded times"):
        as_recorded([session("c", 1)], 1.0)
