"""Shared parts of all benchmarks: interleaved repetitions, rows with their goals, the machine of a run."""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from headwater.cli.common import prepare_outputs
from headwater.mixers.numerics import end_workers, prepare_process
from headwater.table import Table
from papers import results
from papers.results import RESULTS, refuse_dirty_tree, write_results

HERE = Path(__file__).parent
TICKS = os.sysconf("SC_CLK_TCK")  # a second, in /proc/stat
Figures = dict[str, list[float]]


@dataclass(frozen=True)
class Row:
    """One figure, a value for each repetition. The median is held to `goal`: "<= 1.1", ">= 4" or nothing."""

    name: str
    unit: str
    values: list[float]
    goal: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def met(self) -> bool | None:
        """None if there is no goal."""
        if not self.goal:
            return None
        relation, bound = self.goal.split()
        return self.median <= float(bound) if relation == "<=" else self.median >= float(bound)


def package_digest(*more: Path) -> str:
    """Return a digest of the package and more files: a run does not go on with the figures of other code."""
    digest = hashlib.sha256()
    for file in [*more, *sorted((HERE.parent / "src").rglob("*.py"))]:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def timed(run: Callable[[], object]) -> Callable[[], float]:
    """The same work, returning the seconds it took."""

    def seconds() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return seconds


def in_turns(work: Mapping[str, Callable[[], float]], repeats: int, warm_up: bool = True) -> Figures:
    """Return the results of each piece of work by repetition, after a warm-up round unless all is warm already.

    Each repetition runs all pieces and begins with another one, so that none always follows the same neighbour. What
    computes on this thread leaves no workers beside those of an engine: all of them would sleep between kernels.
    """
    figures: Figures = {name: [] for name in work}
    names = list(work)
    for turn in range(repeats + warm_up):
        gc.collect()
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            figure = work[name]()
            end_workers()
            if turn >= warm_up:
                figures[name].append(figure)
    return figures


def ratios(above: Iterable[float], below: Iterable[float]) -> list[float]:
    """Repetition by repetition."""
    return [a / b for a, b in zip(above, below, strict=True)]


def parser(doc: str | None, name: str, repeats: int) -> argparse.ArgumentParser:
    """Return a parser of the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="sizes that only show that it runs; replaces no results")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json")
    return parser


def numbers(text: str) -> tuple[int, ...]:
    """Read a list of numbers: an option's type."""
    return tuple(int(n) for n in text.split(",") if n)


def prepared(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line, and prepare the process for torch with `--threads`."""
    given = parser.parse_args()
    prepare_outputs(given.out)
    refuse_dirty_tree(given.out, small=given.small)
    prepare_process(given.threads)
    given.begun = cpu_seconds()
    return given


def options(doc: str | None, name: str, repeats: int, **paths: Path) -> argparse.Namespace:
    """Read the command line of one benchmark, and prepare the process for torch.

    `paths`: options that name a file or folder, with their defaults.
    """
    own = parser(doc, name, repeats)
    for option, default in paths.items():
        own.add_argument(f"--{option}", type=Path, default=default)
    return prepared(own)


def cpu_seconds() -> tuple[float, float, float]:
    """Wall time, CPU seconds of the whole machine, and those of this process and the children it has waited for."""
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    stat = Path("/proc/stat")
    busy = own
    if stat.exists():
        user, nice, system, _, _, *interrupts = map(int, stat.read_text().split("\n", 1)[0].split()[1:])
        busy = (user + nice + system + sum(interrupts[:2])) / TICKS
    return time.perf_counter(), busy, own


def busy_with_others(begun: tuple[float, float, float]) -> float:
    """Cores that other processes kept busy since `begun`, on average: figures of a run with many are worth little."""
    wall, busy, own = (now - then for now, then in zip(cpu_seconds(), begun, strict=True))
    return round(max(0.0, busy - own) / wall, 2)


def machine() -> dict[str, object]:
    """Return the commit, machine and versions that a figure depends on."""
    versions = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    return {**results.origin(), **results.machine(), **versions}


def report(given: argparse.Namespace, rows: list[Row], **settings: object) -> None:
    """Write the rows with their median and spread, and print them."""
    run = machine() | {"repeats": given.repeats, "small": given.small}
    run |= {"cores_busy_with_others": busy_with_others(given.begun)} | settings
    shown = [asdict(row) | {"min": min(row.values), "median": row.median, "max": max(row.values)} for row in rows]
    write_results(given.out, {"run": run, "rows": shown}, seed=given.seed, small=given.small)
    table = new_table(f"{given.out.stem}: {run['cores_busy_with_others']} cores were busy with other processes")
    add_rows(table, rows)
    console().print(table)


def read_rows(path: Path) -> list[Row]:
    """The rows that a benchmark wrote."""
    rows = json.loads(path.read_text())["rows"]
    return [Row(row["name"], row["unit"], row["values"], row["goal"]) for row in rows]


def console() -> Console:
    return Console(highlight=False)


def new_table(title: str) -> Table:
    return Table(title, ("figure", "unit"), ("goal", "min", "median", "spread"), ("",))


def add_rows(table: Table, rows: Iterable[Row]) -> None:
    """Figures with their spread: (max - min) / median."""
    for row in rows:
        spread = (max(row.values) - min(row.values)) / abs(row.median) if row.median else 0.0
        verdict = {True: Text("pass", "green"), False: Text("MISS", "red"), None: Text()}[row.met]
        figures = [shown(min(row.values)), shown(row.median), f"{spread:.0%}"]
        table.add_row(row.name, row.unit, row.goal, *figures, verdict)


def shown(value: float) -> str:
    """Four digits or so."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
