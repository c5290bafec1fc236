"""Reads of simulated workers, with times that are added up by hand: of a store, of others, and of prefills elsewhere.

A token of a prompt takes a millisecond, a step that decodes ten. A run of KV (1,024 tokens) takes 0.1 s by network.
"""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest

from headwater.cluster import cost, selection
from headwater.lab.cluster.simulation import Simulation
from headwater.lab.cluster.worker import SimulatedWorker
from headwater.lab.cost import Load
from headwater.lab.serving import Engine
from headwater.lab.setup import Cluster, Network, Setup
from headwater.lab.tiers import LATENCY_SECONDS, RUN_TOKENS, TierLaw
from headwater.models.profiles import load_profile
from headwater.traces.arrivals import at_times
from headwater.traces.request import Request, Trace

PROFILE = load_profile("qwen3.5-9b")
PAGE = PROFILE.bytes_of_page(64)
RUN = PROFILE.kv_bytes_per_token * RUN_TOKENS
PULL = 0.1  # seconds of a run by network
LINK = Network(round(RUN / PULL), latency=0.01)
STORE = 0.05  # seconds of a run from a store
STEP = 1024
END = 2944  # the last page of 3,000 tokens
REST = (3000 - END) * 1e-3


def seconds(load: Load, steps: int = 1) -> float:
    return steps * (1e-3 * load.prefill_tokens + 1e-2 * bool(load.rows))


def asked(session: str, tokens: int = 3000, output: int = 3, first: int = 0) -> Request:
    """A request of which nothing but the prompt is known."""
    text = array("I", range(first, first + tokens)).tobytes()
    return Request(session, text, tokens, output, tokens)


def simulated(
    requests: list[Request], times: list[float], cluster: Cluster, pages: int = 1000, tier: str = "off"
) -> Simulation:
    trace = Trace("made", requests)
    setup = Setup(PROFILE, pages * PAGE, eviction="lru", tier=TierLaw.read(tier), cluster=cluster)
    engine = Engine(SimpleNamespace(seconds=seconds), max_running=4, tokens_per_step=STEP)  # type: ignore[arg-type]
    return Simulation(trace, setup, cluster, at_times(requests, times), engine)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each prompt be prefilled apart."""
    monkeypatch.setattr(selection, "prefiller", lambda prompt, candidates: 0)


def state_seconds(one: Simulation) -> float:
    return one.pulls[0]._sizes.bytes(True, 0) / LINK.bandwidth


def test_a_prefill_is_read_while_it_is_computed(apart: None) -> None:
    """Three steps of 1,024, 1,024 and 952 tokens: at the first token, 896 tokens and the state are still to be read."""
    one = simulated([asked("a")], [0.0], Cluster(2, "least_cost", network=LINK, prefill=1))
    tally = one.run()
    assert [outcome.ttft for outcome in tally.outcomes] == [pytest.approx(3.0)]
    left = LINK.latency + PULL * (END - 2048) / RUN_TOKENS + state_seconds(one)
    assert tally.token_seconds == [pytest.approx((left + REST + 0.02) / 2)]
    assert (one.routing.followed, one.routing.pulled, one.routing.handed_over) == (1, 0, 1)


def test_a_link_that_is_slower_than_the_prefill_is_never_idle(apart: None) -> None:
    """Two seconds a run: it begins with the first step's end, and has two waits for a part."""
    slow = Network(round(RUN / 2.0), latency=0.01)
    one = simulated([asked("a")], [0.0], Cluster(2, "least_cost", network=slow, prefill=1))
    tally = one.run()
    state = one.pulls[0]._sizes.bytes(True, 0) / slow.bandwidth
    ends = 1.024 + 3 * slow.latency + 2.0 * END / RUN_TOKENS + state  # a run, a run, and the rest
    assert tally.token_seconds == [pytest.approx((ends - 3.0 + REST + 0.02) / 2)]
    assert one.routing.followed == 1


def test_a_prefix_that_is_not_followed_is_pulled_after_its_prefill(apart: None, monkeypatch) -> None:
    one = simulated([asked("a")], [0.0], Cluster(2, "least_cost", network=LINK, prefill=1))
    monkeypatch.setattr(one, "_follow", lambda *given: None)
    tally = one.run()
    whole = LINK.latency + PULL * END / RUN_TOKENS + state_seconds(one)
    assert tally.token_seconds == [pytest.approx((whole + REST + 0.02) / 2)]
    assert (one.routing.followed, one.routing.pulled) == (0, 1)


def test_sooner_one_of_store_and_peer_is_read() -> None:
    """The first worker loads from its store what it has lost; the second one pulls from it."""
    tier = f"100GB@{round(RUN / STORE)}B/s"
    requests = [asked("a", output=1), asked("b", output=1)]
    one = simulated(requests, [0.0, 10.0], Cluster(2, "round_robin", network=LINK), tier=tier)
    tally = one.run()
    first, second = (outcome.ttft for outcome in tally.outcomes)
    assert first == pytest.approx(3.0)
    assert second == pytest.approx(LINK.latency + PULL * END / RUN_TOKENS + state_seconds(one) + REST)
    assert one.routing.pulled == 1


def test_each_worker_has_its_own_store_and_the_network() -> None:
    """A prompt is lost in memory to a longer one, and comes back from the store, at the store's speed."""
    tier = f"100GB@{round(RUN / STORE)}B/s"
    requests = [asked("a", output=1), asked("b", 6000, 1, 10**6), asked("c", output=1)]
    states = -(-PROFILE.checkpoint_bytes // PAGE)
    one = simulated(requests, [0.0, 10.0, 20.0], Cluster(1, "round_robin", network=LINK), 94 + 2 * states, tier)
    tally = one.run()
    loads = one.workers[0].serving.tiers
    assert loads is not None
    stored = loads._sizes.bytes(True, END) / (RUN / STORE)
    assert [outcome.resumed_at for outcome in tally.outcomes] == [0, 0, END]
    assert loads.loaded_tokens == END
    assert tally.outcomes[2].ttft == pytest.approx(LATENCY_SECONDS + stored + REST)


@pytest.mark.parametrize("is_published", [True, False])
def test_prompt_is_routed_to_the_worker_that_stores_it(monkeypatch: pytest.MonkeyPatch, is_published: bool) -> None:
    """The first worker has lost it in memory, and the rule prefers the second one if both cost as much."""
    wishes = iter(("w0", "w0", "w1"))
    monkeypatch.setattr(cost, "preferred", lambda names, key: next(wishes))
    if not is_published:
        monkeypatch.setattr(SimulatedWorker, "publish_store", lambda worker: None)
    requests = [asked("a", output=1), asked("b", 6000, 1, 10**6), asked("c", output=1)]
    states, tier = -(-PROFILE.checkpoint_bytes // PAGE), f"100GB@{round(RUN / STORE)}B/s"
    one = simulated(requests, [0.0, 10.0, 20.0], Cluster(2, "least_cost"), 94 + 2 * states, tier)
    tally, loads = one.run(), one.workers[0].serving.tiers
    assert loads is not None
    loading = LATENCY_SECONDS + loads._sizes.bytes(True, END) / (RUN / STORE)
    assert tally.outcomes[2].ttft == pytest.approx(loading + REST if is_published else 3.0)
    assert [share.requests for share in one.routing.workers] == ([3, 0] if is_published else [2, 1])
    found = one.routing
    assert (found.expected_loads, found.loaded, found.missed_loads) == (is_published, is_published, 0)
    assert (found.as_predicted, found.gained_waiting, found.lost_waiting) == (3, 0, 0)


def test_a_slow_store_is_not_counted() -> None:
    """Reading a run takes two seconds, computing it one: the rule expects no load, and none comes."""
    requests = [asked("a", output=1), asked("b", 6000, 1, 10**6), asked("c", output=1)]
    states, tier = -(-PROFILE.checkpoint_bytes // PAGE), f"100GB@{round(RUN / 2.0)}B/s"
    one = simulated(requests, [0.0, 10.0, 20.0], Cluster(1, "least_cost"), 94 + 2 * states, tier)
    assert one.run().outcomes[2].ttft == pytest.approx(3.0)
    assert (one.routing.expected_loads, one.routing.loaded) == (0, 0)
