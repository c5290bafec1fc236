"""`headwater replay`: recorded traffic under each policy, without a model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from headwater.cache.eviction import make_eviction
from headwater.cache.placement import make_placement
from headwater.cli.common import check_writable, commands, console, one_of, progress
from headwater.cli.lab import (
    Arrival,
    Data,
    Jobs,
    JsonFile,
    Limit,
    ModelName,
    Outputs,
    PageTokens,
    Seed,
    Tokenizer,
    TraceFile,
    choices,
    read,
    results_table,
)
from headwater.errors import ConfigError
from headwater.lab.cost import StepCost, load_device
from headwater.lab.replay import NewArrivals, run_grid
from headwater.lab.row import Result
from headwater.lab.serving import Engine, check_clock
from headwater.lab.setup import OFF, Setup, system
from headwater.models.profiles import load_profile
from headwater.request import SegmentEviction
from headwater.setting import parse_bytes
from headwater.traces.loads import make_arrivals
from headwater.traces.request import Trace

REUSES = ("prefix", "segments", "both")
POOLS = ("unified", "split", "elastic")


@commands.command()
def replay(
    trace: TraceFile,
    model: ModelName = "qwen3.5-9b",
    memory: Annotated[str, typer.Option(help="Sizes with commas: 20GB,43GB. GB is 10^9 bytes, GiB 2^30.")] = "20GB",
    eviction: Annotated[str, typer.Option(help="What goes first: policies with commas; `none` is no cache.")] = "lru",
    placement: Annotated[str, typer.Option(help="Where checkpoints are taken: policies with commas.")] = "structural",
    systems: Annotated[
        str | None, typer.Option("--system", help="Known pairs of both: vanilla, vllm+, sglang+, marconi, ...")
    ] = None,
    pool: Annotated[str, typer.Option(help="unified, split, elastic, with commas.")] = "unified",
    state_fraction: Annotated[float, typer.Option(help="Share of states in a split or elastic pool.")] = 0.5,
    page_size: PageTokens = 64,
    slots: Annotated[int, typer.Option(min=1, help="States that a running request takes.")] = 1,
    decode_reuse: Annotated[str, typer.Option(help="How answers are cached: canonical, raw, none.")] = "canonical",
    reuse: Annotated[str, typer.Option(help="Of prompts with segments: prefix, segments, both; with commas.")] = "both",
    segment_eviction: Annotated[str, typer.Option(help="Which segment goes first: cost, lru, with commas.")] = "cost",
    segment_share: Annotated[float, typer.Option(help="Of the memory: so far segments displace prefixes.")] = 0.5,
    serve: Annotated[
        str | None, typer.Option(help="A device: run under a clock, with queues. h100, ..., or a file.")
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Devices that share the model.")] = 1,
    max_running: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 128,
    tokens_per_step: Annotated[int, typer.Option(min=1, help="Tokens of prefill a step.")] = 8192,
    arrival: Arrival = None,
    limit: Limit = None,
    data: Data = None,
    tokenizer: Tokenizer = None,
    seed: Seed = 0,
    jobs: Jobs = 0,
    json_file: JsonFile = None,
    per_request: Annotated[Path | None, typer.Option(help="Write a JSON line a request to this file.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write one self-contained HTML page to this file.")] = None,
) -> None:
    """Replay recorded traffic under each policy and memory size.

    The code is that of the server, with a counting executor in place of a model.
    """
    base = Setup(
        profile=replace(load_profile(model), tensor_parallel=tensor_parallel),
        memory=0,
        state_fraction=state_fraction,
        page_size=page_size,
        slots=slots,
        decode_reuse=one_of("--decode-reuse", decode_reuse, ("canonical", "raw", "none")),
        segment_share=segment_share,
    )
    pairs = product(choices(placement, str), choices(eviction, str))
    policies = choices(systems, _of_system) if systems else [{"placement": p, "eviction": e} for p, e in pairs]
    reuses = _reuses(reuse, segment_eviction)
    pools = choices(pool, lambda name: one_of("--pool", name, POOLS))
    setups = [
        replace(base, memory=size, pool=kind, **policy, **what)
        for size, kind, policy, what in product(choices(memory, parse_bytes), pools, policies, reuses)
    ]
    engine = None
    if serve is not None:
        engine = Engine(StepCost(base.profile, load_device(serve)), max_running, tokens_per_step)
    _check(setups, engine is not None)
    check_writable(json_file, per_request, report)
    found = read(trace, data, tokenizer, limit, seed)
    load = partial(make_arrivals, spelling=arrival, seed=seed, data=data)
    load(found)  # malformed arrivals are an error before anything runs
    for setup in setups:
        setup.layout(found)
    outputs = Outputs(found, model, page_size, json_file, per_request, report)
    _run(found, setups, lambda trace: make_arrivals(trace, arrival, seed, data), engine, jobs, outputs)


def _run(
    found: Trace,
    setups: list[Setup],
    arrivals: NewArrivals,
    engine: Engine | None,
    jobs: int,
    outputs: Outputs,
) -> None:
    """Run the setups; print and write what is done, even if the run is interrupted."""
    results: dict[int, Result] = {}
    try:
        with progress("replaying", len(setups)) as advance:
            for number, result in run_grid(found, setups, arrivals, engine, jobs):
                results[number] = result
                advance()
    finally:
        done = [results[number] for number in sorted(results)]
        if done:
            console.print(results_table(found, setups[0].profile.name, done, console.width))
            outputs.write(done)


def _reuses(reuse: str, segment_eviction: str) -> list[dict[str, Any]]:
    """Combine kinds of reuse with evictions of segments; without stored segments the eviction has no effect."""
    evictions = [
        SegmentEviction(one_of("--segment-eviction", name, tuple(SegmentEviction)))
        for name in choices(segment_eviction, str)
    ]
    return [
        {"reuse": name, "segment_eviction": eviction}
        for name in choices(reuse, lambda name: one_of("--reuse", name, REUSES))
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
        if setup.eviction != OFF:
            policy = make_eviction(setup.eviction, layout)
            make_placement(setup.placement)
            if under_clock:
                check_clock(setup, policy)
