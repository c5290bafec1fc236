"""The shared traces have the counts that their READMEs state."""

from __future__ import annotations

import importlib.util
from itertools import islice
from pathlib import Path

import pytest

from headwater.traces.arrivals import in_order
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
