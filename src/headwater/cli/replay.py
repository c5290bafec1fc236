"""`headwater replay`: recorded traffic under each policy, without a model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from headwater.cache.eviction import make_eviction
from headwater.cache.placement import make_placement
from headwater.cache_folder import write_whole
from headwater.cli import common
from headwater.cli.profile import profile_for
from headwater.cli.replay_tables import cluster_tables, results_table
from headwater.errors import ConfigError
from headwater.journal import Journal
from headwater.lab.cost import StepCost, load_device
from headwater.lab.hints import SPELLING as HINTS_SPELLED
from headwater.lab.hints import Hints
from headwater.lab.replay import NewArrivals, Run, run_grid
from headwater.lab.replay import replay as one_server
from headwater.lab.report import write_report
from headwater.lab.row import Result
from headwater.lab.serving import Engine, check_clock
from headwater.lab.setup import FAILURES_SPELLING, NETWORK_SPELLING, NO_CACHE, Cluster, Failures, Network, Setup, system
from headwater.lab.speculation import Law
from headwater.lab.tiers import SPELLING as TIER_SPELLED
from headwater.lab.tiers import TierLaw
from headwater.models.profiles import Profile
from headwater.request import SegmentEviction
from headwater.setting import OFF, parse_bytes
from headwater.traces.loads import make_arrivals
from headwater.traces.read import served_by
from headwater.traces.request import Trace

if TYPE_CHECKING:
    from pydantic import TypeAdapter

REUSES = ("prefix", "segments", "both")
POOLS = ("unified", "split", "elastic")
ROUTER = "least_cost"


@common.commands.command()
def replay(
    trace: common.TraceFile,
    model: common.ModelName = None,
    weights: common.RecordedWeights = None,
    memory: Annotated[str, Option(help="Sizes with commas: 20GB,43GB. GB is 10^9 bytes, GiB 2^30.")] = "20GB",
    eviction: Annotated[
        str | None,
        Option(help=f"What goes first: policies with commas; `none` is no cache. {common.OWN['eviction']}"),
    ] = None,
    placement: Annotated[
        str | None,
        Option(help=f"Where checkpoints are taken: policies with commas. {common.OWN['placement']}"),
    ] = None,
    systems: Annotated[
        str | None, Option("--system", help="Known pairs of both: vanilla, vllm+, sglang+, marconi, ...")
    ] = None,
    pool: Annotated[str, Option(help="unified, split, elastic, with commas.")] = "unified",
    state_fraction: Annotated[float, Option(help="Share of states in a split or elastic pool.")] = 0.5,
    page_size: common.PageTokens = 64,
    slots: Annotated[int, Option(min=1, help="States that a running request takes.")] = 1,
    decode_reuse: Annotated[str, Option(help="How answers are cached: canonical, raw, none.")] = "canonical",
    reuse: Annotated[str, Option(help="Of prompts with segments: prefix, segments, both; with commas.")] = "both",
    segment_eviction: Annotated[str, Option(help="Which segment goes first: cost, lru, with commas.")] = "cost",
    segment_share: Annotated[float, Option(help="Of the memory: so far segments displace prefixes.")] = 0.5,
    serve: Annotated[str | None, Option(help="A device: run under a clock, with queues. h100, ..., or a file.")] = None,
    tensor_parallel: Annotated[int, Option(min=1, help="Devices that share the model.")] = 1,
    max_running: Annotated[int, Option(min=1, help="Requests that run at once.")] = 128,
    tokens_per_step: Annotated[int, Option(min=1, help="Tokens of prefill a step.")] = 8192,
    speculation: Annotated[
        str, Option(help="With --serve: off, or DRAFTS@CHANCE, like 4@0.7, 4@0.7/slots or 4@0.7/mtp; with commas.")
    ] = OFF,
    tier: Annotated[str, Option(help=f"With --serve: off, or {TIER_SPELLED}; with commas.")] = OFF,
    hints: Annotated[str, Option(help=f"Hints that requests carry: off, {HINTS_SPELLED}; with commas.")] = OFF,
    workers: Annotated[
        int | None, Option(min=1, help="With --serve: simulated workers behind a router, each with --memory.")
    ] = None,
    router: Annotated[
        str | None, Option(help=f"With --workers: rules of the router, with commas. [default: {ROUTER}]")
    ] = None,
    event_delay: Annotated[
        float | None,
        Option(min=0, help="With --workers: seconds until the router knows of a cache's changes. [default: 0]"),
    ] = None,
    pulls: Annotated[
        str | None,
        Option(help=f"With --workers: pulls between workers: off, or {NETWORK_SPELLING}; with commas. [default: off]"),
    ] = None,
    prefill: Annotated[
        str | None,
        Option(help="With --workers and --pulls: workers that only prefill, of all; with commas. [default: 0]"),
    ] = None,
    failures: Annotated[
        str | None,
        Option(
            help="With --workers: seconds after which one fails on average, and until another one serves in its place: "
            f"off, or {FAILURES_SPELLING}; with commas. [default: off]"
        ),
    ] = None,
    arrival: common.Arrival = None,
    limit: common.Limit = None,
    data: common.Data = None,
    tokenizer: common.Tokenizer = None,
    seed: common.Seed = 0,
    jobs: common.Jobs = 0,
    json_file: common.JsonFile = None,
    per_request: Annotated[Path | None, Option(help="Write a JSON line a request to this file.")] = None,
    report: Annotated[Path | None, Option(help="Write one self-contained HTML page to this file.")] = None,
) -> None:
    """Replay recorded traffic under each policy and memory size.

    The code is that of the server, with a counting executor in place of a model.
    """
    recorded = served_by(trace, data)
    placement, eviction = common.policies_for(placement, eviction, recorded)
    base = Setup(
        profile=replace(profile_for(model, recorded, weights), tensor_parallel=tensor_parallel),
        memory=0,
        state_fraction=state_fraction,
        page_size=page_size,
        slots=slots,
        decode_reuse=common.one_of("--decode-reuse", decode_reuse, ("canonical", "raw", "none")),
        segment_share=segment_share,
    )
    pairs = product(common.choices(placement, str), common.choices(eviction, str))
    policies = common.choices(systems, _of_system) if systems else [{"placement": p, "eviction": e} for p, e in pairs]
    reuses = _reuses(reuse, segment_eviction)
    pools = common.choices(pool, lambda name: common.one_of("--pool", name, POOLS))
    laws = common.choices(speculation, Law.read)
    tiers = common.choices(tier, TierLaw.read)
    given = common.choices(hints, Hints.read)
    clusters = _clusters(workers, router, event_delay, pulls, prefill, failures)
    if decode_reuse == "raw" and any(one is not None and one.prefill for one in clusters):
        raise ConfigError(f"--prefill {prefill} not with --decode-reuse raw: what that caches is not exact")
    if serve is None and any(tiers):
        raise ConfigError(f"--tier {tier} needs --serve: without a clock nothing is read")
    if serve is None and any(laws):
        raise ConfigError(f"--speculation {speculation} needs --serve: without a clock a draft saves nothing")
    if serve is None and any(clusters):
        raise ConfigError(f"--workers {workers} needs --serve: without a clock no router has anything to choose by")
    base = replace(base, running=max_running)
    setups = [
        replace(base, memory=size, pool=kind, speculation=law, tier=store, hints=hint, cluster=of, **policy, **what)
        for size, kind, policy, what, law, store, hint, of in product(
            common.choices(memory, parse_bytes), pools, policies, reuses, laws, tiers, given, clusters
        )
    ]
    cost = None if serve is None else StepCost(base.profile, load_device(serve))
    engine = None if cost is None else Engine(cost, max_running, tokens_per_step, seed)
    _check(setups, engine is not None)
    common.prepare_outputs(json_file, per_request, report)
    found = common.read(trace, data, tokenizer, limit, seed)
    load = partial(make_arrivals, spelling=arrival, seed=seed, data=data)
    load(found)  # malformed arrivals are an error before anything runs
    for setup in setups:
        setup.layout(found)
    about = [found.name, len(found.requests), arrival, seed, serve, max_running, tokens_per_step, str(setups)]
    journal = Journal(json_file or per_request or report, about)
    named = model or base.profile.name
    outputs = Outputs(found, named, base.profile, page_size, json_file, per_request, report, journal)
    _run(found, setups, load, engine, jobs, outputs)


def _run(
    found: Trace, setups: list[Setup], arrivals: NewArrivals, engine: Engine | None, jobs: int, outputs: Outputs
) -> None:
    """Run the setups; print and write what is done, even if the run is interrupted. Rows of an earlier run are kept."""
    kept, journal, run = _kept(), outputs.journal, _replay_of(setups)
    results = {n: kept.validate_python(journal[str(n)]) for n in range(len(setups)) if str(n) in journal}
    todo = [number for number in range(len(setups)) if number not in results]
    if results:
        common.progress_console.print(f"{len(results)} rows are those of an earlier run", highlight=False)
    try:
        with common.progress("replaying", len(todo)) as advance:
            for number, result in run_grid(found, [setups[number] for number in todo], arrivals, engine, jobs, run):
                results[todo[number]] = result
                journal.add(str(todo[number]), kept.dump_python(outputs.needed(result), mode="json"))
                advance()
    finally:
        done = [results[number] for number in sorted(results)]
        if done:
            common.show(results_table(found, setups[0].profile, done), *cluster_tables(done))
            outputs.write(done)
    journal.end()


def _clusters(
    workers: int | None,
    router: str | None,
    event_delay: float | None,
    pulls: str | None,
    prefill: str | None,
    failures: str | None,
) -> list[Cluster | None]:
    """Return a cluster for each rule of the router, network, number that prefill and failures; [None] without workers.

    Raises ConfigError for an unknown rule, values that are none, or workers that cannot prefill for others.
    """
    if workers is None:
        options = ("router", router), ("event-delay", event_delay), ("pulls", pulls), ("prefill", prefill)
        for option, given in (*options, ("failures", failures)):
            if given is not None:
                shown = f"{given:g}" if isinstance(given, float) else given
                raise ConfigError(f"--{option} {shown} needs --workers: one server has no router")
        return [None]
    try:
        from headwater.lab.cluster.rivals import make_choice
        from headwater.lab.cluster.worker import roles
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'headwater[cluster]'") from error
    rules, networks = common.choices(router or ROUTER, str), common.choices(pulls or OFF, Network.read)
    for rule in rules:
        make_choice(rule)
    numbers = common.choices(prefill or "0", _number)
    places = product(rules, networks, numbers, common.choices(failures or OFF, Failures.read))
    delay = event_delay or 0.0
    clusters = [Cluster(workers, rule, delay, network, number, fails) for rule, network, number, fails in places]
    for cluster in clusters:
        roles(cluster)
    return [*clusters]


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"--prefill has {text!r}, must have numbers of workers")
    return int(text)


def _replay_of(setups: list[Setup]) -> Run:
    """Return the function that replays one of these setups."""
    if setups[0].cluster is None:
        return one_server
    from headwater.lab.cluster.simulation import simulate

    return simulate


def _kept() -> TypeAdapter[Result]:
    """Return the form of rows in the journal."""
    from pydantic import TypeAdapter  # slow to import

    return TypeAdapter(Result)


def _reuses(reuse: str, segment_eviction: str) -> list[dict[str, Any]]:
    """Combine kinds of reuse with evictions of segments; without stored segments the eviction has no effect."""
    evictions = [
        SegmentEviction(common.one_of("--segment-eviction", name, tuple(SegmentEviction)))
        for name in common.choices(segment_eviction, str)
    ]
    return [
        {"reuse": name, "segment_eviction": eviction}
        for name in common.choices(reuse, lambda name: common.one_of("--reuse", name, REUSES))
        for eviction in (evictions[:1] if name == "prefix" else evictions)
    ]


def _of_system(name: str) -> dict[str, Any]:
    found = system(name)
    policy: dict[str, Any] = {"placement": found.placement, "eviction": found.eviction}
    return policy if found.page_size is None else {**policy, "page_size": found.page_size}


def _check(setups: list[Setup], under_clock: bool) -> None:
    """Raise ConfigError for policies and sizes that cannot be, before anything is read."""
    tokens = Trace("any", ())
    for setup in setups:
        layout = setup.layout(tokens)
        if setup.reuse == "segments" and not setup.profile.composes:
            raise ConfigError(f"{setup.profile.name} has layers that segments cannot be composed in")
        if setup.eviction != NO_CACHE:
            policy = make_eviction(setup.eviction, layout)
            make_placement(setup.placement)
            if under_clock:
                check_clock(setup, policy)


@dataclass(frozen=True, slots=True)
class Outputs:
    """Output files of a replay, written when it ends; None is not wanted."""

    trace: Trace
    model: str
    profile: Profile
    page_size: int
    json_file: Path | None
    per_request: Path | None
    report: Path | None
    journal: Journal  # rows of an earlier run, and those that are done

    def needed(self, result: Result) -> Result:
        """Return the result without the details that no output shows."""
        return result if self.per_request or self.report else replace(result, outcomes=(), held=(), reuse={})

    def write(self, results: Sequence[Result]) -> None:
        """Write each file completely, or not at all."""
        rows = [result.row.as_dict() for result in results]
        model = {"model": self.model, **common.formats(self.profile)}
        document = {"trace": self.trace.name, **model, "page_size": self.page_size, "rows": rows}
        common.write_json(self.json_file, document)
        if self.per_request is not None:
            write_whole(self.per_request, _lines(results))
        if self.report is not None:
            notes = (*self.trace.notes, common.formats_line(self.profile))
            write_report(self.report, self.trace.name, self.model, notes, results)


def _lines(results: Sequence[Result]) -> Iterable[str]:
    for result in results:
        row = result.row
        setup = {"memory": row.memory, "pool": row.pool, "placement": row.placement, "eviction": row.eviction}
        if row.segments is not None:
            setup |= {"reuse": row.segments.reuse, "segment_eviction": row.segments.eviction}
        for outcome in result.outcomes:
            yield json.dumps({**setup, **outcome.as_dict()}) + "\n"
