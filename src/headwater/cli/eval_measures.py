"""What `headwater eval` can measure: answers to items, a text's perplexity, the divergence of two servers.

Each reads what it needs before a server is started, then prints tables and returns their figures as JSON, and whether
there was any answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from headwater.cli.common import console
from headwater.errors import ConfigError
from headwater.evaluate import divergence, report, text
from headwater.evaluate.asking import Run, Scored
from headwater.evaluate.item import Item, read_items
from headwater.evaluate.server import Server
from headwater.evaluate.summary import Comparison, sliced
from headwater.evaluate.tables import (
    comparison_table,
    divergence_table,
    faults,
    kinds_by_context,
    perplexity_table,
    sliced_table,
)
from headwater.evaluate.ways import PAIRED, SEGMENTS, SINGLE, WAYS

WIDTH = 140  # of tables in a file

Json = dict[str, Any]
Measure = Callable[[Server], tuple[Json, bool]]


def measure_of(options: SimpleNamespace) -> Measure:
    """What the options ask for. Raises ConfigError or TraceError for a file that is not as it should be."""
    compared = [f"--{name}" for name in ("paired", "segments", "against") if getattr(options, name)]
    if len(compared) > 1 or (options.text is not None and compared not in ([], ["--against"])):
        asked = [*(["--text"] if options.text is not None else []), *compared]
        raise ConfigError(f"{' and '.join(asked)} measure different things: ask for one of them")
    if options.text is not None:
        return partial(of_text, options, text.read_utf8(options.text))
    items = read_items(options.tasks)[: options.limit]
    if options.segments:
        items = [item for item in items if item.documents]
        if not items:
            raise ConfigError(f"{options.tasks} has no item with documents, and --segments is about them")
    return partial(of_items if options.against is None else of_servers, options, items)


def server_at(options: SimpleNamespace, url: str) -> Server:
    try:
        return Server(url, options.api_key, options.model_name, options.timeout)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def of_items(options: SimpleNamespace, items: Sequence[Item], server: Server) -> tuple[Json, bool]:
    """Ask, score, tell."""
    ways = PAIRED if options.paired else SEGMENTS if options.segments else SINGLE
    with progress() as bar:
        task = bar.add_task("asking", total=len(items) * sum(len(WAYS[way].columns) for way in ways))
        compares = ways is not SINGLE
        run = run_of(options, items, server, logprobs=compares, on_answer=lambda answered: bar.advance(task))
        columns = run.asked(ways)
    answered = any(one.answered.ok for column in columns.values() for one in column)
    return told(options, columns), answered


def told(options: SimpleNamespace, columns: dict[str, list[Scored]]) -> Json:
    first, *others = columns
    slices = {name: sliced(column, options.seed) for name, column in columns.items()}
    comparisons = {name: Comparison.of(columns[name], columns[first], options.seed) for name in others}
    show(sliced_table(first, slices[first]), kinds_by_context(columns[first], options.seed))
    if comparisons:
        show(comparison_table(first, comparisons))
    show(*(f"{name}: {fault}" for name, column in columns.items() for fault in faults(column)))
    return report.evaluation(columns, slices, comparisons)


def of_servers(options: SimpleNamespace, items: Sequence[Item], server: Server) -> tuple[Json, bool]:
    """The first token after each item's prompt, on two servers."""
    with closing(server_at(options, options.against)) as other, progress() as bar:
        task = bar.add_task("asking both", total=len(items))
        run = run_of(options, items, server)
        pairs, failed = divergence.of_items(run, other, lambda: bar.advance(task))
    found = divergence.Divergence.of(pairs, failed, options.seed)
    show(divergence_table(options.against, found), *(f"{count:,} x {said}" for said, count in failed.items()))
    return {"divergence": asdict(found)}, True


def of_text(options: SimpleNamespace, content: str, server: Server) -> tuple[Json, bool]:
    """Perplexity, and where there is another server, its perplexity and the divergence at every token."""
    tokens = text.tokens_of(server, content)
    if options.against is None:
        found = {server.url: text.Perplexity.of(content, windows(options, server, tokens, 0))}
        show(perplexity_table(options.window, found))
        return {"perplexity": report.perplexities(found)}, True
    with closing(server_at(options, options.against)) as other:
        text.check_equal(tokens, server, text.tokens_of(other, content), other)
        ours, theirs = (windows(options, one, tokens, divergence.MOST) for one in (server, other))
    found = {server.url: text.Perplexity.of(content, ours), other.url: text.Perplexity.of(content, theirs)}
    apart = divergence.Divergence.of(divergence.of_windows(ours, theirs), {}, options.seed)
    show(perplexity_table(options.window, found), divergence_table(options.against, apart))
    return {"perplexity": report.perplexities(found), "divergence": asdict(apart)}, True


def windows(options: SimpleNamespace, server: Server, tokens: Sequence[int], k: int) -> list[text.Window]:
    """The text, scored."""
    stretches = text.cut(tokens, options.window)
    with progress() as bar:
        task = bar.add_task(f"scoring, {server.url}", total=len(stretches))
        return text.scored(server, stretches, k, options.concurrency, lambda: bar.advance(task))


def run_of(options: SimpleNamespace, items: Sequence[Item], server: Server, **more: Any) -> Run:
    return Run(server, items, options.max_tokens, options.thinking, options.concurrency, **more)


def show(*shown: Table | str) -> None:
    wide = console if console.is_terminal else Console(width=WIDTH)
    for one in shown:
        wide.print(one, markup=False, highlight=False)


def progress() -> Progress:
    told_on = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=told_on, transient=True, disable=not told_on.is_terminal)
