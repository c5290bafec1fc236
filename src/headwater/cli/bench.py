"""`headwater bench`: speed and cache hits of a running server under load."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from typer import Option

from headwater.cli import common
from headwater.errors import ConfigError
from headwater.load.endpoint import Endpoint, about, first_model
from headwater.load.generator import Limits
from headwater.load.recorded import read_sessions
from headwater.load.report import LiveProgress, as_json, comparison_table, draw_plots, phase_tables, require_matplotlib
from headwater.load.results import Slo, Summary
from headwater.load.scenario import Pace, Phase, Scenario
from headwater.load.session import DRAWN, Drawing, Session
from headwater.traces.arrivals import PROCESSES

DEFAULT_REQUESTS = 100  # of a phase without --requests and --duration
DEFAULT_CLIENTS = 8  # of a closed loop without --concurrency
RECORDED = "recorded"
HISTORIES = ("answered", RECORDED)
DESCRIPTION_SECONDS = 30.0  # limit for the pages that describe the server

bench_commands = typer.Typer(
    add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, help="Measure a running server."
)
common.commands.add_typer(bench_commands, name="bench")


@bench_commands.command()
def serve(
    context: typer.Context,
    files: Annotated[list[Path] | None, typer.Argument(help="Recorded traffic; without it, traffic is drawn.")] = None,
    url: Annotated[str, Option(help="URL of an OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    api_key: common.ApiKey = None,
    model: common.ServedModel = None,
    draw: Annotated[str, Option(help=f"Kind of drawn traffic: {', '.join(DRAWN)}.")] = "shared",
    prompt_tokens: Annotated[int, Option(help="Tokens of each drawn turn's own text.")] = 128,
    prefix_tokens: Annotated[int, Option(help="Tokens of each drawn prefix or system prompt.")] = 1024,
    prefixes: Annotated[int, Option(help="Number of drawn prefixes that requests share.")] = 4,
    turns: Annotated[int, Option(help="Turns of each drawn chat.")] = 4,
    vocab: Annotated[int | None, Option(help="Draw token ids below N instead of words.")] = None,
    output_tokens: Annotated[int, Option(help="max_tokens of requests without their own.")] = 64,
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="Answers continue to max_tokens.")] = False,
    temperature: Annotated[float, Option(help="Sampling temperature; 0 is greedy.")] = 0.0,
    history: Annotated[str, Option(help="Answers that later turns contain: answered, recorded.")] = "answered",
    rate: Annotated[str | None, Option(help="Open loop: requests a second, or `recorded` times.")] = None,
    process: Annotated[str, Option(help=f"Arrivals under --rate: {', '.join(PROCESSES)}.")] = "poisson",
    cv: Annotated[float, Option(help="Variation of gamma: 1 is Poisson, more is burstier.")] = 2.0,
    speed: Annotated[float, Option(help="Speed of recorded times: 2 is twice as fast.")] = 1.0,
    chats: Annotated[int, Option(help="Sessions that are open at the same time under --rate.")] = 8,
    concurrency: Annotated[int | None, Option(help="Closed loop: number of clients.")] = None,
    requests: Annotated[
        int | None, Option(help=f"Requests of each phase; {DEFAULT_REQUESTS} without --duration.")
    ] = None,
    warmup: Annotated[int, Option(min=0, help="Requests that are sent first and not counted.")] = 0,
    duration: Annotated[float | None, Option(help="Seconds of sending in each phase.")] = None,
    timeout: Annotated[float, Option(help="Limit in seconds for each answer.")] = 600.0,
    overload: Annotated[str | None, Option(help="After a closed loop, send multiples of its rate: 1,2,4.")] = None,
    fairness: Annotated[
        float | None, Option(help="A tenant at --rate by itself, then with another at X times it.")
    ] = None,
    slo_ttft: Annotated[float, Option(help="SLO: seconds from due time to first token.")] = 1.0,
    slo_itl: Annotated[float, Option(help="SLO: mean seconds between the tokens of an answer.")] = 0.1,
    seed: Annotated[int, Option(help="Seed of drawn traffic; different seeds share no text.")] = 0,
    json_file: common.JsonFile = None,
    plots: Annotated[Path | None, Option(help="Folder for PNG plots (needs the extra `plots`).")] = None,
) -> None:
    """Send traffic to a running server, and report times and cache hits.

    Ctrl-C ends the run and reports the results so far.
    """
    options = SimpleNamespace(**context.params)  # the same values under the same names
    try:
        phases = measured(options)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not any(result.outcome == "ok" for phase in phases for result in phase.results):
        raise typer.Exit(1)


def measured(options: SimpleNamespace) -> list[Phase]:
    """Check the options, run the load, print and write the report."""
    common.one_of("draw", options.draw, DRAWN)
    common.one_of("history", options.history, HISTORIES)
    pace, slo = paced(options), Slo(options.slo_ttft, options.slo_itl)
    if options.plots is not None:
        require_matplotlib()
    common.prepare_outputs(options.json_file, folders=[options.plots])
    sessions = source(options)
    pages = about(options.url, options.api_key, min(options.timeout, DESCRIPTION_SECONDS))
    options.model = options.model or first_model(pages)
    with LiveProgress(common.progress_console) as progress:
        phases = asyncio.run(load(options, pace, sessions, progress))
    common.show(*(table for phase in phases for table in phase_tables(phase, slo)))
    if len(phases) > 1:
        common.show(comparison_table("phase", {phase.name: Summary.of(phase.results, slo) for phase in phases}))
    if options.json_file is not None:
        report = as_json(phases, slo, **common.provenance(vars(options)), server=pages)
        common.write_json(options.json_file, report)
    if options.plots is not None:
        draw_plots(options.plots, {phase.name: phase.results for phase in phases})
    return phases


def source(options: SimpleNamespace) -> Iterator[Session]:
    """Read or draw the sessions to send."""
    if options.files:
        for path in options.files:
            if not path.is_file():
                raise ConfigError(f"{path} is not a file")
        return chain.from_iterable(read_sessions(path, options.vocab) for path in options.files)
    sizes = (options.prompt_tokens, options.prefix_tokens, options.prefixes, options.turns)
    return DRAWN[options.draw](Drawing(*sizes, vocab=options.vocab, seed=options.seed))


def paced(options: SimpleNamespace) -> Pace:
    """Return the arrival of requests. Raises ConfigError for options that contradict each other."""
    common.one_of("process", options.process, PROCESSES)
    for name in ("cv", "speed", "chats", "timeout", "requests", "duration", "concurrency", "fairness"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise ConfigError(f"{name} is {value:g}, must be above 0")
    if options.rate is not None and options.concurrency is not None:
        raise ConfigError(f"rate is {options.rate} and concurrency is {options.concurrency}: give one of them")
    if options.overload is not None and (options.rate is not None or options.fairness is not None):
        raise ConfigError("overload measures its rates with --concurrency: give neither rate nor fairness")
    rate = None
    if options.rate not in (None, RECORDED):
        rate = positive("rate", options.rate)
    if options.fairness is not None and rate is None:
        raise ConfigError(f"fairness is {options.fairness:g}, so rate must be a number: the quiet tenant's")
    if options.rate == RECORDED and not options.files:
        raise ConfigError("rate is 'recorded', but no file is given")
    clients = None if options.rate is not None else options.concurrency or DEFAULT_CLIENTS
    return Pace(rate, clients, options.process, options.cv, options.speed, options.chats, options.seed)


async def load(options: SimpleNamespace, pace: Pace, sessions: Iterator[Session], live: LiveProgress) -> list[Phase]:
    """Run the phases that the options ask for."""
    fields: dict[str, Any] = {"temperature": options.temperature, "max_tokens": options.output_tokens}
    if options.ignore_eos:
        fields["ignore_eos"] = True
    by_default = DEFAULT_REQUESTS if options.duration is None else None
    limits = Limits(by_default if options.requests is None else options.requests, options.duration)
    endpoint = Endpoint(options.url, options.api_key, options.model, fields, options.timeout)
    keep_recorded = options.history == RECORDED
    scenario = Scenario(endpoint, sessions, limits, keep_recorded, live.phase, live.result)
    for ending in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(RuntimeError, ValueError, NotImplementedError):  # signals reach the main thread only
            asyncio.get_running_loop().add_signal_handler(ending, scenario.stop)
    try:
        if options.warmup:
            await scenario.warm(options.concurrency or DEFAULT_CLIENTS, options.warmup)
        if options.overload is not None:
            return await scenario.overload(pace, [positive("overload", part) for part in options.overload.split(",")])
        if options.fairness is not None:
            return await scenario.fairness(pace, options.fairness)
        return await scenario.once(pace)
    finally:
        await endpoint.close()


def positive(name: str, text: str) -> float:
    """Parse a number above 0. Raises ConfigError."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name} is {text!r}, must be a number above 0")
    return value
