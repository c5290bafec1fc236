"""Chains of blocks, and traces with their equal parts collapsed."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from headwater.errors import ConfigError
from headwater.lab.replay import replay
from headwater.lab.row import Result
from headwater.lab.setup import Setup
from headwater.models.profiles import load_profile
from headwater.traces.loads import make_arrivals
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


GRANITE = load_profile("granite-4.0-h-small")
CHAINS = "forked_chains(chains=3, tokens=32768, turn=2048, fork=8192)"


def run(spelling: str, memory: float, eviction: str) -> Result:
    trace = make_trace(spelling)
    return replay(trace, Setup(GRANITE, int(memory), "branch", eviction), make_arrivals(trace))


def test_chains_share_nothing_and_the_fork_its_first_8192_tokens() -> None:
    requests = make_trace(CHAINS).requests
    *chains, fork, again, _, _ = requests
    assert [one.prompt_tokens for one in chains[:3]] == [1792, 3840, 5888]
    assert [one.known_tokens for one in chains[15::16]] == [32_768] * 3
    assert shared_tokens(chains[0], chains[16]) == shared_tokens(chains[16], chains[32]) == 0
    assert shared_tokens(fork, chains[15]) == 8_192
    assert shared_tokens(again, chains[15]) == chains[15].prompt_tokens
    assert [one.at for one in requests] == sorted(one.at or 0 for one in requests)


def test_state_at_the_fork_is_evicted_by_lru_but_not_clairvoyant() -> None:
    """All KV fits and most states: LRU gives up the shallow ones, which were used first."""
    assert run(CHAINS, 5.4e9, "lru").outcomes[-4].resumed_at == 0
    assert run(CHAINS, 5.4e9, "lru").outcomes[-2].resumed_at == 32_768
    assert run(CHAINS, 5.4e9, "clairvoyant").outcomes[-4].resumed_at == 8_192
    assert run(CHAINS, 50e9, "lru").outcomes[-4].resumed_at == 8_192


def test_a_compacted_history_is_forked_back_to() -> None:
    spelling = "compacted(sessions=3, tokens=24576)"
    requests = make_trace(spelling).requests
    first, back = requests[11], requests[-3]
    assert (first.known_tokens, back.session) == (24_576, first.session)
    assert shared_tokens(back, requests[12]) == 0
    assert back.text[: 4 * first.known_tokens] == first.text[: 4 * first.known_tokens]
    assert run(spelling, 4.4e9, "lru").outcomes[-3].resumed_at == 0
    assert run(spelling, 4.4e9, "clairvoyant").outcomes[-3].resumed_at == 24_576


def test_lengths_are_whole_turns() -> None:
    with pytest.raises(ConfigError, match="fork is 8,000, must be a multiple of turn, 2,048"):
        make_trace("forked_chains(fork=8000)")
    with pytest.raises(ConfigError, match="turn is 256 tokens"):
        make_trace("compacted(turn=256)")
