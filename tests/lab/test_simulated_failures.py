"""Workers that fail in simulated clusters: their requests continue on others, and each is counted once."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

import pytest

from headwater.cluster import selection
from headwater.cluster.assigning import MAX_ATTEMPTS
from headwater.cluster.cost import Candidate, Prompt, Role
from headwater.cluster.router import HEARTBEAT_TIMEOUT_SECONDS
from headwater.errors import ConfigError
from headwater.lab.cluster.pulls import SimulatedPulls
from headwater.lab.cluster.simulation import FAILURE, Simulation
from headwater.lab.setup import Cluster, Failures, Network
from headwater.lab.tally import WORKERS_LOST, Outcome, Tally
from headwater.traces.arrivals import at_times
from headwater.traces.read import make_trace
from headwater.traces.request import Trace
from tests.lab.test_simulation import ENGINE, SETUP, routing, run, same, traffic

OFTEN = Failures(20.0, 5.0)
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
    assert failing.row.requests == len(failing.outcomes) == len(traffic().requests) > 150
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
    monkeypatch.setattr(selection, "prefiller", prefiller)
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
