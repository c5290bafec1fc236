"""Scripted chains: what a fork shares, and what LRU has evicted of it when it comes."""

from __future__ import annotations

import pytest

from headwater.errors import ConfigError
from headwater.lab.replay import replay
from headwater.lab.row import Result
from headwater.lab.setup import Setup
from headwater.models.profiles import load_profile
from headwater.traces.loads import make_arrivals
from headwater.traces.read import make_trace
from tests.traces.shared import shared_tokens

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
