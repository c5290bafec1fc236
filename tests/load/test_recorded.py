"""Recorded traffic: every form of a line, and errors with file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from headwater.errors import ConfigError
from headwater.load.recorded import read_sessions

SHARED = Path(__file__).parents[3] / "shared" / "data"


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def sessions_of(tmp_path, *lines, vocab=None):
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return list(read_sessions(path, vocab))


def test_a_session_has_a_turn_for_each_call(tmp_path):
    messages = [{"role": "system", "content": "s"}, user("a"), assistant("A"), user("b"), user("c"), assistant("C")]
    line = {"session": "x", "messages": messages, "calls": [2, 5], "t0": 100, "t": [0, 7]}
    line["branches"] = [{"at": 3, "messages": [user("z")], "reply": "Z"}]
    session, branch = sessions_of(tmp_path, line)
    assert session.id == "x"
    assert [turn.messages for turn in session.turns] == [tuple(messages[:2]), tuple(messages[3:5])]
    assert [(turn.reply, turn.at) for turn in session.turns] == [("A", 100.0), ("C", 107.0)]
    assert branch.turns[0].messages == (*messages[:3], user("z"))


def test_chat_ending_with_an_answer_has_a_turn_per_answer(tmp_path):
    (session,) = sessions_of(tmp_path, {"messages": [user("a"), assistant("A"), user("b"), assistant("B")]})
    assert [(turn.messages, turn.reply) for turn in session.turns] == [((user("a"),), "A"), ((user("b"),), "B")]


def test_requests_keep_their_fields(tmp_path):
    body = {"model": "gone", "messages": [user("a"), assistant("A"), user("b")], "max_tokens": 7, "top_p": 0.5}
    one, batch = sessions_of(tmp_path, body, {"custom_id": "1", "body": body, "t": 3.5})
    for session in (one, batch):
        (turn,) = session.turns
        assert (len(turn.messages), turn.output_tokens, turn.fields) == (3, 7, {"top_p": 0.5})
    assert (one.turns[0].at, batch.turns[0].at) == (None, 3.5)


def test_prompts_are_text_or_token_ids(tmp_path):
    lines = ({"prompt": "hi", "max_tokens": 3}, [1, 2], {"prompt_token_ids": [3]})
    assert [s.turns[0].prompt for s in sessions_of(tmp_path, *lines)] == ["hi", (1, 2), (3,)]


def test_equal_hashed_blocks_become_equal_tokens(tmp_path):
    lines = [
        {"timestamp": 1500, "input_length": 700, "output_length": 9, "hash_ids": [4, 5]},
        {"timestamp": 2500, "input_length": 1024, "output_length": 9, "hash_ids": [4, 6]},
    ]
    a, b = (session.turns[0] for session in sessions_of(tmp_path, *lines, vocab=100))
    assert (len(a.prompt), len(b.prompt), a.at, a.output_tokens) == (700, 1024, 1.5, 9)
    assert a.prompt[:512] == b.prompt[:512]
    assert a.prompt[512:] != b.prompt[512:700]
    assert max(b.prompt) < 100


def test_a_csv_has_lengths_and_times(tmp_path):
    path = tmp_path / "trace.csv.gz"
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900,30,4", "2023-11-16 18:15:48,5,6"]
    path.write_bytes(gzip.compress("\n".join(rows).encode()))
    a, b = (session.turns[0] for session in read_sessions(path, vocab=50))
    assert (len(a.prompt), a.output_tokens, len(b.prompt)) == (30, 4, 5)
    assert b.at - a.at == pytest.approx(1.31941)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{oops", "log.jsonl:1"),
        ("7", "must be an object"),
        ('{"text": 1}', "prompt"),
        ("[]", "empty"),
        ('{"messages": [], "calls": [3, 1]}', "must ascend"),
        ('{"messages": [{}, {}], "calls": [{"at": 1}]}', r"calls are .*must ascend from 1 to at most 1: each is"),
        ('{"messages": [{}, {}], "calls": 1}', "calls are 1, must ascend"),
        ('{"messages": ["hello", {}], "calls": [1]}', "no known form"),
        ('{"hash_ids": [1], "input_length": 3, "output_length": 1}', "--vocab"),
    ],
)
def test_invalid_request_is_named_with_its_line(tmp_path, line, part):
    path = tmp_path / "log.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=part):
        list(read_sessions(path))


@pytest.mark.parametrize(
    ("file", "sessions", "turns"),
    [("mtbench101/sessions.jsonl.zst", 1388, 4208), ("mini_swe_agent/sessions.jsonl.zst", 500, 20163)],
)
def test_recorded_sessions_have_the_requests_that_their_readme_counts(file, sessions, turns):
    pytest.importorskip("zstandard")
    if not (SHARED / file).is_file():
        pytest.skip(f"{file} is not there")
    counts = [len(session.turns) for session in read_sessions(SHARED / file)]
    assert (len(counts), sum(counts)) == (sessions, turns)
