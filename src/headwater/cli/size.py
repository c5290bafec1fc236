"""`headwater size`: the memory that recorded traffic needs."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option

from headwater.cache.eviction import make_eviction
from headwater.cache.eviction.clairvoyant import Clairvoyant
from headwater.cache.placement import make_placement
from headwater.cli import common
from headwater.cli.models import profile_for
from headwater.errors import ConfigError
from headwater.journal import Journal
from headwater.lab.cost import StepCost, load_device
from headwater.lab.replay import NewArrivals
from headwater.lab.serving import Engine
from headwater.lab.setup import Setup
from headwater.lab.size import Forecast, Sampling, Size, Sizing, advice, curve
from headwater.lab.tiered_size import TieredSize, TierGrid, tiered_advice
from headwater.lab.tiers import SPELLING, TierLaw
from headwater.setting import OFF, parse_bytes
from headwater.table import Table
from headwater.traces.loads import make_arrivals
from headwater.traces.read import served_by
from headwater.traces.request import Trace

Eviction = Annotated[str | None, Option(help=f"Eviction policy. {common.OWN['eviction']}")]
Placement = Annotated[str | None, Option(help=f"Placement policy of checkpoints. {common.OWN['placement']}")]
Smallest = Annotated[str | None, Option("--from", help="Smallest size; else twice the longest request.")]
Largest = Annotated[str | None, Option("--to", help="Largest size; else the smallest with nearly the ideal hit rate.")]
Points = Annotated[int, Option(min=2, help="Sizes, evenly spaced by ratio.")]
Samples = Annotated[int, Option(min=2, help="Samples of the trace, for the error bars.")]
Rate = Annotated[str, Option(help="Share of the trace that a sample has; auto: by size, checked.")]
Check = Annotated[bool, Option("--check", help="Replay all sizes in full, too, and print by how much they differ.")]
Device = Annotated[str | None, Option(help="A device: with --tier, replays run under a clock. h100, ...")]
TierSizes = Annotated[str, Option(help=f"Also above a store of this size: {SPELLING}; with commas. Needs --serve.")]
MaxRunning = Annotated[int, Option(min=1, help="With --tier: requests that run at once.")]


@common.commands.command()
def size(
    trace: common.TraceFile,
    model: common.ModelName = None,
    weights: common.RecordedWeights = None,
    eviction: Eviction = None,
    placement: Placement = None,
    page_size: common.PageTokens = 64,
    smallest: Smallest = None,
    largest: Largest = None,
    points: Points = 10,
    samples: Samples = 4,
    rate: Rate = "auto",
    check: Check = False,
    serve: Device = None,
    tier: TierSizes = OFF,
    max_running: MaxRunning = 128,
    arrival: common.Arrival = None,
    limit: common.Limit = None,
    data: common.Data = None,
    tokenizer: common.Tokenizer = None,
    block_tokens: common.BlockTokens = None,
    seed: common.Seed = 0,
    jobs: common.Jobs = 0,
    json_file: common.JsonFile = None,
) -> None:
    """Estimate the memory that recorded traffic needs.

    Prints the hit rate for each size of memory, from samples of the trace, and advice. Only prefixes of whole pages
    count, also in prompts made of segments. With --tier, memory and disk: all sizes are replayed in full.
    """
    given = Namespace(**locals())
    sampling = Sampling(samples, _rate(rate), seed, jobs)
    setup = _setup(given)
    ends = [None if end is None else parse_bytes(end) for end in (smallest, largest)]
    tiers = _tiers(tier, serve, check)
    engine = None if serve is None else Engine(StepCost(setup.profile, load_device(serve)), max_running, seed=seed)
    common.prepare_outputs(json_file)
    found = common.read(trace, data, tokenizer, limit, seed, block_tokens)
    journal = _journal(given, found, setup, sampling)
    load = partial(make_arrivals, spelling=arrival, seed=seed, data=data)
    sizing = Sizing(found, setup, load(found), sampling, journal)
    memories = _spaced(sizing, ends, points)
    if engine is None:
        _replay_samples(sizing, memories, check, json_file, journal)
        return
    grid = TierGrid(found, replace(sizing.setup, running=max_running), engine, tuple(memories), tuple(tiers))
    _replay_above_tiers(sizing, grid, load, jobs, json_file, journal)


def _setup(given: Namespace) -> Setup:
    """Return the setup of the options, without its memory. Raises ConfigError for invalid policies."""
    recorded = served_by(given.trace, given.data)
    placement, eviction = common.policies_for(given.placement, given.eviction, recorded)
    profile = profile_for(given.model, recorded, given.weights)
    setup = Setup(profile, 0, placement, eviction, page_size=given.page_size, reuse="prefix")
    _check_policies(setup)
    return setup


def _journal(given: Namespace, found: Trace, setup: Setup, sampling: Sampling) -> Journal:
    """Open the journal of these options, and print how many replays it has."""
    about = [repr(setup), repr(sampling), found.name, len(found.requests), given.arrival, given.smallest, given.largest]
    under_clock = [] if given.serve is None else [given.serve, given.max_running]
    journal = Journal(given.json_file, [*about, *under_clock])
    if journal.found:
        common.progress_console.print(f"{journal.found} replays of an earlier run are used again", highlight=False)
    return journal


def _replay_samples(sizing: Sizing, memories: list[int], check: bool, json_file: Path | None, journal: Journal) -> None:
    """Print and write the hit rates of memories, from samples of the trace, and advice."""
    begin = time.perf_counter()
    with common.progress_console.status("replaying one size, to see which samples are enough"):
        forecast = sizing.forecast(memories)
    if forecast.seconds:
        common.progress_console.print(_remaining_work(forecast), highlight=False)
    with common.progress_console.status("replaying"):
        sizes = sizing.sizes(memories, forecast)
    effort = _effort(sizing, sizes, time.perf_counter() - begin)
    full = _replayed(sizing, sizes) if check else {}
    common.show(_table(sizing, sizes, full))
    lines = advice(curve(sizes, sizing.modelled), sizing.ideal)
    common.show(*lines, *effort)
    rows = [asdict(one) | ({"full_hit_rate": full[one.memory]} if one.memory in full else {}) for one in sizes]
    common.write_json(json_file, _document(sizing, rows, lines))
    journal.end()


def _tiers(spelled: str, serve: str | None, check: bool) -> list[TierLaw | None]:
    """Return no tier and those of the option. Raises ConfigError for options that do not go together."""
    tiers = common.choices(spelled, TierLaw.read)
    if any(tiers) != (serve is not None):
        raise ConfigError(f"--tier {spelled} and --serve {serve or OFF}: each needs the other")
    if check and any(tiers):
        raise ConfigError("--check compares samples with full replays; with --tier all replays are full")
    return list(dict.fromkeys([None, *tiers]))


def _replay_above_tiers(
    sizing: Sizing, grid: TierGrid, load: NewArrivals, jobs: int, json_file: Path | None, journal: Journal
) -> None:
    """Print and write the outcomes of memories above tiers, and advice."""
    sizes: list[TieredSize] = []
    with common.progress("replaying", len(grid.setups)) as advance:
        for one in grid.replayed(load, journal, jobs):
            sizes.append(one)
            advance()
    setup, ideal = sizing.setup, sizing.ideal
    title = f"{sizing.trace.name}, {setup.profile.name}: {setup.placement}, {setup.eviction}; ideal {ideal:.1%}"
    names = "hit rate", "of ideal", "loaded", "in the tier", "TTFT p50, s", "p95"
    table = Table(title, ("memory", "tier"), names, caption=common.formats_line(setup.profile))
    ordered = sorted(sizes, key=lambda one: (one.memory, one.tier != OFF, one.tier))
    for one in ordered:
        cells = f"{one.memory / 1e9:,.4g} GB", one.tier, f"{one.hit_rate:.1%}"
        shares = f"{one.hit_rate / ideal:.1%}" if ideal else "", f"{one.loaded:.1%}", f"{one.disk / 1e9:,.4g} GB"
        table.add_row(*cells, *shares, f"{one.ttft_p50:.2f}", f"{one.ttft_p95:.2f}")
    lines = tiered_advice(ordered, ideal)
    common.show(table, *lines)
    common.write_json(json_file, _document(sizing, [asdict(one) for one in ordered], lines))
    journal.end()


def _remaining_work(forecast: Forecast) -> str:
    """Describe the work that the pilot has left, and its time."""
    n, sampled = len(forecast.counts), forecast.sampled
    if not sampled:
        return f"all {n} sizes are replayed in full, since no sample is good enough: about {duration(forecast.seconds)}"
    parts = max(forecast.counts.values())
    samples = f"{sampled} of {n} sizes from samples of 1/{parts} of the traffic"
    return f"{samples}: about {duration(forecast.seconds)}, at most {duration(forecast.most)} if they prove too small"


def duration(seconds: float) -> str:
    """Format seconds for reading: 40 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _rate(text: str) -> float | None:
    if text == "auto":
        return None
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"--rate is {text!r}, must be auto or a number above 0 and up to 1") from error


def _check_policies(setup: Setup) -> None:
    """Raise ConfigError for invalid policies, before anything is read."""
    make_placement(setup.placement)
    ample = setup.profile.layout(1 << 40, setup.page_size)
    if isinstance(make_eviction(setup.eviction, ample), Clairvoyant):
        raise ConfigError("eviction 'clairvoyant' knows the order of a whole trace, not of its samples")


def _spaced(sizing: Sizing, ends: Sequence[int | None], points: int) -> list[int]:
    """Return sizes of three digits between both ends."""
    low, high = (own if given is None else given for given, own in zip(ends, sizing.range(), strict=True))
    if not low < high:
        raise ConfigError(f"sizes from {low:,} to {high:,} bytes: the second must be larger than the first")
    if low < sizing.least:
        least = f"{sizing.least:,}: a page, a slot and a checkpoint"
        raise ConfigError(f"--from is {low:,} bytes, must be at least {least}")
    sizes = (low * (high / low) ** (number / (points - 1)) for number in range(points))
    return sorted({int(float(f"{size:.2e}")) for size in sizes})


def _replayed(sizing: Sizing, sizes: Sequence[Size]) -> dict[int, float]:
    begin = time.perf_counter()
    with common.progress_console.status("replaying in full"):
        full = sizing.replayed([one.memory for one in sizes if one.rate < 1])
    common.progress_console.print(f"checked in {time.perf_counter() - begin:.1f} s", highlight=False)
    return full


def _table(sizing: Sizing, sizes: Sequence[Size], full: dict[int, float]) -> Table:
    trace, setup, ideal = sizing.trace, sizing.setup, sizing.ideal
    title = f"{trace.name}, {setup.profile.name}: {setup.placement}, {setup.eviction}; ideal {ideal:.1%}"
    names = ("hit rate", "±", "of ideal", "replayed", *(("in full", "off by") if full else ()))
    caption = "\n".join((*trace.notes, common.formats_line(setup.profile)))
    table = Table(title, ("memory",), names, caption=caption)
    for one in sizes:
        cells = [f"{one.memory / 1e9:,.4g} GB", f"{one.hit_rate:.1%}", f"{100 * one.error:.1f}" if one.error else ""]
        cells += [f"{one.hit_rate / ideal:.1%}" if ideal else "", "all" if one.rate == 1 else f"1/{1 / one.rate:.0f}"]
        if one.memory in full:
            cells += [f"{full[one.memory]:.1%}", f"{100 * (one.hit_rate - full[one.memory]):+.2f}"]
        table.add_row(*cells)
    return table


def _effort(sizing: Sizing, sizes: Sequence[Size], seconds: float) -> list[str]:
    """Return lines that say which sizes were replayed in full, and the work that samples spared."""
    sampled = sum(one.rate < 1 for one in sizes)
    if not sampled:
        return [f"all {len(sizes)} sizes were replayed in full, {seconds:.1f} s"]
    work = sizing.replayed_tokens / sizing.prompt_tokens / len(sizes)
    return [
        f"{sampled} of {len(sizes)} sizes from {sizing.sampling.samples} samples each, the others replayed in full",
        f"{work:.0%} of the work of replaying all, {seconds:.1f} s",
    ]


def _document(sizing: Sizing, rows: Sequence[dict[str, object]], lines: Sequence[str]) -> dict[str, object]:
    setup = sizing.setup
    policies = {"placement": setup.placement, "eviction": setup.eviction, "page_size": setup.page_size}
    names = {"trace": sizing.trace.name, "model": setup.profile.name, **common.formats(setup.profile)}
    return {**names, **policies, "ideal_hit_rate": sizing.ideal, "sizes": list(rows), "advice": list(lines)}
