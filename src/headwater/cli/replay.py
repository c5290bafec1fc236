"""`headwater replay`: recorded traffic under each policy, without a model."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from headwater.cache.eviction import make_eviction
from headwater.cache.placement import make_placement
from headwater.cli import common
from headwater.cli.models import profile_for
from headwater.cli.replay_outputs import Outputs
from headwater.cli.replay_tables import cluster_tables, results_table
from headwater.cli.traces import Formats, traces_table
from headwater.errors import ConfigError
from headwater.journal import Journal
from headwater.lab.cost import StepCost, load_device
from headwater.lab.outputs import check_output, provenance
from headwater.lab.replay import NewArrivals, Run, run_grid
from headwater.lab.replay import replay as one_server
from headwater.lab.row import Result
from headwater.lab.serving import Engine, check_clock
from headwater.lab.setup import (
    FAILURES_SPELLING,
    HINTS_SPELLING,
    NETWORK_SPELLING,
    NO_CACHE,
    Cluster,
    Failures,
    Hints,
    Network,
    Setup,
    system,
)
from headwater.lab.speculation import Law
from headwater.lab.tiers import SPELLING as TIER_SPELLED
from headwater.lab.tiers import TierLaw
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
RUN = ("seed", "limit", "arrival", "serve")  # options that rows do not have
ON = "on"


Memories = Annotated[str, Option(help="Sizes with commas: 20GB,43GB. GB is 10^9 bytes, GiB 2^30.")]
Evictions = Annotated[
    str | None, Option(help=f"Eviction policies with commas; `none` disables the cache. {common.OWN['eviction']}")
]
Placements = Annotated[
    str | None, Option(help=f"Placement policies of checkpoints, with commas. {common.OWN['placement']}")
]
Systems = Annotated[str | None, Option("--system", help="Known pairs of both: vanilla, vllm+, sglang+, marconi, ...")]
Pools = Annotated[str, Option(help="unified, split, elastic, with commas.")]
StateFraction = Annotated[float, Option(help="Share of states in a split or elastic pool.")]
Slots = Annotated[int, Option(min=1, help="States that a running request holds.")]
DecodeReuse = Annotated[str, Option(help="How answers are cached: canonical, raw, none.")]
Reuse = Annotated[str, Option(help="Reuse in prompts with segments: prefix, segments, both; with commas.")]
SegmentEvictions = Annotated[str, Option(help="Eviction of segments: cost, lru, with commas.")]
SegmentShare = Annotated[float, Option(help="Share of the memory up to which segments displace prefixes.")]
Device = Annotated[str | None, Option(help="A device: run under a clock, with queues. h100, ..., or a file.")]
TensorParallel = Annotated[int, Option(min=1, help="Devices that share the model.")]
MaxRunning = Annotated[int, Option(min=1, help="Requests that run at once.")]
TokensPerStep = Annotated[int, Option(min=1, help="Tokens of prefill a step.")]
Speculations = Annotated[
    str, Option(help="With --serve: off, or DRAFTS@CHANCE, like 4@0.7, 4@0.7/slots or 4@0.7/mtp; with commas.")
]
TierSizes = Annotated[str, Option(help=f"With --serve: off, or {TIER_SPELLED}; with commas.")]
Tails = Annotated[str, Option(help="Resume in mid-page: on, off, with commas; recordings in blocks cannot.")]
RequestHints = Annotated[str, Option(help=f"Hints that requests carry: off, {HINTS_SPELLING}; with commas.")]
Workers = Annotated[
    int | None, Option(min=1, help="With --serve: simulated workers behind a router, each with --memory.")
]
Routers = Annotated[str | None, Option(help=f"With --workers: rules of the router, with commas. [default: {ROUTER}]")]
EventDelay = Annotated[
    float | None,
    Option(min=0, help="With --workers: seconds until the router knows of a cache's changes. [default: 0]"),
]
Pulls = Annotated[
    str | None,
    Option(help=f"With --workers: pulls between workers: off, or {NETWORK_SPELLING}; with commas. [default: off]"),
]
PrefillWorkers = Annotated[
    str | None, Option(help="With --workers and --pulls: workers that only prefill, of all; with commas. [default: 0]")
]
WorkerFailures = Annotated[
    str | None,
    Option(
        help="With --workers: seconds after which one fails on average, and until another one replaces it: "
        f"off, or {FAILURES_SPELLING}; with commas. [default: off]"
    ),
]
PerRequest = Annotated[Path | None, Option(help="Write a JSON line a request to this file.")]
OutFile = Annotated[
    Path | None, Option("--out", help="Write a row a cell to this file: .csv, .parquet or .json, by its ending.")
]
ReportFile = Annotated[Path | None, Option(help="Write one self-contained HTML page to this file.")]


@common.commands.command()
def replay(
    trace: common.OptionalTrace = None,
    model: common.ModelName = None,
    weights: common.RecordedWeights = None,
    memory: Memories = "20GB",
    eviction: Evictions = None,
    placement: Placements = None,
    systems: Systems = None,
    pool: Pools = "unified",
    state_fraction: StateFraction = 0.5,
    page_size: common.PageTokens = 64,
    slots: Slots = 1,
    decode_reuse: DecodeReuse = "canonical",
    reuse: Reuse = "both",
    segment_eviction: SegmentEvictions = "cost",
    segment_share: SegmentShare = 0.5,
    serve: Device = None,
    tensor_parallel: TensorParallel = 1,
    max_running: MaxRunning = 128,
    tokens_per_step: TokensPerStep = 8192,
    speculation: Speculations = OFF,
    tier: TierSizes = OFF,
    hints: RequestHints = OFF,
    tails: Tails = ON,
    workers: Workers = None,
    router: Routers = None,
    event_delay: EventDelay = None,
    pulls: Pulls = None,
    prefill: PrefillWorkers = None,
    failures: WorkerFailures = None,
    arrival: common.Arrival = None,
    limit: common.Limit = None,
    data: common.Data = None,
    tokenizer: common.Tokenizer = None,
    block_tokens: common.BlockTokens = None,
    seed: common.Seed = 0,
    jobs: common.Jobs = 0,
    json_file: common.JsonFile = None,
    per_request: PerRequest = None,
    report: ReportFile = None,
    out: OutFile = None,
    formats: Formats = False,
) -> None:
    """Replay recorded traffic under each policy and memory size.

    The code is that of the server, with a counting executor instead of a model.
    """
    _replay(Namespace(**locals()))


def _setups(given: Namespace) -> list[Setup]:
    """Return a setup for each combination of the options' values. Raises ConfigError for values that exclude others."""
    recorded = served_by(given.trace, given.data)
    placement, eviction = common.policies_for(given.placement, given.eviction, recorded)
    base = Setup(
        profile=replace(profile_for(given.model, recorded, given.weights), tensor_parallel=given.tensor_parallel),
        memory=0,
        state_fraction=given.state_fraction,
        page_size=given.page_size,
        slots=given.slots,
        decode_reuse=common.one_of("--decode-reuse", given.decode_reuse, ("canonical", "raw", "none")),
        segment_share=given.segment_share,
        running=given.max_running,
    )
    pairs = product(common.choices(placement, str), common.choices(eviction, str))
    policies: list[dict[str, Any]] = [{"placement": p, "eviction": e} for p, e in pairs]
    policies = common.choices(given.systems, _of_system) if given.systems else policies
    reuses = _reuses(given.reuse, given.segment_eviction)
    pools = common.choices(given.pool, lambda name: common.one_of("--pool", name, POOLS))
    laws = common.choices(given.speculation, Law.read)
    tiers = common.choices(given.tier, TierLaw.read)
    hints = common.choices(given.hints, Hints.read)
    tails = common.choices(given.tails, lambda word: common.one_of("--tails", word, (ON, OFF)) == ON)
    clusters = _clusters(given)
    _check_clock_options(given, laws, tiers, clusters)
    return [
        replace(
            base,
            memory=size,
            pool=kind,
            speculation=law,
            tier=store,
            hints=hint,
            cluster=of,
            **policy | {"tails": with_tails and policy.get("tails", True)},
            **segments,
        )
        for size, kind, policy, segments, law, store, hint, with_tails, of in product(
            common.choices(given.memory, parse_bytes), pools, policies, reuses, laws, tiers, hints, tails, clusters
        )
    ]


def _check_clock_options(
    given: Namespace, laws: Sequence[Law | None], tiers: Sequence[TierLaw | None], clusters: Sequence[Cluster | None]
) -> None:
    """Raise ConfigError for options that need --serve without it, and for raw reuse of another worker's prefill."""
    if given.decode_reuse == "raw" and any(one is not None and one.prefill for one in clusters):
        raise ConfigError(f"--prefill {given.prefill} excludes --decode-reuse raw, whose cached content is not exact")
    if given.serve is not None:
        return
    if any(tiers):
        raise ConfigError(f"--tier {given.tier} needs --serve: without a clock nothing is read")
    if any(laws):
        raise ConfigError(f"--speculation {given.speculation} needs --serve: without a clock a draft saves nothing")
    if any(clusters):
        raise ConfigError(f"--workers {given.workers} needs --serve: without a clock a router has no costs to compare")


def _replay(given: Namespace) -> None:
    """Read the trace, and run the setups on it, under a clock with --serve; without a trace, list those of a folder."""
    if given.trace is None:
        common.show(traces_table(given.data))
        return
    setups = _setups(given)
    profile, engine = setups[0].profile, None
    if given.serve is not None:
        cost = StepCost(profile, load_device(given.serve))
        engine = Engine(cost, given.max_running, given.tokens_per_step, given.seed)
    _check(setups, engine is not None)
    files = given.json_file, given.per_request, given.report, given.out
    check_output(given.out)
    common.prepare_outputs(*files)
    found = common.read(given.trace, given.data, given.tokenizer, given.limit, given.seed, given.block_tokens)
    load = partial(make_arrivals, spelling=given.arrival, seed=given.seed, data=given.data)
    load(found)  # malformed arrivals are an error before anything runs
    for setup in setups:
        setup.layout(found)
    about = [found.name, len(found.requests), given.arrival, given.seed, given.serve, given.max_running]
    journal = Journal(next(filter(None, files), None), [*about, given.tokens_per_step, str(setups)])
    run = provenance(
        found,
        model=given.model or profile.name,
        **common.formats(profile),
        page_size=given.page_size,
        **{name: getattr(given, name) for name in RUN},
    )
    outputs = Outputs(found, profile, run, *files, journal)
    _run(found, setups, load, engine, given.jobs, outputs)


def _run(
    found: Trace, setups: list[Setup], arrivals: NewArrivals, engine: Engine | None, jobs: int, outputs: Outputs
) -> None:
    """Run the setups; print and write the finished rows, even if interrupted. Rows of an earlier run are kept."""
    kept, journal, run = _kept(), outputs.journal, _replay_of(setups)
    results = {n: kept.validate_python(journal[str(n)]) for n in range(len(setups)) if str(n) in journal}
    todo = [number for number in range(len(setups)) if number not in results]
    if results:
        common.progress_console.print(f"{len(results)} rows are from an earlier run", highlight=False)
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


def _clusters(given: Namespace) -> list[Cluster | None]:
    """Return a cluster for each rule of the router, network, number that prefill and failures; [None] without workers.

    Raises ConfigError for an unknown rule, malformed values, or workers that cannot prefill for others.
    """
    if given.workers is None:
        for name in ("router", "event_delay", "pulls", "prefill", "failures"):
            value = getattr(given, name)
            if value is not None:
                shown = f"{value:g}" if isinstance(value, float) else value
                raise ConfigError(f"--{name.replace('_', '-')} {shown} needs --workers: one server has no router")
        return [None]
    from headwater.lab.cluster.rivals import make_choice
    from headwater.lab.cluster.worker import roles

    rules, networks = common.choices(given.router or ROUTER, str), common.choices(given.pulls or OFF, Network.read)
    for rule in rules:
        make_choice(rule)
    numbers = common.choices(given.prefill or "0", _number)
    places = product(rules, networks, numbers, common.choices(given.failures or OFF, Failures.read))
    delay = given.event_delay or 0.0
    clusters = [Cluster(given.workers, rule, delay, network, number, fails) for rule, network, number, fails in places]
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
    policy: dict[str, Any] = {"placement": found.placement, "eviction": found.eviction, "tails": found.tails}
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
