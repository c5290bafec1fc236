"""Histories collapsed as by SWE-agent's processor: older observations become a line."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from headwater.errors import ConfigError
from headwater.traces.read import make_trace
from headwater.traces.sessions import collapsed
from tests.traces.shared import shared_tokens

STEPS = 9


def messages() -> list[dict[str, str]]:
    found = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": "Solve the task."}]
    for step in range(STEPS):
        found.append({"role": "assistant", "content": f"action {step}"})
        found.append({"role": "user", "content": "\n".join(f"line {n} of {step}" for n in range(step + 1))})
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    calls = list(range(2, 2 + 2 * STEPS, 2))
    session = {"session": "one", "messages": messages(), "calls": calls, "t0": 100, "t": list(range(STEPS))}
    path = tmp_path / "sessions.jsonl"
    path.write_text(json.dumps(session) + "\n")
    return path


def test_the_task_and_the_last_observations_stay() -> None:
    found = [message["content"] for message in collapsed(messages(), 5)]
    assert found[:2] == ["You are an agent.", "Solve the task."]
    stubs = [f"Old environment output: ({n + 1} lines omitted)" for n in range(STEPS - 5)]
    assert found[3:11:2] == stubs
    assert found[11::2] == [message["content"] for message in messages()[11::2]]
    assert found[2::2] == [f"action {step}" for step in range(STEPS)]


def test_short_histories_stay_whole() -> None:
    assert list(collapsed(messages()[:12], 5)) == messages()[:12]
    assert list(collapsed(messages(), STEPS)) == messages()


def test_each_prompt_shares_tokens_before_the_next_collapsed_observation(file: Path) -> None:
    whole = make_trace(str(file)).requests
    requests = make_trace(f"collapsed({str(file)!r}, last=5)").requests
    assert [one.at for one in requests] == [one.at for one in whole]
    assert [one.prompt_tokens for one in requests[:6]] == [one.prompt_tokens for one in whole[:6]]
    for step, (a, b) in enumerate(pairwise(requests)):
        if step < 5:
            assert shared_tokens(a, b) == a.prompt_tokens
        else:  # up to the header of the collapsed observation's message
            assert requests[step - 5].known_tokens < shared_tokens(a, b) < a.prompt_tokens


def test_turns_are_counted_from_the_beginning(file: Path) -> None:
    assert len(make_trace(f"collapsed({str(file)!r}, turns=4)").requests) == 4


def test_a_share_of_the_sessions_collapses(file: Path, tmp_path: Path) -> None:
    session = json.loads(file.read_text())
    many = tmp_path / "many.jsonl"
    many.write_text("".join(json.dumps({**session, "session": f"s{n}"}) + "\n" for n in range(8)))
    whole, short = (make_trace(f"{read}").requests[-1].prompt_tokens for read in (file, f"collapsed({str(file)!r})"))
    requests = make_trace(f"collapsed({str(many)!r}, share=0.25)").requests
    last = {one.session: one.prompt_tokens for one in requests}
    assert list(last.values()) == [whole, whole, whole, short] * 2


def test_sessions_without_a_name_are_numbered(file: Path, tmp_path: Path) -> None:
    session = {name: value for name, value in json.loads(file.read_text()).items() if name != "session"}
    nameless = tmp_path / "nameless.jsonl"
    nameless.write_text("".join(json.dumps(session) + "\n" for _ in range(2)))
    requests = make_trace(f"collapsed({str(nameless)!r})").requests
    assert list(dict.fromkeys(one.session for one in requests)) == ["0", "1"]


def test_options_out_of_range(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"share is 1\.5, must be from 0 to 1"):
        make_trace(f"collapsed({str(file)!r}, share=1.5)")
    with pytest.raises(ConfigError, match="last is 0"):
        make_trace(f"collapsed({str(file)!r}, last=0)")
