"""A seed draws a kind of traffic and its requests: the same everywhere, and no two seeds alike."""

import hashlib
from itertools import pairwise

import pytest

from headwater.errors import ConfigError
from headwater.traces.generated.behaviours import BEHAVIOURS
from headwater.traces.generated.dice import Dice
from headwater.traces.generated.traffic import Generated, Kind
from headwater.traces.read import make_trace
from headwater.traces.request import Trace

SEEDS = range(200)
DIGESTS = {
    0: "bab82773a4020a3c",
    4: "8417b83ac10861f3",
    6: "b23ebed5dac994bd",
    9: "8556402c14f6604a",
    12: "d6d65d838e32278d",
    17: "d0b0d846577ae358",
}


def digest(trace: Trace) -> str:
    """Return a digest of everything that a replay sees of a trace."""
    found = hashlib.sha256()
    for one in trace.requests:
        head = one.session, one.namespace, one.prompt_tokens, one.output_tokens, one.known_tokens, one.at
        assert not one.boundaries.retained
        seen = repr((*head, one.boundaries)).replace(", retained=()", "")  # the digests are older than retentions
        found.update(seen.encode())
        found.update(one.text[: 4 * one.known_tokens])
    return found.hexdigest()[:16]


@pytest.mark.parametrize("seed", DIGESTS)
def test_a_seed_gives_the_same_requests_on_every_machine(seed: int) -> None:
    assert digest(make_trace(f"generated({seed}, requests=300)")) == DIGESTS[seed]


def test_no_two_seeds_are_alike() -> None:
    kinds = [Generated(seed).kind() for seed in SEEDS]
    assert len(set(kinds)) == len(SEEDS)
    assert len({digest(make_trace(f"generated({seed}, requests=20)")) for seed in SEEDS[::5]}) == len(SEEDS[::5])


def test_each_behaviour_and_mixture_appears_in_the_seeds_of_both_halves() -> None:
    for half in (range(100), range(100, 200)):
        kinds = [Generated(seed).kind() for seed in half]
        assert {source.name for kind in kinds for source in kind.sources} == set(BEHAVIOURS)
        assert {len(kind.sources) for kind in kinds} == {1, 2, 3, 4}
        assert {len(kind.phases) for kind in kinds} == {1, 2, 3}
        assert {kind.tenants for kind in kinds} == {1, 2, 4, 8}
        agents = [s.behaviour for kind in kinds for s in kind.sources if s.name == "agents"]
        assert {one.keeps for one in agents} == {0, 5}
        assert all(any(getattr(one, name) for one in agents) for name in ("subagents", "forks"))
        chats = [s.behaviour for kind in kinds for s in kind.sources if s.name == "chats"]
        assert all(any(getattr(one, name) for one in chats) for name in ("living", "returns", "edits"))
        assert any(kind.retries for kind in kinds)


def test_another_seed_of_the_draws_gives_other_requests_of_the_same_kind() -> None:
    one, same, other = (make_trace("generated(3, requests=200)", seed=seed) for seed in (0, 0, 1))
    assert digest(one) == digest(same) != digest(other)
    assert one.notes == other.notes


def test_requests_come_in_order_and_in_the_number_asked_for() -> None:
    for seed in range(0, 20, 2):
        trace = make_trace(f"generated({seed}, requests=200)")
        times = [one.at for one in trace.requests]
        assert all(a is not None and b is not None and a <= b for a, b in pairwise(times))
        assert 200 <= len(trace.requests) < 800  # the last session of each source is whole
        last: dict[str, float] = {}
        for one in trace.requests:
            assert one.at is not None
            assert last.get(one.session, 0) <= one.at
            last[one.session] = one.at


def test_notes_describe_the_drawn_traffic() -> None:
    *sources, last = make_trace("generated(0, requests=20)").notes
    assert len(sources) == len(Generated(0).kind().sources)
    assert "in phase" in sources[0]
    assert "phases end after" in last


def test_a_limit_is_of_sessions() -> None:
    trace = make_trace("generated(5, requests=200)", limit=7)
    assert len({one.session for one in trace.requests}) == 7


def test_shares_make_the_whole() -> None:
    for seed in SEEDS:
        assert sum(source.share for source in Kind.drawn(Dice(0, seed)).sources) == 1000


def test_options_out_of_range() -> None:
    with pytest.raises(ConfigError, match="seed is -1"):
        make_trace("generated(-1)")
    with pytest.raises(ConfigError, match="requests are 0"):
        make_trace("generated(1, requests=0)")
