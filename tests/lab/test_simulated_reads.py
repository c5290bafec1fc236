"""Simulated workers that read from stores and from others, with times added up by hand, and workers that fail."""

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from headwater.cluster import assigning, cost
from headwater.cluster.assigning import MAX_ATTEMPTS
from headwater.cluster.cost import Candidate, Prompt, Role
from headwater.cluster.router import HEARTBEAT_TIMEOUT_SECONDS
from headwater.errors import ConfigError
from headwater.lab.cluster.pulls import SimulatedPulls
from headwater.lab.cluster.simulation import FAILURE, Simulation
from headwater.lab.cluster.worker import SimulatedWorker
from headwater.lab.cost import Load
from headwater.lab.serving import Engine
from headwater.lab.setup import Cluster, Failures, Network, Setup
from headwater.lab.tally import WORKERS_LOST, Outcome, Tally
from headwater.lab.tiers import LATENCY_SECONDS, RUN_TOKENS, TierLaw
from headwater.models.profiles import load_profile
from headwater.traces.arrivals import at_times
from headwater.traces.read import make_trace
from headwater.traces.request import Request, Trace
from tests.lab.test_simulation import ENGINE, SETUP, routing, run, same, traffic

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
    monkeypatch.setattr(assigning, "prefiller", lambda prompt, candidates: 0)


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


OFTEN = Failures(14.0, 5.0)
NETWORK = Network.read("12.5GB/s")
NEVER = Failures(1e9)


@pytest.mark.parametrize(
    "cluster",
    [Cluster(3, "least_cost"), Cluster(3, "least_cost", 0.001, NETWORK), Cluster(3, "least_cost", 0.0, NETWORK, 1)],
    ids=["alone", "with pulls", "with prefill apart"],
)
def test_each_request_is_counted_once_and_answered(cluster: Cluster) -> None:
    whole, failing = run(cluster), run(replace(cluster, failures=OFTEN))
    assert whole.row.ttft_ms is not None
    assert failing.row.ttft_ms is not None
    assert failing.row.requests == len(failing.outcomes) == len(traffic().requests)
    assert all(one.ttft is not None for one in failing.outcomes)
    found = routing(failing)
    assert found.failed >= found.replaced > 5
    assert found.resumed > 10
    assert found.moved > 3
    assert found.given_up == 0
    assert failing.row.token_hit_rate < whole.row.token_hit_rate - 0.03  # caches are lost
    assert failing.row.ideal_hit_rate == whole.row.ideal_hit_rate
    assert failing.row.ttft_ms.mean > whole.row.ttft_ms.mean


def test_a_prefill_is_followed_by_the_worker_that_is_going_on(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, named = set[tuple[int, int]](), list[tuple[int, int]]()
    follow, name = SimulatedPulls.follow_prefill, SimulatedPulls.name

    def following(self, *prompt) -> int:
        number = follow(self, *prompt)
        begun.add((self.number, number))
        return number

    def naming(self, request, peers, followed) -> None:
        if followed is not None:
            named.append((self.number, followed))
        name(self, request, peers, followed)

    def prefiller(prompt: Prompt, candidates: Sequence[Candidate]) -> int | None:
        roles = [one.role for one in candidates]
        return roles.index(Role.PREFILL) if {Role.PREFILL, Role.DECODE} <= {*roles} else None

    monkeypatch.setattr(SimulatedPulls, "follow_prefill", following)
    monkeypatch.setattr(SimulatedPulls, "name", naming)
    monkeypatch.setattr(assigning, "prefiller", prefiller)
    run(Cluster(4, "least_cost", 0.0, NETWORK, 1, Failures(4.0, 1.0)))
    assert len(named) > 20
    assert set(named) <= begun


def test_segments_are_prepared_by_the_workers_that_are_left() -> None:
    trace = make_trace("rag(zipf=1, sessions=60, documents=60)", None)
    cluster = Cluster(3, "least_cost", 0.0, NETWORK, failures=Failures(1.0, 1.0))
    result = run(cluster, trace=trace)
    assert len(result.outcomes) == len(trace.requests)
    assert routing(result).combined > 5
    assert routing(result).moved + routing(result).resumed > 5


def test_a_seed_gives_one_result() -> None:
    cluster = Cluster(3, "least_cost", failures=OFTEN)
    first, second = run(cluster), run(cluster)
    assert same(first) == same(second)
    assert routing(first) == routing(second)


def one_request(failures: list[tuple[float, int]], cluster: Cluster) -> tuple[Simulation, Tally, Outcome]:
    """Simulate only the longest answer, and these workers' failures at these times."""
    request = max(traffic().requests, key=lambda one: one.output_tokens)
    trace = Trace("one", [replace(request, session="0")])
    arrivals = at_times(trace.requests, [1.0])
    simulation = Simulation(trace, replace(SETUP, cluster=cluster), cluster, arrivals, ENGINE)
    for at, worker in failures:
        heapq.heappush(simulation._events, (at, FAILURE, worker))
    tally = simulation.run()
    (outcome,) = tally.outcomes
    return simulation, tally, outcome


def test_answer_continues_after_the_sent_tokens() -> None:
    _, plain, whole = one_request([], Cluster(2, "round_robin"))
    assert whole.ttft is not None
    n = whole.output_tokens
    seconds = plain.token_seconds[0] * (n - 1)
    failure = 1.0 + whole.ttft + seconds / 2
    simulation, tally, outcome = one_request([(failure, 0)], Cluster(2, "round_robin", failures=NEVER))
    assert simulation.routing.resumed == 1
    assert simulation.routing.moved == 0
    assert outcome.ttft == whole.ttft
    # the prompt is computed again, and half of the answer by several rows a step
    lost = tally.token_seconds[0] * (n - 1) - seconds
    assert HEARTBEAT_TIMEOUT_SECONDS + whole.ttft < lost < HEARTBEAT_TIMEOUT_SECONDS + whole.ttft + seconds / 2


def test_request_without_a_token_restarts_and_its_ttft_covers_both() -> None:
    _, _, whole = one_request([], Cluster(2, "round_robin"))
    assert whole.ttft is not None
    simulation, _, outcome = one_request([(1.0 + whole.ttft / 2, 0)], Cluster(2, "round_robin", failures=NEVER))
    assert (simulation.routing.resumed, simulation.routing.moved) == (0, 1)
    assert outcome.ttft == pytest.approx(whole.ttft / 2 + HEARTBEAT_TIMEOUT_SECONDS + whole.ttft)
    assert outcome.ideal == whole.ideal


def test_failed_worker_gets_requests_until_its_timeout_and_is_replaced() -> None:
    _, _, whole = one_request([], Cluster(1, "round_robin"))
    assert whole.ttft is not None
    simulation, _, outcome = one_request([(0.9, 0)], Cluster(1, "round_robin", failures=Failures(1e9, 5.0)))
    assert simulation.routing.replaced == 1
    assert [share.requests for share in simulation.routing.workers] == [0, 1]
    assert outcome.ttft == pytest.approx(0.9 + 5.0 - 1.0 + whole.ttft)


def test_a_request_gets_an_error_after_as_many_workers_as_are_tried() -> None:
    _, _, whole = one_request([], Cluster(1, "round_robin"))
    assert whole.ttft is not None
    failures = [(1.0 + whole.ttft / 2 + n * (1.0 + whole.ttft / 2), n) for n in range(MAX_ATTEMPTS)]
    cluster = Cluster(1, "round_robin", failures=Failures(1e9, 1.0))
    simulation, _, outcome = one_request(failures, cluster)
    assert (simulation.routing.failed, simulation.routing.given_up) == (MAX_ATTEMPTS, 1)
    assert (outcome.reason, outcome.ttft) == (WORKERS_LOST, None)
    simulation, _, outcome = one_request(failures[:-1], cluster)
    assert (simulation.routing.given_up, outcome.reason) == (0, "cold")


def test_only_positive_times_are_accepted() -> None:
    assert Failures.read("off") is None
    assert str(Failures.read("600s")) == "600s"
    assert Failures.read("600s/30s") == Failures(600.0, 30.0)
    for text in ("0s", "600", "-1s", "600s/", "often"):
        with pytest.raises(ConfigError, match="must be off or EVERY"):
            Failures.read(text)
