"""Rules of a router side by side, over simulated or real workers: hit rates and times to the first token.

    python -m benchmarks.routers [--workers 16,4] [--requests 1000] [--seeds 5] [--pulls NETWORKS] [--small]
        [--out FILE]
    python -m benchmarks.routers --processes [--routers 2] [--workers 3] [--requests 1000] [--seeds 5] [--small]

Without `--processes` all figures are simulated: the lab's servers under a clock, each an H20 by its roofline, behind a
router with the real rules and real KV events, which reach it after a millisecond. Traffic is drawn: a seed draws other
requests of the same kind, and their arrivals. `--requests` are those of 16 workers, fewer workers have fewer.

- Working set: what one worker with endless memory holds in the end. All workers together have a third of it.
- What `least_loaded` sustains: the most sessions a second at which 95% of first tokens come within five seconds.
- Rivals run at the defaults of their projects, and at the best of GRID: the option with the least p95 at the highest
  load with the first seed. Only the largest number of workers has the grid.
- One worker: with the memory, the speed and the slots of all.

With `--pulls off,1.25GB/s,12.5GB/s`, `least_cost` alone is run, over each network that workers pull prefixes over, and
the one worker, with the same memory and with three times as much; rates are those that `least_loaded` sustains with
that memory.

With `--processes` workers are processes of this machine with headwater-tiny, behind real routers, and computing is
emulated: `benchmarks.routed_traffic`. `least_cost` runs beside `approximate_tree` alone.

Prints a table for each cell and writes results/routers.json, pulls.json or routed_traffic.json. Intervals are those of
the mean, at 95%.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS, console, machine
from benchmarks.routed_traffic import Processes
from headwater.cli.common import prepare_outputs
from headwater.cli.replay_tables import as_predicted
from headwater.lab.cluster.rivals import CHOICES
from headwater.lab.cluster.simulation import simulate
from headwater.lab.cost import StepCost, load_device
from headwater.lab.replay import replay
from headwater.lab.row import Result
from headwater.lab.serving import Engine
from headwater.lab.setup import Cluster, Network, Setup
from headwater.models.files import embedded
from headwater.models.profiles import Profile, load_profile
from headwater.table import Table
from headwater.traces.arrivals import Arrivals
from headwater.traces.loads import make_arrivals
from headwater.traces.read import make_trace
from headwater.traces.request import Trace
from papers.results import refuse_dirty_tree, write_results

OUT, OUT_PULLS, OUT_PROCESSES = (RESULTS / f"{name}.json" for name in ("routers", "pulls", "routed_traffic"))
PROFILE, DEVICE = load_profile("qwen3.5-9b"), load_device("h20")
TRAFFIC = {"documents": "generated(27, requests={})", "agents": "generated(39, requests={})"}
THINK = {"documents": 5, "agents": 1}  # seconds on average between an answer and the next request
LOADS = (0.7, 0.9)  # of what least_loaded sustains
SMALLER = 3  # times the memory of all workers that the working set is
WITHIN = 5.0  # seconds for 95% of first tokens
MOST_RATE = 64  # sessions a second of one worker: all come at once
STEPS = 3  # of a search for a rate, each of which halves the interval
EVENT_DELAY = 0.001
MANY = 16  # workers that --requests are for
OURS, TREE = "least_cost", "approximate_tree"
GRID = {
    TREE: (
        "approximate_tree(balance_abs_threshold=2)",
        "approximate_tree(balance_abs_threshold=8)",
        "approximate_tree(cache_threshold=0.1, balance_abs_threshold=8)",
        "approximate_tree(cache_threshold=0.7, balance_abs_threshold=8)",
    ),
    "consecutive_blocks": ("consecutive_blocks(prefix=1.0)", "consecutive_blocks(prefix=4.0)"),
    "dynamo_cost": ("dynamo_cost(0.5)", "dynamo_cost(2.0)", "dynamo_cost(4.0)"),
    "aibrix": ("aibrix(stddev_factor=0.5)", "aibrix(stddev_factor=2.0)"),
}
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}  # by the number of seeds
MS = 1000


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean of one value a seed, and half of its interval at 95%."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        n = len(values)
        spread = statistics.stdev(values) if n > 1 else 0.0
        return cls(statistics.fmean(values), STUDENT.get(n, 1.96) * spread / math.sqrt(n))

    def show(self, digits: int, unit: str = "") -> str:
        return f"{self.mean:,.{digits}f} ± {self.half:,.{digits}f}{unit}"


@cache
def traffic(name: str, requests: int, seed: int) -> Trace:
    return make_trace(TRAFFIC[name].format(requests), None, seed=seed)


def figures(result: Result) -> dict[str, float]:
    """Return the figures of one run that are compared."""
    row = result.row
    assert row.ttft_ms is not None, "a run under a clock has times"
    unused = row.evictions["checkpoint"] - row.checkpoints_hit
    found = {
        "hit_rate": row.token_hit_rate,
        "ideal_hit_rate": row.ideal_hit_rate,
        "mean": row.ttft_ms.mean / MS,
        "p50": row.ttft_ms.p50 / MS,
        "p95": row.ttft_ms.p95 / MS,
        "evicted_before_reuse": max(0, unused) / max(1, row.checkpoints_taken),
    }
    if row.cluster is not None:
        shares = [share.requests for share in row.cluster.workers]
        found |= {"as_predicted": as_predicted(row.cluster), "least": min(shares), "most": max(shares)}
        found |= {"pulled": row.cluster.pulled, "loaded": row.loaded_tokens / row.prompt_tokens}
    return found


@dataclass
class Place:
    """Workers, a kind of traffic, and what they sustain."""

    workers: int
    kind: str
    requests: int
    steps: int = STEPS
    smaller: int = SMALLER
    profile: Profile = PROFILE

    def __post_init__(self) -> None:
        trace = traffic(self.kind, self.requests, 0)
        endless = replay(trace, Setup(self.profile, 10**13, eviction="headwater"), make_arrivals(trace, None))
        held = endless.held[-1]
        self.working_set = (held.kv + held.checkpoints) * endless.page_bytes
        self.setup = Setup(self.profile, self.working_set // (self.smaller * self.workers), eviction="headwater")
        self.rate = self._sustained()

    def run(self, rule: str, rate: float, seed: int, network: Network | None = None) -> dict[str, float]:
        trace = traffic(self.kind, self.requests, seed)
        setup = replace(self.setup, cluster=Cluster(self.workers, rule, EVENT_DELAY, network))
        return figures(simulate(trace, setup, self._arrivals(trace, rate, seed), Engine(StepCost(PROFILE, DEVICE))))

    def one_worker(self, rate: float, seed: int) -> dict[str, float]:
        """Return the figures of one worker that has everything."""
        n, trace = self.workers, traffic(self.kind, self.requests, seed)
        device = replace(
            DEVICE,
            flops16=n * DEVICE.flops16,
            flops32=n * DEVICE.flops32,
            bandwidth=n * DEVICE.bandwidth,
            overhead=DEVICE.overhead / n,
        )
        usual = Engine(StepCost(PROFILE, device))
        engine = replace(usual, max_running=n * usual.max_running, tokens_per_step=n * usual.tokens_per_step)
        setup = replace(self.setup, memory=n * self.setup.memory)
        return figures(replay(trace, setup, self._arrivals(trace, rate, seed), engine))

    def _arrivals(self, trace: Trace, rate: float, seed: int) -> Arrivals:
        return make_arrivals(trace, f"poisson(rate={rate}, think={THINK[self.kind]})", seed)

    def _sustained(self) -> float:
        """Return the most sessions a second that least_loaded sustains, with the first seed; any, without steps."""
        if not self.steps:
            return MOST_RATE * self.workers
        low = 0.5 * self.workers
        while not self._sustains(low):
            low /= 2
        high = 2 * low
        while high < MOST_RATE * self.workers and self._sustains(high):
            low, high = high, 2 * high
        for _ in range(self.steps):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self._sustains(middle) else (low, middle)
        return low

    def _sustains(self, rate: float) -> bool:
        return self.run("least_loaded", rate, 0)["p95"] <= WITHIN


@dataclass
class ProcessPlace(Place):
    """The same with workers in processes of this machine."""

    routers: int = 2

    @cached_property
    def processes(self) -> Processes:
        return Processes(self.workers, self.routers, self.setup.memory)

    def run(self, rule: str, rate: float, seed: int, network: Network | None = None) -> dict[str, float]:
        trace = traffic(self.kind, self.requests, seed)
        return self.processes.run(rule, trace, self._arrivals(trace, rate, seed))

    def one_worker(self, rate: float, seed: int) -> dict[str, float]:
        trace = traffic(self.kind, self.requests, seed)
        return self.processes.one_worker(trace, self._arrivals(trace, rate, seed))


def tuned(place: Place) -> list[str]:
    """Return each rival with the best of its options, if that is not the default."""
    rate, found = max(LOADS) * place.rate, []
    for name, options in GRID.items():
        times = {rule: place.run(rule, rate, 0)["p95"] for rule in (name, *options)}
        found.append(min(times, key=lambda rule: times[rule]))
    return [rule for rule in found if rule not in CHOICES]


def cell(place: Place, load: float, seeds: int, rules: Sequence[str]) -> dict[str, Any]:
    """Return the figures of all rules, and of the one worker, at one load, a list with one value a seed."""
    return compared(place, load, seeds, {rule: (rule, None) for rule in rules})


def cell_of_pulls(place: Place, load: float, seeds: int, networks: Sequence[str]) -> dict[str, Any]:
    """Return the figures of `least_cost` over each network, likewise."""
    return compared(place, load, seeds, {f"pulls: {text}": (OURS, Network.read(text)) for text in networks})


def compared(place: Place, load: float, seeds: int, ways: Mapping[str, tuple[str, Network | None]]) -> dict[str, Any]:
    """Return the figures of each rule with its network, by label, and of the one worker."""
    rate = load * place.rate
    runs = {
        label: [place.run(rule, rate, seed, network) for seed in range(seeds)]
        for label, (rule, network) in ways.items()
    }
    return about(place, load) | {
        "rules": {label: collected(run) for label, run in runs.items()},
        "one_worker": collected([place.one_worker(rate, seed) for seed in range(seeds)]),
    }


def about(place: Place, load: float) -> dict[str, Any]:
    return {
        "computing": "emulated" if isinstance(place, ProcessPlace) else "simulated",
        "workers": place.workers,
        "traffic": place.kind,
        "requests": place.requests,
        "memory_each": place.setup.memory,
        "working_set": place.working_set,
        "sustained_by_least_loaded": place.rate,
        "load": load,
        "sessions_a_second": load * place.rate,
    }


def collected(runs: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    return {name: [round(run[name], 6) for run in runs] for name in runs[0]}


# -- what is printed


def table(found: dict[str, Any]) -> Table:
    """Return a row for each rule of a cell."""
    title = (
        f"{found['workers']} {found['computing']} workers, {found['traffic']}, {found['load']:.0%} of "
        f"{found['sustained_by_least_loaded']:.1f} sessions a second, {found['memory_each'] / 1e6:,.0f} MB each"
    )
    columns = "hits, %", "mean, ms", "p50, ms", "p95, ms", "predicted, %", "evicted unused, %", "pulled"
    shown = Table(title, ("rule",), columns)
    rows = found["rules"] | {"one worker with all of it": found["one_worker"]}
    for label, values in rows.items():
        predicted = values.get("as_predicted")
        shown.add_row(
            label,
            scaled(values["hit_rate"], 100).show(1),
            scaled(values["mean"], MS).show(0),
            scaled(values["p50"], MS).show(0),
            scaled(values["p95"], MS).show(0),
            "" if predicted is None else f"{100 * statistics.fmean(predicted):.2f}",
            f"{100 * statistics.fmean(values['evicted_before_reuse']):.0f}",
            f"{statistics.fmean(values.get('pulled', [0])):.0f}",
        )
    return shown


def goals(found: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """Return each goal of a cell, its figure, and whether it is met; seeds are compared one by one."""
    of, one = found["rules"], found["one_worker"]
    ours = of[OURS]
    best = min((name for name in of if name != OURS), key=lambda name: statistics.fmean(of[name]["p95"]))
    tree, rival = below(ours, of[TREE]), below(ours, of[best])
    lost = points(one, ours)
    right = statistics.fmean(ours["as_predicted"])
    return [
        (f"p95 at least 25% below {TREE}", tree.show(0, "%"), tree.mean >= 25),
        (f"p95 below the best rival, {best}", rival.show(0, "%"), rival.mean > 0),
        ("hits within 1 point of one worker", lost.show(1, " points"), lost.mean <= 1),
        ("predictions right in 99.9%", f"{right:.2%}", right >= 0.999),
    ]


def below(ours: dict[str, list[float]], others: dict[str, list[float]], name: str = "p95") -> Interval:
    """Return by how many per cent the p95, or another figure, of one rule is below that of another."""
    return scaled([1 - mine / theirs for mine, theirs in zip(ours[name], others[name], strict=True)], 100)


def points(more: dict[str, list[float]], less: dict[str, list[float]]) -> Interval:
    """Return by how many points the hit rate of one rule is above that of another."""
    return scaled([one - other for one, other in zip(more["hit_rate"], less["hit_rate"], strict=True)], 100)


def scaled(values: Sequence[float], factor: float) -> Interval:
    return Interval.of([factor * value for value in values])


def gains(found: dict[str, Any]) -> list[str]:
    """Return what pulls over each network change, and what is left to one worker; seeds are compared one by one."""
    without, lines = next(iter(found["rules"].values())), []
    for label, values in found["rules"].items():
        if values is not without:
            hits, mean, p95 = points(values, without), below(values, without, "mean"), below(values, without)
            figures = f"mean {mean.show(0, '%')} and p95 {p95.show(0, '%')} below"
            lines.append(f"{label}: {hits.show(1)} points more hits, {figures}")
        lines.append(f"{label}: hits {points(found['one_worker'], values).show(1)} points below one worker")
    return lines


def show(found: dict[str, Any]) -> None:
    console().print(table(found))
    if TREE not in found["rules"]:
        print("  " + "\n  ".join(gains(found)))
    else:
        for goal, figure, is_met in goals(found):
            print(f"  {'met   ' if is_met else 'missed'} {goal}: {figure}")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--processes", action="store_true", help="workers in processes of this machine")
    parser.add_argument("--routers", type=int, default=2, help="of these processes")
    parser.add_argument("--requests", type=int, default=1000, help=f"of {MANY} workers")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--pulls", help="networks of pulls between workers, with commas, for least_cost; off is without"
    )
    parser.add_argument("--small", action="store_true", help="sizes that only show that it runs; replaces no results")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    prepare_outputs(out := given.out or (OUT_PROCESSES if given.processes else OUT_PULLS if given.pulls else OUT))
    refuse_dirty_tree(out, small=given.small)
    counts, seeds = given.workers or ([3] if given.processes else [MANY, 4]), given.seeds
    if given.small:
        counts, seeds = [2], 1 if given.processes else 2
    cells: list[dict[str, Any]] = []
    for workers in counts:
        for kind, smaller in [(kind, smaller) for kind in TRAFFIC for smaller in (SMALLER, 1)[: 1 + bool(given.pulls)]]:
            if given.small and (kind, smaller) != ("documents", SMALLER):
                continue
            requests = (24 if given.processes else 40) if given.small else max(workers * given.requests // MANY, 100)
            steps = (0 if given.small else 1) if given.processes else 1 if given.small else STEPS
            if given.processes:
                profile = load_profile(str(embedded()))
                place = ProcessPlace(workers, kind, requests, steps, smaller, profile, given.routers)
                rules = [OURS, TREE]
            else:
                place = Place(workers, kind, requests, steps, smaller)
                tunes = workers == max(counts) and not (given.small or given.pulls)
                rules = [*CHOICES, *(tuned(place) if tunes else ())]
            for load in LOADS[: 1 if given.small else None]:
                if given.pulls:
                    cells.append(cell_of_pulls(place, load, seeds, given.pulls.split(",")))
                else:
                    cells.append(cell(place, load, seeds, rules))
                show(cells[-1])
                run = machine() | {
                    "computing": cells[-1]["computing"],
                    "seconds": round(time.process_time()),
                }
                document = {"run": run, "grid": {} if given.pulls else GRID, "cells": cells}
                write_results(out, document, seed=list(range(seeds)), small=given.small)
    print(f"{time.process_time():,.0f} seconds of a processor")


if __name__ == "__main__":
    main()
