"""Simulated clusters: one worker is one server, turns are separate servers, and predictions come true."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest

from benchmarks import routers
from benchmarks.routed_traffic import Processes
from headwater.cluster import assigning
from headwater.cluster.cost import Candidate, Prompt
from headwater.errors import ConfigError
from headwater.lab.cluster.rivals import CHOICES
from headwater.lab.cluster.simulation import Simulation, simulate
from headwater.lab.cost import StepCost, load_device
from headwater.lab.replay import replay, timed
from headwater.lab.row import Result, Routing
from headwater.lab.serving import Engine
from headwater.lab.setup import Cluster, Network, Setup
from headwater.lab.speculation import Law
from headwater.lab.tiers import TierLaw
from headwater.models.profiles import load_profile
from headwater.schedule.sequence import Purpose
from headwater.schedule.tiers import Tiers
from headwater.traces.arrivals import at_times
from headwater.traces.loads import make_arrivals
from headwater.traces.read import make_trace
from headwater.traces.request import Trace

PROFILE = load_profile("qwen3.5-9b")
ENGINE = Engine(StepCost(PROFILE, load_device("h100")), max_running=8)
SETUP = Setup(PROFILE, 4 * 10**9, eviction="headwater")
FAST = "poisson(rate=8, think=1)"
COUNTS = {
    "tiers": None,
    "scheduler": SimpleNamespace(speculation=SimpleNamespace(accepted=0, rejected=0), tiers=Tiers()),
}
ALONE = "poisson(rate=0.01, think=100)"  # one request is answered before the next one comes


@cache
def traffic(seed: int = 17, requests: int = 60) -> Trace:
    return make_trace(f"generated({seed}, requests={requests})", None)


def run(cluster: Cluster, arrival: str = FAST, setup: Setup = SETUP, trace: Trace | None = None) -> Result:
    trace = trace or traffic()
    return simulate(trace, replace(setup, cluster=cluster), make_arrivals(trace, arrival), ENGINE)


def routing(result: Result) -> Routing:
    assert result.row.cluster is not None
    return result.row.cluster


def same(result: Result) -> Result:
    """Return a result without the figures of the process, and of the router."""
    return replace(result, row=replace(result.row, seconds=0.0, peak_rss_mb=0.0, cluster=None))


@pytest.mark.parametrize(
    "setup",
    [
        SETUP,
        replace(SETUP, memory=2 * 10**9),
        replace(SETUP, eviction="none"),
        replace(SETUP, tier=TierLaw.read("100GB@2GB/s")),
        replace(SETUP, tier=TierLaw.read("100GB@0.05GB/s/always")),  # all that wait are asked about at each step
        replace(SETUP, speculation=Law.read("4@0.7"), running=8),
    ],
    ids=["usual", "short of memory", "without a cache", "with a tier", "with a slow tier", "with drafts"],
)
def test_one_worker_is_one_server(setup: Setup) -> None:
    alone = replay(traffic(), setup, make_arrivals(traffic(), FAST), ENGINE)
    assert (alone.row.loaded_tokens > 10_000) == (setup.tier is not None)
    assert same(run(Cluster(1, "least_cost"), setup=setup)) == same(alone)


def test_the_queue_is_averaged_over_the_time_of_the_whole_run() -> None:
    result = replay(traffic(), SETUP, make_arrivals(traffic(), FAST), ENGINE)
    servings = [
        SimpleNamespace(**{**COUNTS, "waited": waited, "now": now}) for waited, now in ((30.0, 10.0), (5.0, 20.0))
    ]
    assert timed(result, servings).row.queue_depth == (30 + 5) / 20


def test_segments_are_those_of_one_server() -> None:
    trace = make_trace("rag(zipf=1, sessions=20, documents=20)", None)
    alone = replay(trace, SETUP, make_arrivals(trace, FAST), ENGINE)
    assert same(run(Cluster(1, "round_robin"), trace=trace)) == same(alone)


def test_a_seed_gives_one_result() -> None:
    first, second = (run(Cluster(3, "least_cost", 0.01)) for _ in range(2))
    assert same(first) == same(second)
    assert routing(first) == routing(second)


def test_turns_are_separate_servers() -> None:
    requests = [replace(request, session=str(n)) for n, request in enumerate(traffic().requests)]
    trace, times = replace(traffic(), requests=requests), [0.05 * n for n in range(len(requests))]
    setup = replace(SETUP, cluster=Cluster(3, "round_robin"))
    together = simulate(trace, setup, at_times(requests, times), ENGINE)
    for n, share in enumerate(routing(together).workers):
        part = replace(trace, requests=requests[n::3])
        apart = replay(part, SETUP, at_times(part.requests, times[n::3]), ENGINE)
        mine = {request.session for request in part.requests}
        found = [one for one in together.outcomes if one.session in mine]
        for one, other in zip(found, apart.outcomes, strict=True):
            assert (one.session, one.resumed_at, one.reason) == (other.session, other.resumed_at, other.reason)
            assert one.ttft == pytest.approx(other.ttft, rel=1e-9)
        assert (share.requests, share.token_hit_rate) == (apart.row.requests, apart.row.token_hit_rate)


@pytest.mark.parametrize("rule", CHOICES)
def test_every_rule_answers_every_request(rule: str) -> None:
    result = run(Cluster(4, rule))
    shares = routing(result).workers
    assert sum(share.requests for share in shares) == result.row.requests == len(traffic().requests)
    assert result.row.ttft_ms is not None


def test_predictions_without_delay_are_exact_without_queues() -> None:
    counts = routing(run(Cluster(3, "least_cost"), ALONE))
    assert counts.as_predicted == len(traffic().requests)
    assert counts.lost_waiting == counts.gained_waiting == 0


def test_evictions_of_a_step_are_published_before_it_ends() -> None:
    tight = replace(SETUP, memory=2 * 10**9)
    result = run(Cluster(2, "least_cost"), setup=tight)
    assert result.row.evictions["checkpoint"] > 100
    assert routing(result).as_predicted == len(traffic().requests)


def test_late_events_make_wrong_predictions() -> None:
    tight = replace(SETUP, memory=2 * 10**9)
    late = routing(run(Cluster(2, "round_robin", event_delay=2.0), "poisson(rate=20, think=0.1)", tight))
    assert late.more > 0, "what was stored meanwhile is not known"
    assert late.less > 0, "what was evicted meanwhile is thought to be there"
    assert late.as_predicted + late.more + late.less == len(traffic().requests)


def test_a_change_while_a_request_waits_is_counted_apart() -> None:
    busy = routing(run(Cluster(2, "least_cost"), "poisson(rate=100, think=0)"))
    assert busy.gained_waiting > 0, "a request waits for the prefix that another one computes"
    assert busy.as_predicted == len(traffic().requests)


def test_workers_that_have_measured_nothing_get_requests() -> None:
    shares = routing(run(Cluster(4, "least_cost"), "poisson(rate=40, think=1)", trace=traffic(requests=150))).workers
    assert min(share.requests for share in shares) > 10


def test_no_worker_stays_without_the_system_prompt_of_all_requests() -> None:
    documents = traffic(27, 200)
    shares = routing(run(Cluster(12, "least_cost", 0.001), "poisson(rate=4, think=1)", trace=documents)).workers
    assert min(share.requests for share in shares) > 0


def test_session_continues_after_a_refused_request() -> None:
    small = replace(SETUP, memory=4 * 10**8)
    result = run(Cluster(1, "least_cost"), "poisson(rate=8, think=0)", small)
    assert result.row.requests == len(traffic().requests)
    assert any(one.ttft is None for one in result.outcomes), "a request is too large for the memory"


def test_a_cluster_needs_a_clock_and_a_known_rule() -> None:
    with pytest.raises(ConfigError, match="give a device with --serve"):
        simulate(traffic(), replace(SETUP, cluster=Cluster(2, "least_cost")), make_arrivals(traffic(), FAST))
    with pytest.raises(ConfigError, match="router 'best' is unknown; there are aibrix"):
        run(Cluster(2, "best"))


# -- pulls

FAST_NETWORK = Network(10**11)


def test_hot_prefixes_are_pulled_and_save_computing() -> None:
    clusters = [Cluster(4, "least_loaded", network=one) for one in (None, FAST_NETWORK)]
    without, pulled = (run(one, trace=traffic(requests=80)).row for one in clusters)
    assert pulled.cluster is not None
    assert pulled.cluster.pulled > 10
    assert pulled.loaded_tokens > 100_000
    assert without.loaded_tokens == 0
    assert pulled.token_hit_rate > without.token_hit_rate + 0.1
    assert pulled.ttft_ms.mean < 0.8 * without.ttft_ms.mean


def test_workers_measure_the_seconds_of_a_long_prefill() -> None:
    setup = replace(SETUP, cluster=Cluster(3, "least_cost"))
    simulation = Simulation(traffic(), setup, setup.cluster, make_arrivals(traffic(), FAST), ENGINE)
    simulation.run()
    for worker in simulation.workers:
        speed = worker._meter.backlog(worker.serving.scheduler).prefill
        for tokens in (8192, 32768):
            assert speed.seconds(0, tokens) == pytest.approx(worker.serving.prefill_seconds(tokens), rel=0.2)


def test_pulls_end_with_all_pages_given_back() -> None:
    setup = replace(SETUP, memory=2 * 10**9, cluster=Cluster(3, "least_loaded", network=FAST_NETWORK))
    simulation = Simulation(traffic(), setup, setup.cluster, make_arrivals(traffic(), FAST), ENGINE)
    simulation.run()
    assert sum(one.pulled for one in simulation.pulls) > 5
    for worker, pulls in zip(simulation.workers, simulation.pulls, strict=True):
        assert not worker.serving.cache.leases
        assert not pulls._pulling
        worker.serving.cache.check()


def test_a_slow_network_and_one_worker_pull_nothing() -> None:
    for cluster in (Cluster(3, "least_loaded", network=Network(10**6)), Cluster(1, "least_cost", network=FAST_NETWORK)):
        result = run(cluster)
        assert routing(result).pulled == result.row.loaded_tokens == 0
        assert same(result) == same(run(replace(cluster, network=None)))


@pytest.mark.parametrize("text", ["off", "10GB/s", "10GB/s@0.5ms"])
def test_networks_are_spelled(text: str) -> None:
    network = Network.read(text)
    assert str(network or "off") == text


@pytest.mark.parametrize("text", ["10GB", "0GB/s", "fast", "10GB/s@1s"])
def test_invalid_network_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError):
        Network.read(text)


def test_prompts_prefilled_apart_are_answered_once() -> None:
    plain, apart = (run(Cluster(4, "least_cost", 0.001, FAST_NETWORK, prefill)) for prefill in (0, 2))
    found = routing(apart)
    assert (routing(plain).handed_over, found.prefill) == (0, 2)
    assert 0 < found.handed_over < apart.row.requests, "short prompts, and those that are cached, are not"
    assert sum(share.requests for share in found.workers) == apart.row.requests == plain.row.requests
    assert sorted(one.output_tokens for one in apart.outcomes) == sorted(one.output_tokens for one in plain.outcomes)
    assert found.pulled + found.followed >= found.handed_over - found.pulls_failed
    assert found.followed > 0.8 * found.handed_over, "nearly all are read meanwhile"


@pytest.mark.parametrize("home", ["w0", "w1", None])
def test_handed_over_answers_are_prefilled_by_one_worker(home: str | None) -> None:
    """The worker by the rule; without one, the decoder, where no other request is delayed."""

    def rule(answer: Prompt, candidates: list[Candidate], decoded: str) -> int:
        assert decoded == "w1"
        return next(i for i, one in enumerate(candidates) if one.name == home)

    trace = traffic(requests=40)
    setup = replace(SETUP, cluster=Cluster(2, "least_cost", 0.0, FAST_NETWORK, prefill=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assigning, "prefiller", lambda prompt, candidates: 0)
        if home is not None:
            patch.setattr(assigning, "keeper", rule)
        simulation = Simulation(trace, setup, setup.cluster, make_arrivals(trace, ALONE), ENGINE)
        simulation.run()
    computed = {one.name: one.serving.scheduler.computed[Purpose.ANSWER] for one in simulation.workers}
    assert (computed["w0"] > 1000, computed["w1"] > 1000) == (home == "w0", home != "w0")
    assert min(computed.values()) == 0
    assert (simulation.routing.answers_apart > 10) == (home == "w0")
    assert simulation.routing.as_predicted == 2 * simulation.routing.handed_over


def test_answers_stay_at_their_decoder_with_slow_pulls_or_queues() -> None:
    """All prompts go to one worker: it has no time for all answers, and next turns would read them slowly."""
    trace = traffic(requests=80)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assigning, "prefiller", lambda prompt, candidates: 0)
        fast, slow = (
            routing(run(Cluster(4, "least_cost", network=Network(bandwidth), prefill=1), trace=trace))
            for bandwidth in (125 * 10**8, 10**9)
        )
    assert fast.handed_over == slow.handed_over > 100
    assert slow.answers_apart < 10 < 20 < fast.answers_apart < 0.7 * fast.handed_over


def test_a_next_turn_resumes_where_its_answer_was_prefilled() -> None:
    """One worker that prefills every prompt, and answers for their next turns, hits as one that decodes them, too."""
    alone, apart = Cluster(1, "least_cost"), Cluster(2, "least_cost", 0.0, FAST_NETWORK, prefill=1)
    trace, roomy = traffic(requests=40), replace(SETUP, memory=16 * 10**9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assigning, "prefiller", lambda prompt, candidates: 0)
        patch.setattr(assigning, "keeper", lambda answer, candidates, decoded: 0)
        two = run(apart, ALONE, roomy, trace)
    one = run(alone, ALONE, roomy, trace)
    assert one.row.hit_tokens == two.row.hit_tokens
    assert one.row.ideal_hit_rate == two.row.ideal_hit_rate


def test_an_answer_handed_over_takes_the_pull_and_its_tokens() -> None:
    """Alone, a request is prefilled where it is decoded; where it never is, the second token waits for the pull."""
    trace = traffic(requests=20)
    whole = run(Cluster(2, "least_cost", 0.0, FAST_NETWORK, prefill=1), ALONE, trace=trace)
    assert routing(whole).handed_over == 0, "nobody is disturbed"
    slow = Network(10**9, latency=0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assigning, "prefiller", lambda prompt, candidates: 0)
        apart = run(Cluster(2, "least_cost", 0.0, slow, prefill=1), ALONE, trace=trace)
    found = routing(apart)
    answers = [one for one in apart.outcomes if one.output_tokens > 1]
    assert found.handed_over == len(answers)
    assert [share.requests for share in found.workers] == [len(answers), len(apart.outcomes) - len(answers)]
    assert apart.row.tpot_ms.mean > whole.row.tpot_ms.mean


@pytest.mark.parametrize("cluster", [Cluster(2, "least_cost", prefill=1), Cluster(2, "least_cost", 0, FAST_NETWORK, 2)])
def test_workers_that_prefill_need_others_that_pull(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="others must decode, and pull from them"):
        run(cluster)


# -- segments in parallel

COLD = "rag(zipf=0, sessions=6, documents=4000, fewest=8, most=8, tokens=2400, turns=1)"
ROOMY = replace(SETUP, memory=40 * 10**9)


@pytest.mark.parametrize("rule", ["least_cost", "round_robin"])
def test_cold_segments_of_one_request_are_computed_by_several_workers(rule: str) -> None:
    """A prompt of eight has its first token sooner, and no more is computed."""
    trace = make_trace(COLD, None)
    clusters = [Cluster(4, rule, network=one) for one in (None, FAST_NETWORK)]
    without, apart = (run(one, ALONE, ROOMY, trace) for one in clusters)
    assert routing(without).combined == routing(without).segments_apart == 0
    assert routing(apart).combined == 6
    assert routing(apart).segments_apart >= 6 * 4
    assert apart.row.segments.made_tokens <= without.row.segments.made_tokens, "pulled, if it is stored elsewhere"
    assert apart.row.hit_tokens >= without.row.hit_tokens
    assert apart.row.ttft_ms.mean < 0.6 * without.row.ttft_ms.mean


def test_segments_are_prepared_during_other_work_and_pages_freed() -> None:
    trace = make_trace("rag(zipf=1, sessions=30, documents=60, fewest=4, most=8, tokens=1500, turns=2)", None)
    setup = replace(SETUP, memory=8 * 10**9, cluster=Cluster(3, "least_cost", network=FAST_NETWORK))
    simulation = Simulation(trace, setup, setup.cluster, make_arrivals(trace, FAST), ENGINE)
    simulation.run()
    assert simulation.routing.combined > 5
    assert sum(worker.share.requests for worker in simulation.workers) == len(trace.requests)
    assert not simulation._preparing.orders
    for worker, pulls in zip(simulation.workers, simulation.pulls, strict=True):
        assert pulls.loaded_segments
        assert worker.outstanding.number == 0
        assert not any(stored.pins for stored in worker.serving.cache.segments)
        worker.serving.cache.check()


def test_tokens_of_prepared_segments_are_not_counted_as_work_of_their_request() -> None:
    trace = make_trace(COLD, None)
    setup = replace(ROOMY, cluster=Cluster(2, "least_cost", network=FAST_NETWORK))
    simulation = Simulation(trace, setup, setup.cluster, make_arrivals(trace, ALONE), ENGINE)
    shares: list[float] = []
    for worker in simulation.workers:

        def receive(request, sent, now, was=worker.receive):
            shares.append(sent.outstanding.uncached / request.prompt_tokens)
            was(request, sent, now)

        worker.receive = receive
    simulation.run()
    assert simulation.routing.combined == len(shares) == 6
    assert max(shares) < 0.1


def test_composed_prefixes_are_predicted() -> None:
    """The turns of a session resume after its documents, where the router has sent them for that."""
    trace = make_trace("rag(zipf=1, sessions=15, documents=30, fewest=4, most=4, tokens=1500, turns=3)", None)
    counts = routing(run(Cluster(4, "least_cost", network=FAST_NETWORK), ALONE, ROOMY, trace))
    assert counts.as_predicted == len(trace.requests) == 45
    assert counts.lost_waiting == counts.gained_waiting == 0


def test_a_slow_network_leaves_segments_to_one_worker() -> None:
    result = run(Cluster(4, "least_cost", network=Network(10**7)), ALONE, ROOMY, make_trace(COLD, None))
    assert routing(result).combined == 0


def test_a_network_is_compared_with_none_and_with_one_worker() -> None:
    figures = {"mean": [0.4, 0.2], "p95": [2.0, 1.0]}
    pulled = {"hit_rate": [0.75, 0.875], "mean": [0.3, 0.15], "p95": [1.0, 0.5]}
    found = {
        "rules": {"pulls: off": {"hit_rate": [0.5, 0.625], **figures}, "pulls: 1GB/s": pulled},
        "one_worker": {"hit_rate": [1.0, 0.875], **figures},
    }
    assert routers.gains(found) == [
        "pulls: off: hits 37.5 ± 158.9 points below one worker",
        "pulls: 1GB/s: 25.0 ± 0.0 points more hits, mean 25 ± 0% and p95 50 ± 0% below",
        "pulls: 1GB/s: hits 12.5 ± 158.9 points below one worker",
    ]


@pytest.mark.full
def test_real_workers_match_predictions_if_events_precede_the_next_request() -> None:
    trace = routers.traffic("documents", 24, 0)
    found = Processes(workers=2, routers=2, memory=40 * 10**6).run(
        "least_cost", trace, at_times(trace.requests, [3.0 * n for n in range(len(trace.requests))])
    )
    assert found["hit_rate"] > 0.1
    assert found["as_predicted"] == 1.0
    assert found["lost_waiting"] == found["gained_waiting"] == 0
